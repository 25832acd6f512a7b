"""Gittins keeps the contract of eviction policies, weighted by cost or not."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.interfaces import EvictionPolicy
from kvtier.policies.gittins import Gittins
from kvtier.policies.gittins_cost import GittinsCost
from kvtier.testing.policy_contract import EvictionPolicyContract
from kvtier.types import ChunkKey


class TestGittins(EvictionPolicyContract):
    def make_policy(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> EvictionPolicy:
        return Gittins(capacity_bytes, pinned)


class TestGittinsCost(EvictionPolicyContract):
    def make_policy(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> EvictionPolicy:
        return GittinsCost(capacity_bytes, pinned)
