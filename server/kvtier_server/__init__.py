"""The cache server: one process per host that owns tiers and serves many engines."""
