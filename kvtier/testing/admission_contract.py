"""What every admission must do. Subclass in a test module and supply ``make_admission``::

class TestMyAdmission(AdmissionPolicyContract):
    def make_admission(self, capacity_bytes):
        return MyAdmission(capacity_bytes)
"""

from __future__ import annotations

import random
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest

from kvtier.errors import ConfigError
from kvtier.interfaces import AdmissionPolicy
from kvtier.testing.policy_machine import chunk_key
from kvtier.types import ChunkKey, Entry, Features, Hint

CHUNK_BYTES: Final = 10
#: A chunk asked for this often is worth a write to anyone.
OFFERS_UNTIL_WRITTEN: Final = 1000
#: Chunks after which an admission of any size may not know more than it does.
CHUNKS_UNTIL_BOUNDED: Final = 70_000
_CHUNKS_MORE: Final = 10_000
#: What may be remembered of a chunk, its key and its place in a dict or list counted.
REMEMBERED_BYTES_MAX: Final = 400
_HINTS: Final = tuple(Hint)


def path_of(*names: object, features: Features | None = None) -> list[Entry]:
    """Return the entries of a prefix whose chunks are named one after the other."""
    keys = [chunk_key(names[: at + 1]) for at in range(len(names))]
    parents: list[ChunkKey | None] = [None, *keys[:-1]]
    return [
        Entry(key, parent, CHUNK_BYTES, at, features or Features())
        for at, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]


@dataclass(slots=True)
class TierBelow:
    """A tier that writes what an admission wants and gives up the oldest, and its books.

    It refuses a chunk whose parent it does not hold, as the disk tier does.
    """

    admission: AdmissionPolicy
    chunk_count: int
    held: dict[ChunkKey, ChunkKey | None] = field(default_factory=dict)  # parents, oldest first
    answers: list[bool] = field(default_factory=list)

    def access(self, path: Sequence[Entry], now: float) -> None:
        """Ask for a prefix: touch what is held, offer the rest, parents first."""
        for entry in path:
            if entry.key in self.held:
                self.admission.touch(entry.key, now, entry.features)
                self.held[entry.key] = self.held.pop(entry.key)
                continue
            is_wanted = self.admission.offer(entry, now)
            self.answers.append(is_wanted)
            assert isinstance(is_wanted, bool), f"offer answered {is_wanted!r}"
            if is_wanted:
                assert entry.parent is None or entry.parent in self.held, (
                    "a child is wanted whose parent was refused a moment ago"
                )
                self.held[entry.key] = entry.parent
        while len(self.held) > self.chunk_count:
            parents = set(self.held.values())
            leaf = next(key for key in self.held if key not in parents)
            del self.held[leaf]
            self.admission.left(leaf, now)


class AdmissionPolicyContract(ABC):
    """Tests of the ``AdmissionPolicy`` protocol."""

    @abstractmethod
    def make_admission(self, capacity_bytes: int) -> AdmissionPolicy:
        """Make an admission that knows nothing yet, for a tier below of this capacity."""

    def below(self, chunk_count: int) -> TierBelow:
        """Make a tier below that holds nothing, with its admission."""
        return TierBelow(self.make_admission(chunk_count * CHUNK_BYTES), chunk_count)

    def test_is_an_admission(self) -> None:
        """The type has every method of the protocol."""
        assert isinstance(self.make_admission(1), AdmissionPolicy)

    @pytest.mark.parametrize("capacity_bytes", [0, -1])
    def test_capacity_is_above_zero(self, capacity_bytes: int) -> None:
        """An admission to nothing is a mistake."""
        with pytest.raises(ConfigError):
            self.make_admission(capacity_bytes)

    def test_what_is_asked_for_again_and_again_is_written(self) -> None:
        """From the first chunk on, however long the wait; then the whole prefix is held."""
        tier = self.below(100)
        path = path_of(*range(10))
        for turn in range(OFFERS_UNTIL_WRITTEN):
            tier.access(path, 60.0 * turn)
        assert len(tier.held) == len(path)

    def test_what_left_may_come_back(self) -> None:
        """Nothing is refused for ever because it left once."""
        tier = self.below(100)
        path = path_of(*range(3))
        for turn in range(OFFERS_UNTIL_WRITTEN):
            tier.access(path, 60.0 * turn)
        for entry in reversed(path):
            del tier.held[entry.key]
            tier.admission.left(entry.key, 60.0 * OFFERS_UNTIL_WRITTEN)
        for turn in range(OFFERS_UNTIL_WRITTEN):
            tier.access(path, 60.0 * (OFFERS_UNTIL_WRITTEN + 1 + turn))
        assert len(tier.held) == len(path)

    def test_no_traffic_starves_what_comes_after(self) -> None:
        """After much that is never used again, what is used again is still found out."""
        tier = self.below(50)
        for number in range(3000):
            tier.access(path_of("once", number), 0.1 * number)
        path = path_of("often", 1, 2)
        for turn in range(OFFERS_UNTIL_WRITTEN):
            now = 300.0 + turn
            tier.access(path_of("once again", turn), now)
            tier.access(path, now + 0.5)
            if path[-1].key in tier.held:
                return
        pytest.fail("a prefix that is asked for every second is never written")

    def test_a_child_waits_for_its_parent(self) -> None:
        """In any traffic; the books of the tier below look at every answer."""
        tier = self.below(40)
        for path, now in _traffic(seed=1, requests=2000):
            tier.access(path, now)
        assert tier.answers

    def test_one_history_has_one_outcome(self) -> None:
        """No clock, no chance, no state outside: two that see the same answer the same."""
        one, other = self.below(40), self.below(40)
        for path, now in _traffic(seed=2, requests=1000):
            one.access(path, now)
        for path, now in _traffic(seed=2, requests=1000):
            other.access(path, now)
        assert one.answers == other.answers
        assert list(one.held) == list(other.held)

    def test_unknown_keys_are_ignored(self) -> None:
        """A tier that was reopened holds what this admission never saw."""
        asked, other = self.below(40), self.below(40)
        for number, (path, now) in enumerate(_traffic(seed=3, requests=300)):
            asked.admission.touch(chunk_key(("nobody", number)), now, Features())
            asked.admission.left(chunk_key(("nobody else", number)), now)
            asked.access(path, now)
            other.access(path, now)
        assert asked.answers == other.answers

    @pytest.mark.parametrize("step_s", [0.0, -1.0, 1e12])
    def test_any_time_will_do(self, step_s: float) -> None:
        """Time that stands still, runs back or jumps is survived."""
        tier = self.below(40)
        for number, (path, _) in enumerate(_traffic(seed=4, requests=300)):
            tier.access(path, number * step_s)

    def test_what_is_remembered_is_bounded(self) -> None:
        """By the tier below or a limit, not by what was ever offered."""
        admission = self.make_admission(1000 * CHUNK_BYTES)

        def offer_many(numbers: range) -> None:
            for number in numbers:
                key = ChunkKey(number.to_bytes(32, "little"))
                if admission.offer(Entry(key, None, CHUNK_BYTES, 0), number * 0.01):
                    admission.left(key, number * 0.01)

        tracemalloc.start()
        try:
            offer_many(range(CHUNKS_UNTIL_BOUNDED))
            first, _ = tracemalloc.get_traced_memory()
            offer_many(range(CHUNKS_UNTIL_BOUNDED, CHUNKS_UNTIL_BOUNDED + _CHUNKS_MORE))
            second, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert first <= REMEMBERED_BYTES_MAX * CHUNKS_UNTIL_BOUNDED
        assert second - first <= 16 * _CHUNKS_MORE, "memory grows with every offer"


def _traffic(seed: int, requests: int) -> Iterator[tuple[list[Entry], float]]:
    """Iterate over prefixes that grow, fork from each other and are asked for again."""
    draw = random.Random(seed)
    latest: list[tuple[object, ...]] = [("system",)]
    now = 0.0
    for number in range(requests):
        base = draw.choice(latest[-12:]) if draw.random() < 0.8 else latest[0]
        names = (*base[:6], *((number, at) for at in range(draw.randrange(3))))
        latest.append(names)
        features = Features(turn=min(len(names), 9), hint=draw.choice(_HINTS))
        now += draw.expovariate(1.0)
        yield path_of(*names, features=features), now
