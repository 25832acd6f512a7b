"""Paged attention back ends."""
