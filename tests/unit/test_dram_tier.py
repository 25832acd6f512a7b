"""The DRAM tier: room by eviction at the moment of need, slabs that change their size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.arena import Arena
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.tiers.index import State, TierIndex
from kvtier.types import ChunkKey, Entry, Features, ShardId, Slot

PAGE = 4096
SLAB = 8 * PAGE
NAMESPACE = b"n" * 32
FEATURES = Features()


class Room:
    """A tier of ``slabs`` slabs, with the chunks that left it in order."""

    def __init__(self, slabs: int) -> None:
        self.clock = FakeClock()
        self.left: list[ChunkKey] = []
        self.arena = Arena(slabs * SLAB, slab_bytes=SLAB)
        self.tier = DramTier(self.arena, LRU, self.clock, self.left.append)

    def reserve(self, name: object, *pages: int, parent: object | None = None) -> DramRecord | None:
        """Reserve a chunk whose shards have these sizes in pages."""
        self.clock.advance(1.0)
        sizes = {ShardId(index, 0, 0): size * PAGE for index, size in enumerate(pages)}
        above = None if parent is None else chunk_key(parent)
        entry = Entry(chunk_key(name), above, sum(sizes.values()), 0)
        record = self.tier.reserve(entry, NAMESPACE, "raw", sizes)
        self.tier.check_integrity()
        return record

    def store(self, name: object, *pages: int, parent: object | None = None) -> DramRecord:
        """Reserve and fill."""
        record = self.reserve(name, *pages, parent=parent)
        assert record is not None, f"no room for {name}"
        self.tier.commit(record)
        self.tier.check_integrity()
        return record

    def touch(self, *names: object) -> None:
        self.clock.advance(1.0)
        self.tier.touch([chunk_key(name) for name in names], FEATURES)

    def holds(self, *names: object) -> list[bool]:
        return [self.tier.index.ready(chunk_key(name)) is not None for name in names]


@pytest.fixture
def room() -> Iterator[Room]:
    made = Room(slabs=4)
    yield made
    made.tier.check_integrity()
    made.arena.close()


def test_records_pass_through_their_states(room: Room) -> None:
    record = room.reserve("a", 2)
    assert record is not None
    assert (record.state, record.pins) == (State.FILLING, 1)
    assert room.tier.index.ready(chunk_key("a")) is None
    assert room.tier.used_bytes == 2 * PAGE
    room.tier.commit(record)
    assert (record.state, record.pins) == (State.READY, 0)
    assert room.tier.index.ready(chunk_key("a")) is record


def test_an_aborted_fill_leaves_nothing(room: Room) -> None:
    record = room.reserve("a", 2, 3)
    assert record is not None
    room.tier.abort(record)
    assert room.tier.used_bytes == 0
    assert room.left == []
    room.store("a", 2, 3)


def test_an_abandoned_fill_keeps_its_slots_until_its_last_user_is_done(room: Room) -> None:
    record = room.reserve("a", 8)
    assert record is not None
    load = room.tier.index.lease([record])
    room.tier.abandon(record)
    assert room.tier.index.get(chunk_key("a")) is None
    assert room.tier.used_bytes == SLAB
    again = room.reserve("a", 8)
    assert again is not None
    assert again.places[ShardId(0, 0, 0)] != record.places[ShardId(0, 0, 0)]
    room.tier.index.unpin(record)
    assert room.tier.used_bytes == 2 * SLAB
    load.release()
    assert room.tier.used_bytes == SLAB
    room.tier.abort(again)


def test_b40_lookups_do_not_keep_a_chunk_and_one_put_evicts_one(room: Room) -> None:
    for name in range(8):
        room.store(name, 4)
    for name in range(8):
        assert room.tier.index.get(chunk_key(name)) is not None
        assert room.tier.index.ready(chunk_key(name)) is not None
    room.store("new", 4)
    assert room.left == [chunk_key(0)]


def test_b52_a_reservation_beside_pins_is_refused_at_once(room: Room) -> None:
    records = [room.store(name, 8) for name in range(4)]
    lease = room.tier.index.lease(records)
    for attempt in range(1000):
        entry = Entry(chunk_key(attempt + 10), None, PAGE, 0)
        assert room.tier.reserve(entry, NAMESPACE, "raw", {ShardId(0, 0, 0): PAGE}) is None
    assert room.left == []
    lease.release()
    room.store("new", 1)
    assert len(room.left) == 1


def test_b87_looked_up_and_never_fetched_does_not_stay_pinned(room: Room) -> None:
    records = [room.store(name, 8) for name in range(4)]
    room.tier.index.lease(records).release()
    for name in range(10, 14):
        room.store(name, 8)
    assert room.left == [chunk_key(name) for name in range(4)]
    assert room.tier.index.pinned_count == 0


def test_b88_each_holder_releases_its_own_pin(room: Room) -> None:
    record = room.store("shared", 8)
    first, second = (room.tier.index.lease([record]) for _ in range(2))
    pins = [record.pins]
    for lease in (first, first, second, second):
        lease.release()
        pins.append(record.pins)
        room.tier.check_integrity()
        if lease is first:
            for name in range(3):
                room.store((len(pins), name), 8)
            assert room.holds("shared") == [True]
    assert pins == [2, 1, 1, 0, 0]
    assert room.tier.index.pinned_count == 0


@pytest.mark.parametrize("seed_offset", range(5))
def test_b90_aborted_prefetches_lose_no_slot(room: Room, seed_offset: int) -> None:
    for turn in range(20):
        records = [room.reserve((turn, n), 8) for n in range(4)]
        assert all(records)
        for number, record in enumerate(records):
            assert record is not None
            if number < (turn + seed_offset) % 5:
                room.tier.commit(record)
                room.tier.leave(record)
            else:
                room.tier.abort(record)
        assert room.tier.used_bytes == 0
    assert all(room.store(n, 8) for n in range(4))


class TestSlabs:
    def test_the_coldest_slab_is_given_over(self, room: Room) -> None:
        for name in range(32):
            room.store(name, 1)
        # The policy's eight victims lie two in each slab, so none of them becomes empty by that.
        for slab in (2, 3, 1, 0):
            room.touch(*range(8 * slab + 2, 8 * slab + 8))
        room.store("large", 8)
        oldest = [8 * slab + n for slab in range(4) for n in range(2)]
        assert set(room.left) == {chunk_key(name) for name in (*oldest, *range(18, 24))}

    def test_a_slab_with_a_pinned_chunk_is_not_touched(self, room: Room) -> None:
        records = [room.store(name, 1) for name in range(32)]
        lease = room.tier.index.lease([records[0], records[9], records[20]])
        room.store("large", 8)
        assert set(room.left) == {chunk_key(name) for name in range(24, 32)} | {
            key for key in room.left if key not in {r.entry.key for r in lease.records}
        }
        assert room.holds(0, 9, 20) == [True] * 3
        lease.release()

    def test_all_slabs_pinned_is_a_refusal_that_leaks_nothing(self, room: Room) -> None:
        records = [room.store(name, 1) for name in range(32)]
        lease = room.tier.index.lease(records[::8])
        before = room.tier.used_bytes
        assert room.reserve("large", 8) is None
        lost = len(room.left) * PAGE
        assert room.tier.used_bytes == before - lost
        assert room.tier.index.get(chunk_key("large")) is None
        lease.release()
        room.store("large", 8)

    def test_b05_a_refused_second_shard_gives_the_first_ones_slot_back(self, room: Room) -> None:
        records = [room.store(name, 1) for name in range(32)]
        lease = room.tier.index.lease(records[::8])
        assert room.reserve("two", 1, 8) is None
        assert room.tier.used_bytes == len(room.tier.index) * PAGE
        lease.release()
        room.store("two", 1, 8)

    def test_shards_of_two_sizes_find_room_again_and_again(self, room: Room) -> None:
        for turn in range(200):
            room.store(turn, 3, 5)
        assert len(room.tier.index) >= 2

    def test_a_small_shard_does_not_stand_in_the_way_of_a_large_one(self, room: Room) -> None:
        """25 pages in a row are there only if the single page is placed behind them."""
        record = room.store("wide", 1, 25)
        assert list(record.places) == [ShardId(0, 0, 0), ShardId(1, 0, 0)]

    def test_where_pins_hold_every_slab_one_chunk_of_the_size_makes_way(self, room: Room) -> None:
        """No slab can change hands, so the coldest chunk of the wanted size leaves, not eight."""
        ones = [room.store(("one", n), 1) for n in range(16)]
        twos = [room.store(("two", n), 2) for n in range(8)]
        lease = room.tier.index.lease([ones[0], ones[8], twos[0], twos[4]])
        room.tier.abandon(ones[1])
        room.tier.abandon(ones[9])
        room.touch(*(("two", n) for n in (1, 2)))
        room.store("new", 2)
        assert room.left == [chunk_key(("two", 3))]
        lease.release()

    def test_filling_chunks_stay_when_a_slab_is_wanted(self, room: Room) -> None:
        filling = [room.reserve(("f", n), 1) for n in range(32)]
        assert all(filling)
        assert room.reserve("large", 8) is None
        assert room.left == []
        for record in filling:
            assert record is not None
            room.tier.commit(record)
        room.store("large", 8)

    def test_what_leaves_to_make_room_may_be_of_the_wanted_size(self, room: Room) -> None:
        """Bytes are free, but only in slabs that a pin holds: its own size makes way."""
        small = [room.store(("s", n), 1) for n in range(16)]
        for n in range(2):
            room.store(("l", n), 8)
        room.touch(("l", 0), ("l", 1))
        lease = room.tier.index.lease([small[0], small[8]])
        room.store("new", 8)
        assert room.holds("new") == [True]
        lease.release()

    def test_a_prefix_stays_when_its_own_continuation_comes_in(self, room: Room) -> None:
        for name in range(32):
            room.store(name, 1, parent=0 if name == 1 else None)
        for slab in range(4):
            # Slab 0 is the coldest, and the oldest chunks lie scattered; 0 and 1 are among them.
            room.touch(*range(8 * slab + 3, 8 * slab + 8))
        room.store("large", 8, parent=1)
        assert room.holds(0, 1) == [True, True]
        assert room.holds(*range(11, 16)) == [False] * 5

    def test_a_chunk_with_two_slots_in_a_slab_leaves_it_once(self, room: Room) -> None:
        for n in range(16):
            room.store(n, 1, 1)
        room.store("large", 8)
        assert len(room.left) == len(set(room.left)) == 4

    def test_slots_larger_than_a_slab_join_several(self, room: Room) -> None:
        for name in range(32):
            room.store(name, 1)
        room.store("huge", 20)
        assert len(room.left) >= 20
        room.store("whole", 32)
        assert len(room.tier.index) == 1


def test_two_sizes_share_an_arena_of_one_slab() -> None:
    room = Room(slabs=1)
    for turn in range(20):
        room.store(turn, 1, 2)
    assert len(room.tier.index) >= 1
    room.arena.close()


def test_a_chunk_larger_than_the_arena_is_refused(room: Room) -> None:
    room.store("a", 8)
    assert room.reserve("huge", 33) is None
    assert room.holds("a") == [True]


def test_touch_decides_who_leaves_and_unknown_keys_are_ignored(room: Room) -> None:
    for name in range(4):
        room.store(name, 8)
    room.touch("nobody", 0, 2)
    room.store("new", 8)
    room.store("newer", 8)
    assert room.left == [chunk_key(1), chunk_key(3)]


def test_one_sequence_that_fills_dram_gives_way_to_itself(room: Room) -> None:
    parent: object | None = None
    for depth in range(4):
        room.store(depth, 8, parent=parent)
        parent = depth
    assert room.reserve(4, 8, parent=3) is None
    below: TierIndex[Slot] = TierIndex(lambda _: None)
    prefix = [chunk_key(depth) for depth in (3, 2, 1, 0)]
    assert not room.tier.give_way(prefix, below.ready)
    held = room.tier.index.ready(chunk_key(2))
    assert held is not None
    twin = DramRecord(held.entry, NAMESPACE, "raw", {})
    below.add(twin)
    assert not room.tier.give_way(prefix, below.ready)
    below.set_ready(twin)
    lease = room.tier.index.lease([held])
    assert not room.tier.give_way(prefix, below.ready)
    lease.release()
    assert room.tier.give_way(prefix, below.ready)
    assert room.left == [chunk_key(2)]
    room.store(4, 8, parent=3)


def test_views_of_records_never_overlap(room: Room) -> None:
    """Every byte of every chunk stays what its filler wrote, whatever moves around it."""
    patterns: dict[ChunkKey, bytes] = {}
    for turn in range(120):
        pages = (1 + turn % 3, 1 + turn % 2)
        record = room.store(turn, *pages)
        patterns[record.entry.key] = bytes([turn])
        for slot in record.places.values():
            room.arena.view(slot)[:] = bytes([turn]) * slot.nbytes
        if turn % 3 == 0:
            room.touch(turn, turn // 2)
        for held in room.tier.index:
            for slot in held.places.values():
                assert bytes(room.arena.view(slot)) == patterns[held.entry.key] * slot.nbytes
