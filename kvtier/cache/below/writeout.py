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
from dataclasses import replace

from kvtier.cache.below.ahead import Ahead, Dirty, Outgoing
from kvtier.cache.below.encoder import ChunkEncoder
from kvtier.cache.below.lane import Lane
from kvtier.cache.executor import Executor, Fault
from kvtier.cache.shapes import Shapes
from kvtier.cache.tenancy.quota import NoQuotas, Quotas
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
from kvtier.shard_format import seal
from kvtier.tiers.disk.tier import DiskRecord, DiskTier
from kvtier.tiers.disk.volume import Chores, written
from kvtier.tiers.dram import DramTier
from kvtier.tiers.index import Lease
from kvtier.types import ChunkKey, Features, KVLayout, MissReason, Slot


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
        encoder: ChunkEncoder | None = None,
    ) -> None:
        """With an ``encoder`` chunks are encoded before room is made for what comes of them."""
        self._dram = dram
        self._disk = disk
        self._executor = executor
        self._lock = lock
        self._counters = counters
        self._clock = clock
        self._shapes = shapes
        self._write_all = mode is WriteMode.THROUGH
        self._admission = admission
        self._ahead = Ahead(dram, executor, lock, shapes, encoder)
        self._draining = False
        self._dirty: dict[ChunkKey, Dirty] = {}  # oldest first
        self._numbers = itertools.count()
        self._dirty_bytes = 0
        self._staged_count = 0
        self._lanes = [Lane(volume) for volume in disk.volumes]
        #: What is asked before a chunk is written; the cache puts its own here.
        self.quotas: Quotas = NoQuotas()

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
        """Chunks that are being encoded or written."""
        return len(self._ahead) + sum(lane.volume.writing_count for lane in self._lanes)

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
        if key in self._dirty or key in self._ahead:
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
        expected = replace(entry, nbytes=self._ahead.expected_bytes(nbytes))
        if not self._admission.offer(expected, now):
            return False
        self._dirty[key] = Dirty(entry, layout, next(self._numbers), staged)
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

    def waits(self, key: ChunkKey) -> bool:
        """Tell whether a chunk is still to be written, from what DRAM has of it."""
        dirty = self._dirty.get(key)
        return dirty is not None and dirty.staged is None

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
        self._write_encoded()
        self._unstage()
        while self._dirty and self._disk.writable() and not self._ahead.full:
            if not self._enough() and not any(lane.volume.write_probe_due for lane in self._lanes):
                break
            key = next(iter(self._dirty))
            dirty = self._take(key)
            assert dirty is not None, "taken from what is dirty"
            if self._ahead.encodes:
                self._ahead.encode(dirty, self._encoded)
            else:
                self._start(self._ahead.pin(dirty))
        for lane in self._lanes:
            volume = lane.volume
            if lane.idle and volume.writable:
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

    def _take(self, key: ChunkKey) -> Dirty | None:
        dirty = self._dirty.pop(key, None)
        if dirty is not None:
            self._dirty_bytes -= dirty.entry.nbytes
            self._staged_count -= dirty.staged is not None
        return dirty

    def _encoded(self, failed: Outgoing | None) -> None:
        """Note that a chunk is encoded, or could not be: no better the next time."""
        if failed is not None:
            self._give_up(failed)
        self.pump()

    def _write_encoded(self) -> None:
        """Start to write what is encoded, in order."""
        while (outgoing := self._ahead.first) is not None:
            before = next(iter(self._dirty.values()), None)
            # A parent that has failed is tried again before.
            behind = before is not None and before.number < outgoing.dirty.number
            writable = self._disk.writable()
            if not behind and not writable and self._disk_is_well:
                return
            self._ahead.take(outgoing)
            if writable and not behind:
                self._start(outgoing)
            else:  # Nothing is kept for a disk that fails.
                self._ahead.release(outgoing)
                self._try_again(outgoing)

    def _try_again(self, outgoing: Outgoing) -> None:
        """Have a chunk written later, where it is still there."""
        key = outgoing.dirty.entry.key
        if outgoing.dirty.staged or self._dram.index.get(key) is outgoing.source:
            self._requeue(key, outgoing.dirty)
        else:
            self._refuse(key)

    def _give_up(
        self,
        outgoing: Outgoing,
        *,
        held: bool = False,
        reason: MissReason = MissReason.NO_ROOM,
    ) -> None:
        """Let a chunk go that is not written, or that is ``held`` already."""
        if not held:
            self._refuse(outgoing.dirty.entry.key, reason)
        self._ahead.release(outgoing)
        if outgoing.dirty.staged is not None:
            self._end_staged(outgoing.dirty.staged)

    def _start(self, outgoing: Outgoing) -> None:
        dirty, source = outgoing.dirty, outgoing.source
        key, staged = dirty.entry.key, dirty.staged
        shape = self._shapes.of(dirty.layout, dirty.entry.position, source.codec)
        sizes = shape.sizes if outgoing.encoded is None else outgoing.encoded.sizes
        # Since it was noted, a sweep may have found it, or what a kill left of it.
        self._disk.displace(key, shape.sizes.keys())
        held = self._disk.holds(key)
        entry = replace(dirty.entry, nbytes=sum(sizes.values()))
        if not held and not self.quotas.room_on_disk(source.namespace, entry):
            self._give_up(outgoing, reason=MissReason.QUOTA)
            return
        target = None if held else self._disk.reserve(entry, source.namespace, source.codec, sizes)
        if target is None:
            self._give_up(outgoing, held=held)
            return
        lane = self._lanes[self._disk.volume_of(target).number]
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
            self._ahead.release(outgoing)
            if outcome is not None:
                self._try_again(outgoing)
            elif staged is not None:
                self._end_staged(staged)
            lane.forgive()
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

        work = self._writing(lane, target, outgoing, chores)
        deadline = started + WRITE_DEADLINE_S
        self._executor.write(lane.volume.number, work, done, deadline=deadline, late=late)

    def _writing(
        self, lane: Lane, target: DiskRecord, outgoing: Outgoing, chores: Chores
    ) -> Callable[[], None]:
        """Return the blocking work of a write; the source is pinned until it ends.

        Checksums are made ahead, while the directory's thread still writes what comes before.
        """
        slots, descriptions = self._ahead.parts(outgoing)
        encoded = outgoing.encoded
        row = self._disk.row(target)

        def seal_slots() -> None:
            for shard, description in descriptions.items():
                seal(slots[shard], description)

        sealed = self._executor.prepare(seal_slots) if encoded is None else None

        def write_shards() -> None:
            try:
                lane.do(chores)
            finally:
                if sealed is not None:
                    sealed.result()  # In any case: until then the slots are written to.
            for shard, place in target.places.items():
                data = slots[shard] if encoded is None else encoded.shards[shard]
                lane.volume.files.write(place.path, data)
            lane.volume.files.note(written(row))

        return write_shards

    def _refuse(self, key: ChunkKey, reason: MissReason = MissReason.NO_ROOM) -> None:
        """Give up a chunk that the admission takes for written."""
        self._counters.refused_chunks[reason] += 1
        self.left_disk(key)

    def _requeue(self, key: ChunkKey, dirty: Dirty) -> None:
        """Try a chunk again, and before its descendants, once the disk may be written to."""
        self._dirty[key] = dirty
        self._dirty_bytes += dirty.entry.nbytes
        self._staged_count += dirty.staged is not None
        self._dirty = dict(sorted(self._dirty.items(), key=lambda item: item[1].number))

    def _start_chores(self, lane: Lane) -> None:
        if not lane.volume.chores_due:
            return
        chores = lane.volume.take_chores()
        lane.chores_out = True

        def work() -> None:
            lane.do(chores)

        def done(outcome: Fault | None) -> None:
            with self._lock:
                lane.chores_out = False
                if outcome is None:
                    lane.volume.finish_chores(chores)
                    lane.volume.write_succeeded()  # There may be nothing else to find it out by.
                else:
                    lane.volume.return_chores(chores)
                    lane.volume.write_failed(outcome)
                lane.forgive()

        self._executor.write(lane.volume.number, work, done, deadline=math.inf, late=done)
