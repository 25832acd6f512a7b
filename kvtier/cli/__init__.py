"""The kvtier command."""
