"""The disk tier: bounded, crash-safe, verified on every read."""
