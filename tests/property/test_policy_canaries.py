"""The machine itself, against policies that lie: each lie told by each policy is found out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.interfaces import EvictionPolicy
from kvtier.policies.arc import ARC
from kvtier.policies.gittins import Gittins
from kvtier.policies.gittins_cost import GittinsCost
from kvtier.policies.lru import LRU
from kvtier.sim.replay import PolicyFactory
from kvtier.testing.policy_machine import PolicyMachine
from kvtier.types import ChunkKey, Entry, Features

# A machine that is meant to fail need not explain itself with the shortest example.
# A liar is to be caught whatever the seed: the search ends at the first lie, so it may be long.
UNSHRUNK = settings(
    stateful_step_count=40, phases=(Phase.generate,), print_blob=False, max_examples=5_000
)


class Liar:
    """Passes everything on to an honest policy. A subclass tells one lie."""

    def __init__(
        self, make: PolicyFactory, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> None:
        self.honest = make(capacity_bytes, pinned)

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        return self.honest.admit(entry, now)

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        self.honest.touch(key, now, features)

    def remove(self, key: ChunkKey) -> None:
        self.honest.remove(key)


class ForgetsPins(Liar):
    def __init__(
        self, make: PolicyFactory, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> None:
        del pinned
        super().__init__(make, capacity_bytes, lambda _: False)


class TooLarge(Liar):
    def __init__(
        self, make: PolicyFactory, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> None:
        super().__init__(make, capacity_bytes + 1, pinned)


class TooSmall(Liar):
    def __init__(
        self, make: PolicyFactory, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> None:
        super().__init__(make, capacity_bytes - 1, pinned)


class ParentsFirst(Liar):
    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        victims = super().admit(entry, now)
        return victims[::-1] if victims else victims


class NeverRemoves(Liar):
    def remove(self, key: ChunkKey) -> None:
        del key


@pytest.mark.parametrize("lie", [ForgetsPins, TooLarge, TooSmall, ParentsFirst, NeverRemoves])
@pytest.mark.parametrize("honest", [LRU, ARC, Gittins, GittinsCost])
def test_the_machine_catches_a_policy_that_lies(honest: PolicyFactory, lie: type[Liar]) -> None:
    class Machine(PolicyMachine):
        def make_policy(
            self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
        ) -> EvictionPolicy:
            return lie(honest, capacity_bytes, pinned)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=UNSHRUNK)
