"""ARC under any order of calls."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings

from kvtier.interfaces import EvictionPolicy
from kvtier.policies.arc import ARC
from kvtier.testing.policy_machine import PolicyMachine
from kvtier.types import ChunkKey

STEPS = settings(stateful_step_count=40)


class ARCMachine(PolicyMachine):
    def make_policy(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> EvictionPolicy:
        return ARC(capacity_bytes, pinned)


ARCMachine.TestCase.settings = STEPS
TestARCMachine = ARCMachine.TestCase
