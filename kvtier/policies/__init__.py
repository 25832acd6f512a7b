"""Eviction policies: pure bookkeeping, one file each."""
