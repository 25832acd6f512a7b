"""LRU against an exact and naive leaf-LRU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.interfaces import EvictionPolicy
from kvtier.policies.lru import LRU
from kvtier.testing.policy_machine import CAPACITY_BYTES, NaiveBooks, PolicyMachine
from kvtier.types import ChunkKey, Entry, Features

STEPS = settings(stateful_step_count=40)
# A machine that is meant to fail need not explain itself with the shortest example.
# A liar is to be caught whatever the seed: the search ends at the first lie, so it may be long.
UNSHRUNK = settings(STEPS, phases=(Phase.generate,), print_blob=False, max_examples=5_000)


class NaiveLeafLRU(NaiveBooks):
    """Knows who goes next: of all leaves that may go, the one that was used longest ago.

    What lost its parent is older than everything that was used, whoever lost it last the oldest.
    All that one removal orphaned is equally old.
    """

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.age: dict[ChunkKey, int] = {}
        self._uses = 0
        self._removals = 0

    def use(self, key: ChunkKey) -> None:
        if key in self.held:
            self._uses += 1
            self.age[key] = self._uses

    def orphan(self, key: ChunkKey) -> None:
        if key not in self.held:
            return
        self._removals -= 1
        below = self.children(key)
        while below:
            for child in below:
                self.age[child] = self._removals
            below = {grandchild for child in below for grandchild in self.children(child)}

    def check_admission(self, entry: Entry, victims: list[ChunkKey] | None) -> None:
        left = dict(self.held)
        for victim in victims or []:
            parents = {e.parent for e in left.values()} | {entry.parent}
            leaves = [key for key in left if key not in parents and key not in self.pins]
            if victim not in leaves:
                break  # The contract's own check says what is wrong.
            assert self.age[victim] == min(self.age[key] for key in leaves), "an older leaf stays"
            del left[victim]
        super().check_admission(entry, victims)
        if victims is not None:
            self.use(entry.key)


class LRUMachine(PolicyMachine):
    def make_policy(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> EvictionPolicy:
        return LRU(capacity_bytes, pinned)

    def make_books(self) -> NaiveBooks:
        return NaiveLeafLRU(CAPACITY_BYTES)

    def note_touch(self, key: ChunkKey) -> None:
        assert isinstance(self.books, NaiveLeafLRU)
        self.books.use(key)

    def note_remove(self, key: ChunkKey) -> None:
        assert isinstance(self.books, NaiveLeafLRU)
        self.books.orphan(key)


LRUMachine.TestCase.settings = STEPS
TestLRUMachine = LRUMachine.TestCase


class ForgetsTouches(LRU):
    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        del key, now, features


def test_the_machine_catches_a_policy_that_forgets_touches() -> None:
    """Only books that know the exact order can; other lies are in ``test_policy_canaries``."""

    class Machine(LRUMachine):
        def make_policy(
            self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
        ) -> EvictionPolicy:
            return ForgetsTouches(capacity_bytes, pinned)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=UNSHRUNK)
