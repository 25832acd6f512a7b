"""DRAM and disk together under random steps, with everything that must be true checked after each.

One seed decides everything. Each run leaves some kinds of steps out and favours others, so that
rare states become common in some.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.constants import HEALTH_BACKOFF_S_MAX
from kvtier.errors import ShardError
from kvtier.policies.lru import LRU
from kvtier.shard_format import seal
from kvtier.testing.fault_files import (
    ALL_OPERATIONS,
    EVER,
    BitFlip,
    FaultyFiles,
    FileFailure,
    FileOperation,
    ShortRead,
)
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.arena import Arena
from kvtier.tiers.disk.tier import DiskRecord, PolicyFactory
from kvtier.tiers.disk.volume import Chores, DiskPlace, written
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.tiers.index import Lease, State, TierIndex
from kvtier.types import ChunkKey, Entry, Features, Slot
from tests.lib.disk_lab import (
    CODEC,
    NAMESPACE,
    SECTION_BYTES,
    BoundedFiles,
    DiskLab,
    bytes_on_disk,
    describe,
    expect,
    fill_slot,
    geometry_of,
    section_of,
)

NAMES = 48
CHAIN = 6
DRAM_CHUNKS = 8
DISK_CHUNKS = 12


@dataclass(frozen=True)
class Write:
    """A chunk on its way to disk. Writes end in the order in which they began."""

    source: Lease[Slot]
    target: DiskRecord
    chores: Chores


@dataclass(frozen=True)
class Fill:
    """A chunk on its way up."""

    source: Lease[DiskPlace]
    target: DramRecord


class Simulation:
    """Two tiers and everything that may happen to them, in one thread and on a fake clock."""

    def __init__(
        self, root: str, seed: int, policy: PolicyFactory = LRU, *, every_step: bool = False
    ) -> None:
        """``every_step`` leaves no kind of step out."""
        self.draws = random.Random(seed)
        capacity_bytes = DiskLab(root, chunks=DISK_CHUNKS, shards=2).capacity_bytes
        self.faulty = FaultyFiles(BoundedFiles(root, capacity_bytes), seed=seed)
        self.lab = DiskLab(root, chunks=DISK_CHUNKS, shards=2, files=self.faulty, policy=policy)
        self.policy = policy
        # What was lost and not written again; its children may lie on disk without it.
        self.lost: set[ChunkKey] = set()
        self.seen: Counter[str] = Counter()
        self.steps: list[Callable[[], object]] = [
            self.store,
            self.end_store,
            self.begin_write,
            self.end_write,
            self.begin_fill,
            self.end_fill,
            self.touch,
            self.pin,
            self.unpin,
            self.spoil,
            self.fail,
            self.heal,
            self.tick,
            self.reopen,
            self.restart,
        ]
        moving = {
            self.store,
            self.end_store,
            self.begin_write,
            self.end_write,
            self.begin_fill,
            self.end_fill,
        }
        rare = {self.spoil, self.fail, self.reopen, self.restart}
        self.weights = [
            self.draws.choice((2.0,) if every_step else (0.0, 0.3, 1.0, 2.0))
            if step in rare
            else self.draws.choice((2.0, 4.0, 8.0))
            if step not in moving
            else 16.0
            for step in self.steps
        ]
        self.start()

    def start(self) -> None:
        arena = Arena(DRAM_CHUNKS * self.lab.chunk_bytes, slab_bytes=2 * self.lab.chunk_bytes)
        self.dram = DramTier(arena, self.policy, self.lab.clock, self.left_dram)
        self.storing: list[DramRecord] = []
        self.writes: list[Write] = []
        self.fills: list[Fill] = []
        self.pins: list[Lease[Any]] = []
        self.lab.open()

    def left_dram(self, key: ChunkKey) -> None:
        self.seen["evicted from dram"] += 1
        pinned = [record.entry.key for lease in self.pins for record in lease.records]
        assert key not in pinned or self.dram.index.get(key) is None
        busy = [*self.storing, *(fill.target for fill in self.fills)]
        assert key not in [record.entry.key for record in busy], "it left while it was filled"

    def parent(self, name: int) -> int | None:
        return name - 1 if name % CHAIN else None

    def entry(self, name: int) -> Entry:
        parent = self.parent(name)
        above = None if parent is None else chunk_key(parent)
        return Entry(chunk_key(name), above, self.lab.chunk_bytes, name % CHAIN)

    def any_name(self) -> int:
        """Return a chunk; more often than not one that continues what is on disk."""
        name = self.draws.randrange(NAMES)
        while self.draws.random() < 0.8:
            parent = self.parent(name)
            on_disk = self.lab.tier.holds(chunk_key(name))
            if not on_disk and (parent is None or self.lab.holds(parent) == [True]):
                break
            name = self.draws.randrange(NAMES)
        return name

    def store(self) -> None:
        name = self.any_name()
        if self.dram.index.get(chunk_key(name)) is None:
            record = self.dram.reserve(self.entry(name), NAMESPACE, CODEC, self.lab.sizes)
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

    def begin_write(self) -> None:
        waiting = [
            record
            for record in self.dram.index
            if record.state is State.READY
            and record.places.keys() == self.lab.sizes.keys()
            and not self.lab.tier.holds(record.entry.key)
        ]
        if not waiting or not self.lab.tier.writable() or len(self.writes) >= 3:
            return
        source = self.draws.choice(waiting)
        above = source.entry.parent
        reachable = above is None or self.lab.tier.holds(above)
        target = self.lab.tier.reserve(source.entry, NAMESPACE, CODEC, self.lab.sizes)
        if target is None:
            self.seen["no room on disk"] += reachable
        else:
            lease = self.dram.index.lease([source])
            self.writes.append(Write(lease, target, self.lab.volume.take_chores()))

    def end_write(self) -> None:
        if not self.writes:
            return
        write = self.writes.pop(0)
        (source,) = write.source.records
        try:
            self.lab.volume.do(write.chores)
            for shard, place in write.target.places.items():
                slot = self.dram.arena.view(source.places[shard])
                seal(slot, describe(source.entry, shard))
                self.lab.shard_files.write(place.path, slot)
            self.lab.shard_files.note(written(self.lab.tier.row(write.target)))
        except OSError as error:
            self.lab.tier.abort(write.target)
            self.lab.volume.return_chores(write.chores)
            self.lab.volume.write_failed(error)
            self.lost.add(source.entry.key)
            self.seen["write failed"] += 1
        else:
            self.lab.volume.finish_chores(write.chores)
            self.lab.tier.commit(write.target)
            self.lost.discard(source.entry.key)
            self.seen["written"] += 1
        write.source.release()

    def begin_fill(self) -> None:
        names = [name for name in range(NAMES) if self.lab.tier.shards(chunk_key(name))]
        if not names or not self.lab.tier.readable():
            return
        source = self.lab.tier.ready(chunk_key(self.draws.choice(names)))
        assert source is not None, "what a lookup finds may be read"
        if self.dram.index.get(source.entry.key) is None:
            sizes = {shard: place.nbytes for shard, place in source.places.items()}
            target = self.dram.reserve(source.entry, NAMESPACE, CODEC, sizes)
            if target is not None:
                self.fills.append(Fill(self.lab.tier.index.lease([source]), target))

    def end_fill(self) -> None:
        if not self.fills:
            return
        fill = self.fills.pop(self.draws.randrange(len(self.fills)))
        (source,) = fill.source.records
        held = self.lab.tier.index.get(source.entry.key) is source
        for shard, place in source.places.items():
            slot = self.dram.arena.view(fill.target.places[shard])
            try:
                self.lab.shard_files.read(
                    place.path, slot, expect(source.entry.key, shard), lambda _: None
                )
            except ShardError:
                self.seen["corrupt"] += 1
                self.lost.add(source.entry.key)
                if held:
                    self.lab.tier.condemn(source, shard)
                break
            except OSError as error:
                gone = isinstance(error, FileNotFoundError) and self.lab.shard_files.attached()
                if gone and held:
                    self.lost.add(source.entry.key)
                    self.lab.tier.forget(source)
                if not gone:
                    self.seen["read failed"] += 1
                    self.lab.volume.read_failed(error)
                break
        else:
            self.lab.volume.read_succeeded()
            self.seen["filled"] += 1
            self.dram.commit(fill.target)
            fill.source.release()
            return
        self.dram.abort(fill.target)
        fill.source.release()

    def touch(self) -> None:
        name = self.any_name()
        line = [chunk_key(n) for n in range(name, name - name % CHAIN - 1, -1)]
        self.dram.touch(line, Features())
        self.lab.tier.touch(line, Features())

    def pin(self) -> None:
        if len(self.pins) < 4:
            self.pin_one(self.dram.index)
            self.pin_one(self.lab.tier.index)

    def pin_one(self, index: TierIndex[Any]) -> None:
        ready = [record for record in index if record.state is State.READY]
        if ready:
            self.pins.append(index.lease([self.draws.choice(ready)]))

    def unpin(self) -> None:
        if self.pins:
            self.pins.pop(self.draws.randrange(len(self.pins))).release()

    def spoil(self) -> None:
        """Something else damages or removes a file."""
        ready = [r for r in self.lab.tier.index if r.state is State.READY]
        if not ready:
            return
        record = self.draws.choice(ready)
        path = Path(self.draws.choice(list(record.places.values())).path)
        if path.exists() and path.stat().st_size:
            self.lost.add(record.entry.key)
            data = bytearray(path.read_bytes())
            data[-min(4096, len(data))] ^= 1
            way = self.draws.randrange(3)
            path.unlink() if way == 0 else path.write_bytes(data[: len(data) // way])

    def fail(self) -> None:
        nth, last = self.draws.randrange(1, 4), self.draws.choice((None, EVER))
        some = self.draws.choice(((FileOperation.READ,), (FileOperation.CREATE,), ALL_OPERATIONS))
        kinds = (
            FileFailure(operations=some, nth=nth, last=last),
            FileFailure(operations=some, nth=nth, last=last),
            BitFlip(nth=nth, offset=8192),
            ShortRead(nth=nth, nbytes=4096),
        )
        self.faulty.inject(self.draws.choice(kinds))

    def heal(self) -> None:
        self.faulty.inject()

    def tick(self) -> None:
        self.lab.clock.advance(self.draws.choice((0.1, 1.0, HEALTH_BACKOFF_S_MAX)))
        if self.lab.volume.open_due:
            self.open_again()
        elif self.lab.tier.writable() and not self.writes:
            self.lab.do_chores()

    def reopen(self) -> None:
        if not self.writes:  # One thread writes and opens, one after the other.
            self.open_again()

    def open_again(self) -> None:
        """An open that cannot read a file, or that finds none, gives it up."""
        before = [name for name in range(NAMES) if self.lab.holds(name) == [True]]
        self.lab.open()
        self.lost |= {chunk_key(name) for name in before if self.lab.holds(name) == [False]}

    def restart(self) -> None:
        """The process dies: DRAM is gone, the directory is as it was."""
        self.seen["restart"] += 1
        self.dram.arena.close()
        self.faulty.inject()
        self.lab.restart()
        self.start()

    def check(self) -> None:
        self.seen["evicted from disk"] = len(self.lab.evicted)
        self.seen["in quarantine"] += self.lab.tier.quarantined_count > 0
        self.dram.check_integrity()
        self.lab.tier.check_integrity()
        if self.draws.random() < 0.1:
            assert bytes_on_disk(self.lab.root) <= self.lab.capacity_bytes
            for record in self.dram.index:
                if record.state is State.READY:
                    self.check_bytes(record)
        for on_disk in self.lab.tier.index:
            parent = on_disk.entry.parent
            if parent is not None and not self.lab.tier.holds(parent):
                assert parent in self.lost, "a chunk lies on disk that nothing reaches"

    def check_bytes(self, record: DramRecord) -> None:
        for shard, slot in record.places.items():
            view = self.dram.arena.view(slot)
            for section, offset in enumerate(geometry_of(shard).section_offsets):
                right = section_of(record.entry.key, shard, section)
                assert view[offset : offset + SECTION_BYTES] == right, "wrong bytes in DRAM"

    def run(self, steps: int) -> None:
        for step in self.draws.choices(self.steps, self.weights, k=steps):
            step()
            self.check()
        self.finish()

    def finish(self) -> None:
        """Everything under way ends, the disk is well: no pin, no byte and no file is left over."""
        self.heal()
        while self.writes:
            self.end_write()
        while self.fills:
            self.end_fill()
        while self.storing:
            self.end_store()
        for lease in self.pins:
            lease.release()
        self.lab.clock.advance(HEALTH_BACKOFF_S_MAX)
        assert self.lab.open()
        for index in (self.dram.index, self.lab.tier.index):
            assert index.pinned_count == index.leaving_count == 0
        for name in range(NAMES):
            self.lab.read(name)
        assert self.lab.do_chores()
        assert self.lab.open()  # Counts what was cut short before it was put away as it is.
        self.lab.check()
        self.lab.close()
        self.dram.arena.close()
