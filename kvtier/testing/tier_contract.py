"""What the books of every bounded tier must keep. Subclass in a test module::

    class TestMyTier(TierContract):
        def make_tier(self, capacity_bytes, on_evict): ...
        def settle(self, tier): ...          # whatever the medium owes before bytes are free
        def leave(self, tier, record): ...   # take a ready record out of sight

Sizes are in pages of 4096 bytes; a chunk has one shard unless a test says otherwise.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import pytest

from kvtier.constants import ALIGN_BYTES
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.index import Record, State, TierIndex
from kvtier.types import ChunkKey, Entry, Features, ShardId

CAPACITY_PAGES: Final = 8
_NAMESPACE: Final = b"n" * 32
_FEATURES: Final = Features()
OnEvict = Callable[[ChunkKey], None]


class TierBooks(Protocol):
    """What the contract asks of a tier."""

    index: TierIndex[Any]

    @property
    def used_bytes(self) -> int:
        """Bytes that the tier takes of its medium."""
        ...

    def reserve(
        self, entry: Entry, namespace: bytes, codec: str, sizes: Mapping[ShardId, int]
    ) -> Record[Any] | None:
        """Make room and return the filling record, pinned once, or refuse."""
        ...

    def commit(self, record: Record[Any]) -> None:
        """Let readers have a filled record."""
        ...

    def abort(self, record: Record[Any]) -> None:
        """Give up a record that could not be filled."""
        ...

    def touch(self, keys: list[ChunkKey], features: Features) -> None:
        """Note an access to chunks of one sequence, from its last to its first."""
        ...

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        ...


class _Bench:
    """One tier under test, checked after every step."""

    def __init__(self, contract: TierContract) -> None:
        self.left: list[ChunkKey] = []
        self.tier = contract.make_tier(CAPACITY_PAGES * ALIGN_BYTES, self.left.append)
        self._contract = contract

    def check(self) -> None:
        self._contract.settle(self.tier)
        self.tier.check_integrity()
        assert 0 <= self.tier.used_bytes <= CAPACITY_PAGES * ALIGN_BYTES, "beyond the capacity"
        pinned = sum(record.pins > 0 for record in self.tier.index)
        assert self.tier.index.pinned_count == pinned + self.tier.index.leaving_count

    @property
    def pages(self) -> int:
        """Pages in use."""
        self.check()
        return self.tier.used_bytes // ALIGN_BYTES

    def reserve(
        self, name: object, *pages: int, parent: object | None = None
    ) -> Record[Any] | None:
        sizes = {ShardId(0, 0, number): n * ALIGN_BYTES for number, n in enumerate(pages or (1,))}
        above = None if parent is None else chunk_key(parent)
        entry = Entry(chunk_key(name), above, sum(sizes.values()), 0 if parent is None else 1)
        record = self.tier.reserve(entry, _NAMESPACE, "raw", sizes)
        self.check()
        return record

    def store(self, name: object, *pages: int, parent: object | None = None) -> Record[Any]:
        record = self.reserve(name, *pages, parent=parent)
        assert record is not None, f"no room for {name}"
        self.tier.commit(record)
        self.check()
        return record

    def leave(self, record: Record[Any]) -> None:
        self._contract.leave(self.tier, record)
        self.check()

    def holds(self, name: object) -> bool:
        return self.tier.index.ready(chunk_key(name)) is not None


class TierContract(ABC):
    """Tests of a tier's books under a policy that evicts what was not used for longest."""

    #: Whether the bytes of what ``leave`` takes away stay for a while, within the capacity.
    keeps_what_left = False
    #: Whether a chunk has the same place whenever it comes; what is written there is the same too.
    place_follows_key = False

    @abstractmethod
    def make_tier(self, capacity_bytes: int, on_evict: OnEvict) -> TierBooks:
        """Make an empty tier whose capacity can be used to the last page."""

    @abstractmethod
    def settle(self, tier: Any) -> None:
        """Do what the tier has ordered and does not do by itself."""

    @abstractmethod
    def leave(self, tier: Any, record: Record[Any]) -> None:
        """Take a ready record out of sight, as if it had failed."""

    @pytest.fixture
    def bench(self) -> Iterator[_Bench]:
        """A tier, empty at the start and without pins at the end."""
        made = _Bench(self)
        assert made.pages == 0
        yield made
        made.check()
        assert made.tier.index.pinned_count == made.tier.index.leaving_count == 0

    def test_a_chunk_is_there_when_it_is_filled(self, bench: _Bench) -> None:
        """Reserved, it takes its bytes and nobody may read it."""
        record = bench.reserve("a", 3)
        assert record is not None
        assert (record.state, record.pins, bench.pages) == (State.FILLING, 1, 3)
        assert not bench.holds("a")
        bench.tier.commit(record)
        assert (record.state, record.pins, bench.pages) == (State.READY, 0, 3)
        assert bench.holds("a")

    def test_an_aborted_chunk_leaves_nothing(self, bench: _Bench) -> None:
        """And may be tried again at once."""
        for _ in range(3):
            record = bench.reserve("a", 5, 3)
            assert record is not None
            bench.tier.abort(record)
            assert (record.state, bench.pages) == (State.LEAVING, 0)
            assert bench.tier.index.get(chunk_key("a")) is None
        assert bench.left == []
        bench.store("a", 5, 3)

    def test_every_shard_has_a_place_of_its_own(self, bench: _Bench) -> None:
        """As many as there are sizes, no two the same."""
        first, second = bench.store("a", 1, 1, 2), bench.store("b", 1, 1, 2)
        places = [*first.places.values(), *second.places.values()]
        assert len(set(places)) == 6
        assert list(first.places) == [ShardId(0, 0, number) for number in range(3)]

    def test_the_capacity_is_usable_to_the_last_page_and_no_further(self, bench: _Bench) -> None:
        """The ninth page drives out the first chunk, and on_evict hears of it once."""
        for name in range(CAPACITY_PAGES):
            bench.store(name)
        assert (bench.left, bench.pages) == ([], CAPACITY_PAGES)
        bench.store("new")
        assert (bench.left, bench.pages) == ([chunk_key(0)], CAPACITY_PAGES)

    def test_a_chunk_larger_than_the_tier_is_refused(self, bench: _Bench) -> None:
        """And nothing leaves for it."""
        bench.store("a")
        assert bench.reserve("huge", CAPACITY_PAGES + 1) is None
        assert bench.reserve("wide", CAPACITY_PAGES, 1) is None
        assert bench.holds("a")
        assert bench.left == []

    def test_touched_chunks_stay_and_lookups_touch_nothing(self, bench: _Bench) -> None:
        """B40: whoever only asks keeps nothing alive."""
        for name in range(CAPACITY_PAGES):
            bench.store(name)
        bench.tier.touch([chunk_key(0), chunk_key("unknown")], _FEATURES)
        for name in range(CAPACITY_PAGES):
            assert bench.holds(name)
        bench.store("new", 2)
        assert bench.left == [chunk_key(1), chunk_key(2)]

    def test_leaves_go_first(self, bench: _Bench) -> None:
        """A chain goes from its end, however it was touched."""
        for depth in range(4):
            bench.store(depth, 2, parent=depth - 1 if depth else None)
        bench.tier.touch([chunk_key(depth) for depth in (3, 2, 1)], _FEATURES)
        bench.store("new", 4)
        assert bench.left == [chunk_key(3), chunk_key(2)]

    def test_a_chain_that_fills_the_tier_does_not_grow(self, bench: _Bench) -> None:
        """Its own prefix never leaves for it."""
        for depth in range(4):
            bench.store(depth, 2, parent=depth - 1 if depth else None)
        assert bench.reserve(4, 2, parent=3) is None
        assert bench.left == []

    def test_b52_what_is_pinned_stays_and_leaves_a_refusal(self, bench: _Bench) -> None:
        """At once, as often as it is tried; afterwards there is room again."""
        records = [bench.store(name, 2) for name in range(4)]
        lease = bench.tier.index.lease(records)
        for attempt in range(20):
            assert bench.reserve(("new", attempt)) is None
        assert bench.left == []
        lease.release()
        bench.store("new")
        assert bench.left == [chunk_key(0)]

    def test_what_is_being_filled_stays(self, bench: _Bench) -> None:
        """A writer never loses its place under its hands."""
        filling = [bench.reserve(name, 2) for name in range(4)]
        assert bench.reserve("new") is None
        for record in filling:
            assert record is not None
            bench.tier.commit(record)
        assert bench.reserve("new", 8) is not None
        new = bench.tier.index.get(chunk_key("new"))
        assert new is not None
        bench.tier.abort(new)
        assert bench.pages == 0

    def test_b88_pins_count_and_each_holder_releases_its_own(self, bench: _Bench) -> None:
        """A release too many does not take another holder's pin away."""
        record = bench.store("shared", CAPACITY_PAGES)
        first, second = (bench.tier.index.lease([record]) for _ in range(2))
        assert record.pins == 2
        for _ in range(3):
            first.release()
            assert record.pins == 1
            assert bench.reserve("new") is None
        second.release()
        assert record.pins == 0
        bench.store("new")

    def test_a_chunk_that_leaves_while_it_is_read_keeps_its_bytes(self, bench: _Bench) -> None:
        """It is out of sight at once; its bytes are free when the last reader is done."""
        record = bench.store("a", 6)
        lease = bench.tier.index.lease([record])
        bench.leave(record)
        assert not bench.holds("a")
        assert bench.left == []
        bench.store("b", 2)
        assert bench.reserve("c", 3) is None
        lease.release()
        bench.store("c", 6)

    def test_a_chunk_may_come_again_while_its_old_self_is_read(self, bench: _Bench) -> None:
        """Two records, one key, two places where the medium has them."""
        old = bench.store("a", 3)
        lease = bench.tier.index.lease([old])
        bench.leave(old)
        new = bench.store("a", 3)
        apart = set(old.places.values()).isdisjoint(new.places.values())
        assert apart != self.place_follows_key
        assert bench.pages == 6
        lease.release()
        assert bench.pages == (6 if self.keeps_what_left else 3)
        assert bench.tier.index.ready(chunk_key("a")) is new

    def test_any_order_of_steps_keeps_the_books(self, bench: _Bench) -> None:
        """A few hundred steps in an order that is always the same."""
        draws = random.Random(7)
        filling: list[Record[Any]] = []
        leases: list[Any] = []
        for turn in range(400):
            ready = [record for record in bench.tier.index if record.state is State.READY]
            step = draws.randrange(6)
            if step == 0 and filling:
                bench.tier.commit(filling.pop(draws.randrange(len(filling))))
            elif step == 1 and filling:
                bench.tier.abort(filling.pop(draws.randrange(len(filling))))
            elif step == 2 and ready and len(leases) < 4:
                leases.append(bench.tier.index.lease([draws.choice(ready)]))
            elif step == 3 and leases:
                leases.pop(draws.randrange(len(leases))).release()
            elif step == 4 and ready:
                bench.leave(draws.choice(ready))
            elif record := bench.reserve(turn, draws.randrange(1, 4)):
                filling.append(record)
            bench.check()
        for lease in leases:
            lease.release()
        for record in filling:
            bench.tier.abort(record)
