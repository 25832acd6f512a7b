"""LRU keeps the contract of eviction policies."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.interfaces import EvictionPolicy
from kvtier.policies.lru import LRU
from kvtier.testing.policy_contract import EvictionPolicyContract
from kvtier.types import ChunkKey


class TestLRU(EvictionPolicyContract):
    def make_policy(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> EvictionPolicy:
        return LRU(capacity_bytes, pinned)
