"""Seeing: counters, log lines that are limited."""
