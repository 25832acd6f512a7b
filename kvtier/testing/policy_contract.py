"""What every eviction policy must do. Subclass in a test module and supply ``make_policy``::

    class TestMyPolicy(EvictionPolicyContract):
        def make_policy(self, capacity_bytes, pinned):
            return MyPolicy(capacity_bytes, pinned)

``policy_machine`` asks the same of arbitrary orders of calls.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Final

import pytest

from kvtier.errors import ConfigError
from kvtier.interfaces import EvictionPolicy
from kvtier.testing.policy_machine import NaiveBooks, chunk_key
from kvtier.types import ChunkKey, Entry, Features, Hint

BLOCKS: Final = 100_000
#: Generous for a shared and busy machine; a cost that grows with what is held takes minutes.
BLOCKS_TIME_S_MAX: Final = 30.0
_FEATURES: Final = Features()


def entry_of(name: object, parent: object | None = None, nbytes: int = 1) -> Entry:
    """Return an entry whose key, and whose parent's key, follow from names."""
    above = None if parent is None else chunk_key(parent)
    return Entry(chunk_key(name), above, nbytes, 0 if parent is None else 1)


def keys_of(*names: object) -> list[ChunkKey]:
    """Return the keys of names."""
    return [chunk_key(name) for name in names]


class EvictionPolicyContract(ABC):
    """Tests of the ``EvictionPolicy`` protocol."""

    @abstractmethod
    def make_policy(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> EvictionPolicy:
        """Make an empty policy."""

    def holding(
        self,
        capacity_bytes: int,
        entries: Iterable[Entry],
        pins: set[ChunkKey] | None = None,
    ) -> EvictionPolicy:
        """Make a policy that holds entries which fit. ``pins`` may be changed later."""
        pinned = pins if pins is not None else set()
        policy = self.make_policy(capacity_bytes, pinned.__contains__)
        for entry in entries:
            assert policy.admit(entry, 0.0) == []
        return policy

    def drain(self, policy: EvictionPolicy, capacity_bytes: int) -> list[ChunkKey]:
        """Make everything leave and return it in order."""
        victims = policy.admit(entry_of("drain", nbytes=capacity_bytes), 1000.0)
        assert victims is not None
        policy.remove(chunk_key("drain"))
        return victims

    def test_is_a_policy(self) -> None:
        """The type has every method of the protocol."""
        assert isinstance(self.make_policy(1, lambda _: False), EvictionPolicy)

    @pytest.mark.parametrize("capacity_bytes", [0, -1])
    def test_capacity_is_above_zero(self, capacity_bytes: int) -> None:
        """A policy for nothing is a mistake."""
        with pytest.raises(ConfigError):
            self.make_policy(capacity_bytes, lambda _: False)

    def test_bytes_are_counted(self) -> None:
        """What fits evicts nothing, exactly up to the capacity; one byte more does."""
        policy = self.holding(10, [entry_of("a", nbytes=4), entry_of("b", nbytes=6)])
        victims = policy.admit(entry_of("c", nbytes=1), 1.0)
        assert victims is not None
        assert len(victims) == 1

    def test_as_many_leave_as_needed_and_no_more(self) -> None:
        """Small ones make room for a large one; the last of them was needed."""
        names = list(range(10))
        policy = self.holding(10, [entry_of(name) for name in names])
        victims = policy.admit(entry_of("large", nbytes=7), 1.0)
        assert victims is not None
        assert len(victims) == 7
        assert set(victims) < set(keys_of(*names))

    def test_an_entry_larger_than_the_capacity_is_refused(self) -> None:
        """And nothing leaves for it."""
        policy = self.holding(10, [entry_of("a"), entry_of("b", "a")])
        assert policy.admit(entry_of("huge", nbytes=11), 1.0) is None
        assert set(self.drain(policy, 10)) == set(keys_of("a", "b"))

    def test_an_entry_as_large_as_the_capacity_drives_out_all(self) -> None:
        """Children before parents."""
        policy = self.holding(10, [entry_of("a"), entry_of("b", "a"), entry_of("c", "b")])
        assert policy.admit(entry_of("whole", nbytes=10), 1.0) == keys_of("c", "b", "a")

    def test_leaves_go_first_however_old_their_parents_are(self) -> None:
        """A parent that was never touched again outlives its children."""
        policy = self.holding(3, [entry_of("a"), entry_of("b", "a"), entry_of("c", "a")])
        for turn in range(2, 6):
            policy.touch(chunk_key("b"), turn, _FEATURES)
            policy.touch(chunk_key("c"), turn, _FEATURES)
        victims = policy.admit(entry_of("d", nbytes=2), 9.0)
        assert victims is not None
        assert set(victims) == set(keys_of("b", "c"))

    def test_ancestors_of_the_entry_stay(self) -> None:
        """A chain that fills the capacity refuses to grow: its own prefix may not leave for it."""
        policy = self.holding(3, [entry_of("a"), entry_of("b", "a"), entry_of("c", "b")])
        assert policy.admit(entry_of("d", "c"), 1.0) is None
        assert self.drain(policy, 3) == keys_of("c", "b", "a")

    def test_b39_making_room_for_a_batch_evicts_nothing_of_it(self) -> None:
        """A chunk that is stored again with its continuation stays; the others leave."""
        policy = self.holding(4, [entry_of(name) for name in (2, "A", "B", "C")])
        batch = [entry_of(3, 2), entry_of(4, 3), entry_of(5, 4)]
        policy.touch(chunk_key(2), 1.0, _FEATURES)
        left: list[ChunkKey] = []
        for turn, entry in enumerate(batch):
            victims = policy.admit(entry, 2.0 + turn)
            assert victims is not None
            left += victims
        assert set(left) == set(keys_of("A", "B", "C"))
        assert set(self.drain(policy, 4)) == set(keys_of(2, 3, 4, 5))

    def test_pinned_chunks_and_what_is_above_them_stay(self) -> None:
        """A pin holds its whole prefix, because leaves go first."""
        pins = set(keys_of("b"))
        entries = [entry_of("a"), entry_of("b", "a"), entry_of("c", "b"), entry_of("x")]
        policy = self.holding(4, entries, pins)
        victims = policy.admit(entry_of("d", nbytes=2), 1.0)
        assert victims is not None
        assert set(victims) == set(keys_of("c", "x"))
        assert policy.admit(entry_of("e", nbytes=3), 2.0) is None
        pins.clear()
        assert policy.admit(entry_of("f", nbytes=4), 3.0) is not None

    def test_a_refusal_changes_nothing(self) -> None:
        """Neither what is held nor, for a policy asked twice, what it answers."""
        pins = set(keys_of("c"))
        entries = [entry_of(name) for name in ("a", "b", "c", "d")]
        refused = self.holding(4, entries, pins)
        unasked = self.holding(4, entries, pins)
        for turn in range(3):
            assert refused.admit(entry_of("new", nbytes=4), 1.0 + turn) is None
        for name in ("e", "f", "g"):
            entry = entry_of(name)
            assert refused.admit(entry, 9.0) == unasked.admit(entry, 9.0)

    def test_a_parent_that_comes_back_has_its_children_again(self) -> None:
        """It leaves after them, also when its first try to come back was refused."""
        pins: set[ChunkKey] = set()
        policy = self.holding(3, [entry_of("a"), entry_of("b", "a"), entry_of("c", "a")], pins)
        policy.remove(chunk_key("a"))
        pins.add(chunk_key("b"))
        assert policy.admit(entry_of("a", nbytes=3), 1.0) is None
        assert policy.admit(entry_of("a"), 2.0) == []
        for name in ("c", "b"):
            policy.touch(chunk_key(name), 3.0, _FEATURES)
        pins.clear()
        assert self.drain(policy, 3)[-1] == chunk_key("a")

    def test_victims_are_forgotten_at_once(self) -> None:
        """A victim may be admitted again; its bytes count once."""
        policy = self.holding(2, [entry_of("a"), entry_of("b")])
        victims = policy.admit(entry_of("c", nbytes=2), 1.0)
        assert victims is not None
        assert set(victims) == set(keys_of("a", "b"))
        assert policy.admit(entry_of("a", nbytes=2), 2.0) == keys_of("c")

    def test_remove_gives_the_bytes_back(self) -> None:
        """What left for another reason is neither counted nor named again."""
        policy = self.holding(2, [entry_of("a"), entry_of("b")])
        policy.remove(chunk_key("a"))
        assert policy.admit(entry_of("c"), 1.0) == []
        assert set(self.drain(policy, 2)) == set(keys_of("b", "c"))

    def test_what_lost_its_parent_leaves_first(self) -> None:
        """No lookup reaches the descendants of a chunk that vanished, however fresh they are."""
        entries = [entry_of("a"), entry_of("b", "a"), entry_of("c", "b"), entry_of("x")]
        policy = self.holding(5, [*entries, entry_of("d", "c")])
        for name in ("d", "c", "b", "a"):
            policy.touch(chunk_key(name), 5.0, _FEATURES)
        policy.remove(chunk_key("b"))
        victims = policy.admit(entry_of("e", nbytes=3), 6.0)
        assert victims == keys_of("d", "c")

    def test_unknown_keys_are_ignored(self) -> None:
        """Touching or removing what is not held does nothing."""
        policy = self.holding(2, [entry_of("a"), entry_of("b")])
        policy.touch(chunk_key("nobody"), 1.0, Features(turn=3, hint=Hint.DONE))
        policy.remove(chunk_key("nobody"))
        assert set(self.drain(policy, 2)) == set(keys_of("a", "b"))

    def test_a_decision_does_not_cost_what_is_held(self) -> None:
        """Chains of blocks, twice what fits, touched as they come: amortised time stays small."""
        length, capacity = 100, BLOCKS // 2
        policy = self.make_policy(capacity, lambda _: False)
        held = 0
        started = time.monotonic()
        for block in range(BLOCKS):
            chain, depth = divmod(block, length)
            parent = (chain, depth - 1) if depth else None
            victims = policy.admit(entry_of((chain, depth), parent), float(block))
            assert victims is not None
            held += 1 - len(victims)
            policy.touch(chunk_key((chain // 2, depth)), float(block), _FEATURES)
        assert held == capacity
        assert time.monotonic() - started < BLOCKS_TIME_S_MAX

    def test_children_that_come_and_go_cost_nothing_in_the_end(self) -> None:
        """A prefix that everybody shares sees many children; it is not remembered for each."""
        policy = self.holding(2, [entry_of("root")])
        started = time.monotonic()
        for turn in range(BLOCKS):
            assert policy.admit(entry_of("child", "root"), float(turn)) == []
            policy.remove(chunk_key("child"))
        assert time.monotonic() - started < BLOCKS_TIME_S_MAX
        assert self.drain(policy, 2) == keys_of("root")

    def test_books_follow_a_long_history(self) -> None:
        """Twenty sessions that share two prefixes, held against the plainest books there are."""
        books = NaiveBooks(40)
        policy = self.make_policy(40, books.pinned)
        for turn in range(400):
            session, depth = turn % 20, turn // 20 % 8
            name = (session if depth > 2 else session % 2, depth)
            if depth and chunk_key((session, depth - 1)) in books.held:
                parent: object | None = (session, depth - 1)
            else:
                parent = (session % 2, depth - 1) if depth else None
            entry = entry_of(name, parent, nbytes=1 + session % 3)
            if entry.key in books.held:
                policy.touch(entry.key, float(turn), _FEATURES)
            else:
                books.check_admission(entry, policy.admit(entry, float(turn)))
