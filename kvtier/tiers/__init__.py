"""Capacity-bounded levels: index, policy and medium."""
