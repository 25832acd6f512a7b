"""Bringing chunks from DRAM to disk: which, in which order, and how it went.

An admission says what is worth a write. ``through`` then writes a chunk as soon as it is stored;
``back`` waits until such chunks take more than the high share of DRAM and writes until they take
less than the low one. Either way few writes are out at a time and each pins its chunk; what waits
stays evictable, so a slow disk costs dropped chunks (counted), never memory or waiting.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.cache.executor import Executor, Fault
from kvtier.cache.planner import ChunkShape
from kvtier.cache.shapes import Shapes
from kvtier.config import WriteMode
from kvtier.constants import (
    DIRTY_SHARE_HIGH,
    DIRTY_SHARE_LOW,
    STAGED_CHUNKS_MAX,
    WRITE_DEADLINE_S,
    WRITES_INFLIGHT_MAX,
)
from kvtier.errors import DeadlineError
from kvtier.interfaces import AdmissionPolicy, Clock
from kvtier.obs.stats import TierCounters
from kvtier.shard_format import ShardDescription, seal
from kvtier.tiers.disk.tier import DiskRecord, DiskTier
from kvtier.tiers.disk.volume import Chores, Volume, written
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.tiers.index import Lease
from kvtier.types import ChunkKey, Entry, Features, KVLayout, MissReason, ShardId, Slot


@dataclass(frozen=True, slots=True)
class _Dirty:
    """A chunk to be written. ``number`` is its place in the order of stores: parents first.

    ``staged`` pins the same chunk as it was packed for the disk, where that differs from DRAM's.
    """

    entry: Entry
    layout: KVLayout
    number: int
    staged: Lease[Slot] | None


@dataclass(slots=True, eq=False)
class _Lane:
    """What is out at one directory."""

    volume: Volume
    chores_out: bool = False
    # Why room was not made; set by the writing thread, cleared when nothing is out there.
    no_room_made: OSError | None = None


class Writeout:
    """Owns the set of dirty chunks. Used under the cache's lock, which its callbacks take."""

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier,
        executor: Executor,
        lock: threading.Lock,
        counters: TierCounters,
        clock: Clock,
        shapes: Shapes,
        mode: WriteMode,
        admission: AdmissionPolicy,
    ) -> None:
        self._dram = dram
        self._disk = disk
        self._executor = executor
        self._lock = lock
        self._counters = counters
        self._clock = clock
        self._shapes = shapes
        self._write_all = mode is WriteMode.THROUGH
        self._admission = admission
        self._draining = False
        self._dirty: dict[ChunkKey, _Dirty] = {}  # oldest first
        self._numbers = itertools.count()
        self._dirty_bytes = 0
        self._staged_count = 0
        self._lanes = [_Lane(volume) for volume in disk.volumes]

    @property
    def dirty_count(self) -> int:
        """Chunks in DRAM that are to be written and are not being written yet."""
        return len(self._dirty)

    def takes_staged(self, packing_count: int) -> bool:
        """Tell whether DRAM may keep one more chunk that is packed for the disk alone.

        Few at a time, ``packing_count`` of which are still being packed, and only where they are
        written soon: they cannot be evicted.
        """
        soon = self._write_all and self._disk_is_well
        return soon and packing_count + self._staged_count < STAGED_CHUNKS_MAX

    @property
    def _disk_is_well(self) -> bool:
        return any(lane.volume.state[0] in ("ok", "opening") for lane in self._lanes)

    @property
    def inflight_count(self) -> int:
        """Chunks that are being written."""
        return sum(lane.volume.writing_count for lane in self._lanes)

    def note(
        self,
        key: ChunkKey,
        layout: KVLayout,
        features: Features,
        staged: Lease[Slot] | None = None,
    ) -> None:
        """Note an access to a chunk: if it is ready in DRAM, it may belong on disk too.

        ``staged`` pins what was packed for the disk; it is released, and leaves, in any case.
        """
        if not self._note(key, layout, features, staged) and staged is not None:
            self._end_staged(staged)

    def _note(
        self, key: ChunkKey, layout: KVLayout, features: Features, staged: Lease[Slot] | None
    ) -> bool:
        """Return whether the chunk has become dirty."""
        whole = self._shapes.shards(layout)
        self._disk.displace(key, whole)
        if key in self._dirty:
            return False
        now = self._clock.now()
        if self._disk.holds(key):
            self._admission.touch(key, now, features)
            return False
        record = self._dram.index.ready(key)
        if record is None or record.places.keys() != whole:
            return False
        nbytes = sum(r.entry.nbytes for r in staged.records) if staged else record.entry.nbytes
        entry = replace(record.entry, nbytes=nbytes, features=features)
        if not self._admission.offer(entry, now):
            return False
        self._dirty[key] = _Dirty(entry, layout, next(self._numbers), staged)
        self._dirty_bytes += nbytes
        self._staged_count += staged is not None
        return True

    def _end_staged(self, staged: Lease[Slot]) -> None:
        """Let go what was packed for the disk alone."""
        staged.release()
        for record in staged.records:
            if self._dram.index.ready(record.entry.key) is record and not record.pins:
                self._dram.leave(record)

    def _unstage(self) -> None:
        """Keep nothing for a disk that fails: once it is back it takes what DRAM has."""
        if self._disk_is_well or not self._staged_count:
            return
        for key, dirty in list(self._dirty.items()):
            if dirty.staged is None:
                continue
            record = self._dram.index.ready(key)
            if record is None:
                self._take(key)
                self._refuse(key)
            else:
                entry = replace(dirty.entry, nbytes=record.entry.nbytes)
                self._dirty[key] = replace(dirty, entry=entry, staged=None)
                self._dirty_bytes += entry.nbytes - dirty.entry.nbytes
                self._staged_count -= 1
            self._end_staged(dirty.staged)

    def left_disk(self, key: ChunkKey) -> None:
        """Note that the disk gave a chunk up."""
        self._admission.left(key, self._clock.now())

    def drop(self, key: ChunkKey) -> None:
        """Note that a chunk leaves DRAM; if it was dirty it is lost, and counted."""
        dirty = self._dirty.get(key)
        if dirty is not None and dirty.staged is None:
            self._take(key)
            self._refuse(key)

    def flush(self) -> None:
        """From now on write everything, whatever the mode."""
        self._write_all = True
        self.pump()

    def pump(self) -> None:
        """Start as many writes as may be out; else the chores that wait for no write."""
        self._unstage()
        while self._dirty and self._disk.writable():
            if not self._enough() and not any(lane.volume.write_probe_due for lane in self._lanes):
                break
            key = next(iter(self._dirty))
            dirty = self._take(key)
            assert dirty is not None, "taken from what is dirty"
            self._start(key, dirty)
        for lane in self._lanes:
            volume = lane.volume
            if volume.writing_count == 0 and not lane.chores_out and volume.writable:
                self._start_chores(lane)

    def _enough(self) -> bool:
        """Tell whether to write now. Write-back goes on until little is dirty."""
        share = self._dirty_bytes / self._dram.capacity_bytes
        self._draining = share > (DIRTY_SHARE_LOW if self._draining else DIRTY_SHARE_HIGH)
        return self._write_all or self._draining

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        dirty_bytes = sum(dirty.entry.nbytes for dirty in self._dirty.values())
        if dirty_bytes != self._dirty_bytes:
            raise AssertionError(f"{self._dirty_bytes} dirty bytes counted, {dirty_bytes} found")
        for key, dirty in self._dirty.items():
            if dirty.staged is None and self._dram.index.ready(key) is None:
                raise AssertionError(f"{key.hex()} is dirty and not in DRAM")
        for lane in self._lanes:
            if not 0 <= lane.volume.writing_count <= WRITES_INFLIGHT_MAX:
                raise AssertionError(f"{lane.volume.writing_count} writes are out")

    def _take(self, key: ChunkKey) -> _Dirty | None:
        dirty = self._dirty.pop(key, None)
        if dirty is not None:
            self._dirty_bytes -= dirty.entry.nbytes
            self._staged_count -= dirty.staged is not None
        return dirty

    def _start(self, key: ChunkKey, dirty: _Dirty) -> None:
        staged = dirty.staged
        source = staged.records[0] if staged else self._dram.index.ready(key)
        assert source is not None, "a dirty chunk is ready in DRAM"
        shape = self._shapes.of(dirty.layout, dirty.entry.position, source.codec)
        # Since it was noted, a sweep may have found it, or what a kill left of it.
        self._disk.displace(key, shape.sizes.keys())
        held = self._disk.holds(key)
        sizes = shape.sizes
        target = (
            None if held else self._disk.reserve(dirty.entry, source.namespace, source.codec, sizes)
        )
        if target is None:
            if not held:
                self._refuse(key)
            if staged is not None:
                self._end_staged(staged)
            return
        lane = self._lanes[self._disk.volume_of(target).number]
        lease = self._dram.index.lease([source])
        chores = lane.volume.take_chores()
        started = self._clock.now()

        def settle(outcome: Fault | None) -> None:
            if outcome is None:
                self._counters.written_bytes += target.entry.nbytes
                self._counters.write_latency.observe(self._clock.now() - started)
                lane.volume.finish_chores(chores)
                self._disk.commit(target)
            else:
                self._counters.io_errors += 1
                self._disk.abort(target)
                lane.volume.return_chores(chores)
                lane.volume.write_failed(outcome)
            lease.release()
            if outcome is not None and (staged or self._dram.index.get(key) is source):
                self._requeue(key, dirty)
            elif staged is not None:
                self._end_staged(staged)
            self._forgive(lane)
            self.pump()

        def done(outcome: Fault | None) -> None:
            with self._lock:
                if isinstance(outcome, DeadlineError):
                    # The write is still out; it keeps its pins and its place in the count.
                    lane.volume.write_failed(outcome)
                else:
                    settle(outcome)

        def late(outcome: Fault | None) -> None:
            with self._lock:
                settle(outcome)

        work = self._writing(lane, source, target, shape, chores)
        deadline = started + WRITE_DEADLINE_S
        self._executor.write(lane.volume.number, work, done, deadline=deadline, late=late)

    def _writing(
        self,
        lane: _Lane,
        source: DramRecord,
        target: DiskRecord,
        shape: ChunkShape,
        chores: Chores,
    ) -> Callable[[], None]:
        """Return the blocking work of a write; the source is pinned until it ends.

        Checksums are made ahead, while the directory's thread still writes what comes before.
        """
        slots = {shard: self._dram.arena.view(slot) for shard, slot in source.places.items()}
        descriptions = {shard: _describe(target, shape, shard) for shard in slots}
        row = self._disk.row(target)

        def seal_slots() -> None:
            for shard, description in descriptions.items():
                seal(slots[shard], description)

        sealed = self._executor.prepare(seal_slots)

        def write_shards() -> None:
            try:
                self._do(lane, chores)
            finally:
                sealed.result()  # In any case: until then the slots are written to.
            for shard, place in target.places.items():
                lane.volume.files.write(place.path, slots[shard])
            lane.volume.files.note(written(row))

        return write_shards

    def _refuse(self, key: ChunkKey) -> None:
        """Give up a chunk that the admission takes for written."""
        self._counters.refused_chunks[MissReason.NO_ROOM] += 1
        self.left_disk(key)

    def _requeue(self, key: ChunkKey, dirty: _Dirty) -> None:
        """Try a chunk again, and before its descendants, once the disk may be written to."""
        self._dirty[key] = dirty
        self._dirty_bytes += dirty.entry.nbytes
        self._staged_count += dirty.staged is not None
        self._dirty = dict(sorted(self._dirty.items(), key=lambda item: item[1].number))

    def _start_chores(self, lane: _Lane) -> None:
        if not lane.volume.chores_due:
            return
        chores = lane.volume.take_chores()
        lane.chores_out = True

        def work() -> None:
            self._do(lane, chores)

        def done(outcome: Fault | None) -> None:
            with self._lock:
                lane.chores_out = False
                if outcome is None:
                    lane.volume.finish_chores(chores)
                else:
                    lane.volume.return_chores(chores)
                    lane.volume.write_failed(outcome)
                self._forgive(lane)

        self._executor.write(lane.volume.number, work, done, deadline=math.inf, late=done)

    def _forgive(self, lane: _Lane) -> None:
        """What starts from now on takes the chores that failed with it."""
        if lane.volume.writing_count == 0 and not lane.chores_out:
            lane.no_room_made = None

    def _do(self, lane: _Lane, chores: Chores) -> None:
        """Make room; in the writing thread. Raises ``OSError``.

        Once it could not be made, all that is out fails: it was given room that is not there.
        """
        if lane.no_room_made is not None:
            raise OSError(lane.no_room_made.errno, "no room was made before") from (
                lane.no_room_made
            )
        try:
            lane.volume.do(chores)
        except OSError as error:
            lane.no_room_made = error
            raise


def _describe(target: DiskRecord, shape: ChunkShape, shard: ShardId) -> ShardDescription:
    entry = target.entry
    return ShardDescription(
        chunk=entry.key,
        shard=shard,
        parent=entry.parent,
        position=entry.position,
        namespace=target.namespace,
        codec=target.codec,
        codec_params={},
        layout=shape.layouts[shard],
        token_count=shape.layouts[shard].tokens,
        has_sinks=shape.layouts[shard].sink_tokens > 0,
        section_bytes=shape.geometries[shard].section_bytes,
    )
