"""Chunks on their way through DRAM and disk, one step at a time, as the cache moves them.

What may happen to them on the way, and what must hold, is in ``tier_simulation``.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.constants import DIRTY_SHARE_HIGH, DIRTY_SHARE_LOW
from kvtier.errors import ShardError
from kvtier.shard_format import seal
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.arena import Arena
from kvtier.tiers.disk.tier import DiskRecord, DiskTier
from kvtier.tiers.disk.volume import Chores, DiskPlace, written
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.tiers.index import Lease, State, TierIndex
from kvtier.types import ChunkKey, Entry, Slot
from tests.lib.disk_lab import (
    CODEC,
    FEATURES,
    NAMESPACE,
    SECTION_BYTES,
    describe,
    expect,
    fill_slot,
    geometry_of,
    section_of,
)
from tests.lib.disk_shelves import DiskShelves, sizes_of
from tests.lib.simulation_swarm import Swarm

NAMES = 48
CHAIN = 6
DRAM_CHUNKS = 8
DISK_CHUNKS = 8
SIZES = sizes_of(2)
CHUNK_NBYTES = sum(SIZES.values())
WRITES_MAX = 3
PINS_MAX = 4


@dataclass(frozen=True)
class Write:
    """A chunk on its way to disk. Those of one directory end in the order in which they began."""

    source: Lease[Slot]
    target: DiskRecord
    chores: Chores


@dataclass(frozen=True)
class Fill:
    """A chunk on its way up."""

    source: Lease[DiskPlace]
    target: DramRecord


class TierTraffic:
    """Two tiers and what moves between them, in one thread and on a fake clock."""

    def __init__(self, root: str, draws: random.Random, swarm: Swarm) -> None:
        self.draws = draws
        self.swarm = swarm
        capacity_bytes = DISK_CHUNKS * CHUNK_NBYTES
        self.shelves = DiskShelves(
            Path(root),
            count=self.swarm.directories,
            share_bytes=capacity_bytes // self.swarm.directories,
            policy=self.swarm.policy,
        )
        # What was lost and not written again; its children may lie on disk without it.
        self.lost: set[ChunkKey] = set()
        # What somebody else damaged or removed, and was not written again.
        self.spoiled: set[ChunkKey] = set()
        self.seen: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        arena = Arena(DRAM_CHUNKS * CHUNK_NBYTES, slab_bytes=2 * CHUNK_NBYTES)
        self.dram = DramTier(arena, self.swarm.policy, self.shelves.clock, self.left_dram)
        self.storing: list[DramRecord] = []
        self.dirty: dict[ChunkKey, None] = {}
        self.draining = False
        self.writes: list[list[Write]] = [[] for _ in self.shelves.roots]
        # Directories in which room was not made; what is out there was given it in vain.
        self.no_room_made: set[int] = set()
        self.fills: list[Fill] = []
        self.pins: list[Lease[Any]] = []

    @property
    def tier(self) -> DiskTier:
        return self.shelves.tier

    def left_dram(self, key: ChunkKey) -> None:
        self.seen["evicted from dram"] += 1
        self.dirty.pop(key, None)
        pinned = [record.entry.key for lease in self.pins for record in lease.records]
        assert key not in pinned or self.dram.index.get(key) is None
        busy = [*self.storing, *(fill.target for fill in self.fills)]
        assert key not in [record.entry.key for record in busy], "it left while it was filled"

    def parent(self, name: int) -> int | None:
        return name - 1 if name % CHAIN else None

    def entry(self, name: int) -> Entry:
        parent = self.parent(name)
        above = None if parent is None else chunk_key(parent)
        return Entry(chunk_key(name), above, CHUNK_NBYTES, name % CHAIN)

    def held(self) -> set[int]:
        return {name for name in range(NAMES) if self.tier.holds(chunk_key(name))}

    def any_name(self) -> int:
        """Return a chunk; more often than not one that continues what is on disk."""
        name = self.draws.randrange(NAMES)
        while self.draws.random() < 0.8:
            parent = self.parent(name)
            above = parent is None or self.tier.holds(chunk_key(parent))
            if above and not self.tier.holds(chunk_key(name)):
                break
            name = self.draws.randrange(NAMES)
        return name

    def line(self, name: int) -> list[ChunkKey]:
        return [chunk_key(n) for n in range(name, name - name % CHAIN - 1, -1)]

    def store(self) -> None:
        name = self.any_name()
        if self.dram.index.get(chunk_key(name)) is None:
            record = self.dram.reserve(self.entry(name), NAMESPACE, CODEC, SIZES)
            if record is None:
                self.seen["no room in dram"] += 1
            else:
                self.storing.append(record)

    def end_store(self) -> None:
        if not self.storing:
            return
        record = self.storing.pop(self.draws.randrange(len(self.storing)))
        if self.draws.random() < 0.1:
            self.dram.abort(record)
            return
        for shard, slot in record.places.items():
            fill_slot(self.dram.arena.view(slot), record.entry.key, shard)
        self.dram.commit(record)
        self.offer(record)

    def offer(self, record: DramRecord) -> None:
        """A chunk of DRAM was used: it may belong on disk too."""
        key, now = record.entry.key, self.shelves.clock.now()
        before = self.tier.holds(key)
        self.tier.displace(key, SIZES.keys())
        if before and not self.tier.holds(key):
            self.lost.add(key)
            self.seen["displaced"] += 1
        if key in self.dirty:
            return
        if self.tier.holds(key):
            self.swarm.admission.touch(key, now, FEATURES)
        elif record.places.keys() == SIZES.keys():
            if self.swarm.admission.offer(record.entry, now):
                self.dirty[key] = None
            else:
                self.seen["not admitted"] += 1

    def begin_write(self) -> None:
        waiting = [key for key in self.dirty if not self.tier.holds(key)]
        share = len(self.dirty) / DRAM_CHUNKS
        self.draining = share > (DIRTY_SHARE_LOW if self.draining else DIRTY_SHARE_HIGH)
        if not waiting or not self.tier.writable() or (self.swarm.back and not self.draining):
            return
        if max(map(len, self.writes)) >= WRITES_MAX:
            return
        # The cache takes the oldest always; what cannot be written yet is refused.
        key = waiting[0] if self.draws.random() < 0.8 else self.draws.choice(waiting)
        source = self.dram.index.ready(key)
        assert source is not None, "what is dirty is in DRAM"
        del self.dirty[key]
        above = source.entry.parent
        reachable = above is None or self.tier.holds(above)
        target = self.tier.reserve(source.entry, NAMESPACE, CODEC, SIZES)
        if target is None:
            self.seen["no room on disk"] += reachable
            return
        volume = self.tier.volume_of(target)
        lease = self.dram.index.lease([source])
        self.writes[volume.number].append(Write(lease, target, volume.take_chores()))

    def end_write(self) -> None:
        busy = [number for number, writes in enumerate(self.writes) if writes]
        if busy:
            self.end_write_of(self.draws.choice(busy))

    def end_write_of(self, number: int) -> None:
        write = self.writes[number].pop(0)
        volume = self.shelves.volumes[number]
        (source,) = write.source.records
        key = source.entry.key
        try:
            self.make_room(number, write.chores)
            for shard, place in write.target.places.items():
                slot = self.dram.arena.view(source.places[shard])
                seal(slot, describe(source.entry, shard))
                volume.files.write(place.path, slot)
            volume.files.note(written(self.tier.row(write.target)))
        except OSError as error:
            self.tier.abort(write.target)
            volume.return_chores(write.chores)
            volume.write_failed(error)
            self.lost.add(key)
            if self.dram.index.get(key) is source:
                self.dirty[key] = None
            self.seen["write failed"] += 1
        else:
            volume.finish_chores(write.chores)
            self.tier.commit(write.target)
            self.lost.discard(key)
            if len(self.writes) == 1:  # Else another directory may still know the old files.
                self.spoiled.discard(key)
            self.seen["written"] += 1
        write.source.release()
        if not self.writes[number]:
            self.no_room_made.discard(number)

    def make_room(self, number: int, chores: Chores) -> None:
        if number in self.no_room_made:
            raise OSError("no room was made before")
        try:
            self.shelves.volumes[number].do(chores)
        except OSError:
            self.no_room_made.add(number)
            raise

    def begin_fill(self) -> None:
        name = self.draws.choice([*self.held()] or [0])
        found = self.tier.find(chunk_key(name))
        source = self.tier.ready(chunk_key(name))
        assert (source is None) == (found is None), "a lookup finds what may be read, and no more"
        if source is None or found is None:
            return
        assert (source.codec, set(source.places)) == (found[0], set(found[1]))
        assert source.state is State.READY, "what is being written must not be read"
        if self.dram.index.get(source.entry.key) is None:
            sizes = {shard: place.nbytes for shard, place in source.places.items()}
            entry = Entry(source.entry.key, source.entry.parent, sum(sizes.values()), name % CHAIN)
            target = self.dram.reserve(entry, NAMESPACE, CODEC, sizes)
            if target is not None:
                self.fills.append(Fill(self.tier.index.lease([source]), target))

    def end_fill(self) -> None:
        if not self.fills:
            return
        fill = self.fills.pop(self.draws.randrange(len(self.fills)))
        (source,) = fill.source.records
        if self.read(source, fill.target):
            self.tier.volume_of(source).read_succeeded()
            self.seen["filled"] += 1
            self.check_bytes(fill.target)
            self.dram.commit(fill.target)
            self.offer(fill.target)
        else:
            self.dram.abort(fill.target)
        fill.source.release()

    def read(self, source: DiskRecord, target: DramRecord) -> bool:
        volume = self.tier.volume_of(source)
        held = self.tier.index.get(source.entry.key) is source
        for shard, place in source.places.items():
            slot = self.dram.arena.view(target.places[shard])
            try:
                volume.files.read(place.path, slot, expect(source.entry.key, shard), lambda _: None)
            except ShardError:
                self.seen["corrupt"] += 1
                self.lost.add(source.entry.key)
                if held:
                    self.tier.condemn(source, shard)
                return False
            except OSError as error:
                gone = isinstance(error, FileNotFoundError) and volume.files.attached()
                if gone and held:
                    self.lost.add(source.entry.key)
                    self.tier.forget(source)
                if not gone:
                    self.seen["read failed"] += 1
                    volume.read_failed(error)
                return False
        return True

    def check_bytes(self, record: DramRecord) -> None:
        for shard, slot in record.places.items():
            view = self.dram.arena.view(slot)
            for section, offset in enumerate(geometry_of(shard).section_offsets):
                right = section_of(record.entry.key, shard, section)
                assert view[offset : offset + SECTION_BYTES] == right, "wrong bytes in DRAM"

    def touch(self) -> None:
        line = self.line(self.any_name())
        self.dram.touch(line, FEATURES)
        self.tier.touch(line, FEATURES)
        for key in reversed(line):
            record = self.dram.index.ready(key)
            if record is not None:
                self.offer(record)

    def give_way(self) -> None:
        """One long sequence fills DRAM: what the disk has too leaves."""
        self.dram.give_way(reversed(self.line(self.any_name())), self.tier.holds)

    def pin(self) -> None:
        if len(self.pins) < PINS_MAX:
            self.pin_one(self.dram.index)
            self.pin_one(self.tier.index)

    def pin_one(self, index: TierIndex[Any]) -> None:
        ready = [record for record in index if record.state is State.READY]
        if ready:
            self.pins.append(index.lease([self.draws.choice(ready)]))

    def unpin(self) -> None:
        if self.pins:
            self.pins.pop(self.draws.randrange(len(self.pins))).release()
