"""ARC keeps the contract of eviction policies."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.interfaces import EvictionPolicy
from kvtier.policies.arc import ARC
from kvtier.testing.policy_contract import EvictionPolicyContract
from kvtier.types import ChunkKey


class TestARC(EvictionPolicyContract):
    def make_policy(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> EvictionPolicy:
        return ARC(capacity_bytes, pinned)
