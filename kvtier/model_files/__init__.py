"""Folders with a model's files: what is in them, whose weights they are, and what follows."""
