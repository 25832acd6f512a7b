"""Plugs for engines that people run already: thin, engine types in, Cache calls out."""
