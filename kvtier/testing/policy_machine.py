"""A Hypothesis state machine for eviction policies, with books of its own. Subclass it::

    class MyPolicyMachine(PolicyMachine):
        def make_policy(self, capacity_bytes, pinned):
            return MyPolicy(capacity_bytes, pinned)

    TestMyPolicy = MyPolicyMachine.TestCase

The oracle searches everything afresh for every decision and shares no code with any policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.interfaces import EvictionPolicy
from kvtier.types import ChunkKey, Entry, Features, Hint

CAPACITY_BYTES: Final = 100
_KEYS: Final = 8
# Mostly small, so that several fit; what cannot fit beside a pin, and what never fits.
_SIZES: Final = (5, 9, 10, 14, 20, 23, 25, 30, 41, 60, CAPACITY_BYTES, CAPACITY_BYTES + 1)
_PICKS: Final = strategies.integers(0, _KEYS)
_FEATURES: Final = (Features(), Features(turn=4, hint=Hint.WILL_CONTINUE), Features(hint=Hint.DONE))


def chunk_key(name: object) -> ChunkKey:
    """Return a chunk key that follows from a name."""
    return ChunkKey(hashlib.sha256(repr(name).encode()).digest())


@runtime_checkable
class HasIntegrity(Protocol):
    """Books that can be asked whether they agree with themselves."""

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where they do not."""
        ...


class NaiveBooks:
    """What a policy must know, kept in the plainest way: entries in a dict, searched each time."""

    def __init__(self, capacity_bytes: int) -> None:
        """Begin empty."""
        self.capacity_bytes = capacity_bytes
        self.held: dict[ChunkKey, Entry] = {}
        self.pins: set[ChunkKey] = set()

    def pinned(self, key: ChunkKey) -> bool:
        """Tell whether a chunk must stay."""
        return key in self.pins

    @property
    def used_bytes(self) -> int:
        """Bytes of everything held."""
        return sum(entry.nbytes for entry in self.held.values())

    def children(self, key: ChunkKey) -> set[ChunkKey]:
        """Return the held children of a key."""
        return {entry.key for entry in self.held.values() if entry.parent == key}

    def ancestors(self, entry: Entry) -> set[ChunkKey]:
        """Return the held ancestors of an entry, up to the first that is not held."""
        found: set[ChunkKey] = set()
        parent = entry.parent
        while parent is not None and parent in self.held:
            found.add(parent)
            parent = self.held[parent].parent
        return found

    def may_leave(self, entry: Entry) -> set[ChunkKey]:
        """Return all that could leave for an entry: every one with nothing below it that stays."""
        stays = self.pins | self.ancestors(entry)
        for key in list(stays):
            if key in self.held:
                stays |= self.ancestors(self.held[key])
        return set(self.held) - stays

    def check_admission(self, entry: Entry, victims: list[ChunkKey] | None) -> None:
        """Hold a policy's answer against the contract, then do what it says."""
        free = self.capacity_bytes - self.used_bytes
        could_free = sum(self.held[key].nbytes for key in self.may_leave(entry))
        if victims is None:
            assert free + could_free < entry.nbytes, "refused what had room"
            return
        assert len(set(victims)) == len(victims), "a victim is named twice"
        ancestors = self.ancestors(entry)
        for victim in victims:
            assert free < entry.nbytes, "a victim more than needed"
            assert victim in self.held, "a victim that is not held"
            assert victim not in self.pins, "a victim that is pinned"
            assert victim not in ancestors, "an ancestor of the entry leaves for it"
            assert not self.children(victim), "a victim leaves before its children"
            free += self.held.pop(victim).nbytes
        assert free >= entry.nbytes, "admitted beyond the capacity"
        self.held[entry.key] = entry


class PolicyMachine(RuleBasedStateMachine):
    """Any order of calls that the protocol allows, each answer held against ``NaiveBooks``."""

    def __init__(self) -> None:
        """Begin with an empty policy of ``CAPACITY_BYTES``."""
        super().__init__()
        self.books = self.make_books()
        self.policy = self.make_policy(CAPACITY_BYTES, self.books.pinned)
        self._now = 0.0

    def make_policy(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]
    ) -> EvictionPolicy:
        """Make the policy under test, empty. A subclass supplies it."""
        del capacity_bytes, pinned
        raise AssertionError("the subclass under test makes its policy")

    def make_books(self) -> NaiveBooks:
        """Make the oracle; a policy whose order is known exactly supplies a stricter one."""
        return NaiveBooks(CAPACITY_BYTES)

    @rule(
        name=strategies.integers(0, _KEYS - 1),
        above=strategies.sampled_from((1, 1, 2, 3, _KEYS)),
        nbytes=strategies.sampled_from(_SIZES),
    )
    def admit(self, name: int, above: int, nbytes: int) -> None:
        """Admit a key that is not held, under any parent, held or gone or never seen.

        The parent is the key ``above`` numbers less; there is none below 0.
        """
        key = chunk_key(name)
        parent = chunk_key(name - above) if name >= above else None
        if key in self.books.held:
            return
        entry = Entry(key, parent, nbytes, 0 if parent is None else 1)
        self._step()
        self.books.check_admission(entry, self.policy.admit(entry, self._now))

    @rule(pick=_PICKS, features=strategies.sampled_from(_FEATURES))
    def touch(self, pick: int, features: Features) -> None:
        """Touch a key, most often one that is held."""
        key = self._pick(pick)
        self._step()
        self.policy.touch(key, self._now, features)
        self.note_touch(key)

    @rule(pick=_PICKS)
    def remove(self, pick: int) -> None:
        """Remove a key, most often one that is held, whatever lies below it."""
        key = self._pick(pick)
        self.policy.remove(key)
        self.note_remove(key)
        self.books.held.pop(key, None)

    @precondition(lambda self: len(self.books.pins) < _KEYS // 2)
    @rule(pick=_PICKS)
    def pin(self, pick: int) -> None:
        """Pin a key, most often one that is held."""
        self.books.pins.add(self._pick(pick))

    @precondition(lambda self: self.books.pins)
    @rule()
    def unpin_all(self) -> None:
        """Let everything leave again."""
        self.books.pins.clear()

    def note_touch(self, key: ChunkKey) -> None:
        """Tell a stricter oracle of a touch."""

    def note_remove(self, key: ChunkKey) -> None:
        """Tell a stricter oracle of a removal, before it happens in the books."""

    @invariant()
    def agrees_with_itself(self) -> None:
        """Ask the policy, if it can say."""
        if isinstance(self.policy, HasIntegrity):
            self.policy.check_integrity()

    def teardown(self) -> None:
        """Drive everything out: what leaves is exactly what the books hold."""
        self.books.pins.clear()
        entry = Entry(chunk_key("last"), None, CAPACITY_BYTES, 0)
        self._step()
        self.books.check_admission(entry, self.policy.admit(entry, self._now))
        assert set(self.books.held) == {entry.key}, "the policy held less than it was given"

    def _pick(self, pick: int) -> ChunkKey:
        """Return the held key of that number, counted round; beyond the last pick, one unknown."""
        held = [key for key in map(chunk_key, range(_KEYS)) if key in self.books.held]
        return held[pick % len(held)] if held and pick < _KEYS else chunk_key("unknown")

    def _step(self) -> None:
        self._now += 1.0
