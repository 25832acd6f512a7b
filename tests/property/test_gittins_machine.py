"""Gittins under any order of calls, weighted by cost or not."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings

from kvtier.interfaces import EvictionPolicy
from kvtier.policies.gittins import Gittins
from kvtier.policies.gittins_cost import GittinsCost
from kvtier.testing.policy_machine import PolicyMachine
from kvtier.types import ChunkKey

STEPS = settings(stateful_step_count=40)


class GittinsMachine(PolicyMachine):
    def make_policy(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> EvictionPolicy:
        return Gittins(capacity_bytes, pinned)


class GittinsCostMachine(PolicyMachine):
    def make_policy(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> EvictionPolicy:
        return GittinsCost(capacity_bytes, pinned)


GittinsMachine.TestCase.settings = STEPS
TestGittinsMachine = GittinsMachine.TestCase
GittinsCostMachine.TestCase.settings = STEPS
TestGittinsCostMachine = GittinsCostMachine.TestCase
