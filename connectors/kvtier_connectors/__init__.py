"""Connectors: each file moves opaque bytes to one medium and knows nothing of its neighbours."""
