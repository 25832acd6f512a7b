"""A DRAM tier whose memory has owners: whatever comes and goes, each finds its own in its file."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.arena import Arena
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.types import ChunkKey, Entry, ShardId, Slot

PAGE = 4096
SLABS = 4
SLAB = 6 * PAGE
OWNERS = (b"ann", b"ben", b"cat")
SHARD = ShardId(0, 0, 0)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "pin", "unpin", "remove"]),
        st.sampled_from(OWNERS),
        st.sampled_from([1, 1, 2, 3, 6]),
        st.integers(0, 30),
    ),
    max_size=60,
)


class Room:
    def __init__(self) -> None:
        self.arena = Arena(SLABS * SLAB, slab_bytes=SLAB, owner=OWNERS[0])
        self.clock = FakeClock()
        self.tier = DramTier(
            self.arena, LRU, self.clock, self.left, owner_of=lambda namespace: namespace
        )
        self.there: dict[ChunkKey, DramRecord] = {}
        self.pinned: list[DramRecord] = []
        self.numbers = iter(range(1000))

    def left(self, key: ChunkKey) -> None:
        del self.there[key]

    def store(self, owner: bytes, pages: int) -> bool:
        self.clock.advance(1.0)
        key, nbytes = chunk_key(next(self.numbers)), pages * PAGE
        record = self.tier.reserve(Entry(key, None, nbytes, 0), owner, "raw", {SHARD: nbytes})
        if record is None:
            return False
        self.arena.view(record.places[SHARD])[:] = self.text(owner, key, nbytes)
        self.tier.commit(record)
        self.there[key] = record
        return True

    def text(self, owner: bytes, key: ChunkKey, nbytes: int) -> bytes:
        return ((owner + key) * nbytes)[:nbytes]

    def step(self, what: str, owner: bytes, pages: int, pick: int) -> None:
        records = list(self.there.values())
        if what == "store":
            stored = self.store(owner, pages)
            # Nobody is locked out: without pins everything gives way.
            assert stored or self.pinned
        elif what == "pin" and records and len(self.pinned) < 3:
            record = records[pick % len(records)]
            self.tier.index.pin(record)
            self.pinned.append(record)
        elif what == "unpin" and self.pinned:
            self.tier.index.unpin(self.pinned.pop(pick % len(self.pinned)))
        elif what == "remove" and records:
            record = records[pick % len(records)]
            del self.there[record.entry.key]
            self.tier.abandon(record)
        self.check()

    def held(self) -> Iterator[tuple[DramRecord, Slot]]:
        for record in [*self.there.values(), *self.pinned]:
            yield record, record.places[SHARD]

    def check(self) -> None:
        """Whoever maps its file reads its own chunks there; none of any other's bytes."""
        self.tier.check_integrity()
        files: dict[bytes, int] = {}
        for record, slot in self.held():
            region = self.arena.region_at(slot.offset)
            assert region is not None
            assert region.owner == record.namespace
            files[region.owner] = region.descriptor
            text = self.text(record.namespace, record.entry.key, slot.nbytes)
            assert os.pread(region.descriptor, slot.nbytes, slot.offset) == text
        for owner, descriptor in files.items():
            data = os.pread(descriptor, self.arena.capacity_bytes, 0)
            assert not any(other in data for other in OWNERS if other != owner)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_b102_each_owners_file_holds_its_own_chunks_and_nobody_elses(
    steps: list[tuple[str, bytes, int, int]],
) -> None:
    room = Room()
    for step in steps:
        room.step(*step)
    for record in room.pinned:
        room.tier.index.unpin(record)
    room.arena.close()
