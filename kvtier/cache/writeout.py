"""Bringing chunks from DRAM to disk: what is dirty, in which order, and how it went.

``through`` writes a chunk as soon as it is stored, ``back`` when dirty chunks take more than
their share of DRAM. Either way few writes are out at a time and each pins its chunk; what waits
stays evictable, so a slow disk costs dropped chunks (counted), never memory or waiting.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

from kvtier.cache.executor import Executor, Fault
from kvtier.cache.planner import ChunkShape
from kvtier.config import WriteMode
from kvtier.constants import DIRTY_SHARE_HIGH, WRITE_DEADLINE_S, WRITES_INFLIGHT_MAX
from kvtier.errors import DeadlineError
from kvtier.interfaces import Clock
from kvtier.obs.stats import TierCounters
from kvtier.shard_format import ShardDescription
from kvtier.tiers.disk.shard_files import ShardFiles
from kvtier.tiers.disk.tier import Chores, DiskRecord, DiskTier
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.types import ChunkKey, MissReason

_log = logging.getLogger("kvtier.writeout")


class Writeout:
    """Owns the set of dirty chunks. Used under the cache's lock, which its callbacks take."""

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier,
        files: ShardFiles,
        executor: Executor,
        lock: threading.Lock,
        counters: TierCounters,
        clock: Clock,
        mode: WriteMode,
    ) -> None:
        self._dram = dram
        self._disk = disk
        self._files = files
        self._executor = executor
        self._lock = lock
        self._counters = counters
        self._clock = clock
        self._write_all = mode is WriteMode.THROUGH
        self._dirty: dict[ChunkKey, ChunkShape] = {}  # oldest first
        self._dirty_bytes = 0
        self._chores_out = False
        self.inflight_count = 0

    @property
    def dirty_count(self) -> int:
        """Chunks in DRAM that are to be written and are not being written yet."""
        return len(self._dirty)

    def add(self, key: ChunkKey, shape: ChunkShape) -> None:
        """Note that a chunk ready in DRAM belongs on disk too."""
        if key not in self._dirty and self._disk.index.get(key) is None:
            self._dirty[key] = shape
            self._dirty_bytes += shape.chunk_bytes

    def drop(self, key: ChunkKey) -> None:
        """Note that a chunk leaves DRAM; if it was dirty it is lost, and counted."""
        if self._take(key) is not None:
            self._counters.refused_chunks[MissReason.NO_ROOM] += 1

    def flush(self) -> None:
        """From now on write everything, whatever the mode."""
        self._write_all = True
        self.pump()

    def pump(self) -> None:
        """Start as many writes as may be out; else the chores that wait for no write."""
        while self._dirty and self.inflight_count < WRITES_INFLIGHT_MAX and self._disk.writable():
            if not self._write_all and self._dirty_bytes <= self._high_bytes:
                break
            key = next(iter(self._dirty))
            self._start(key, self._dirty[key])
            self._take(key)
        if self.inflight_count == 0 and not self._chores_out and self._disk.writable():
            self._start_chores()

    @property
    def _high_bytes(self) -> float:
        return DIRTY_SHARE_HIGH * self._dram.capacity_bytes

    def _take(self, key: ChunkKey) -> ChunkShape | None:
        shape = self._dirty.pop(key, None)
        if shape is not None:
            self._dirty_bytes -= shape.chunk_bytes
        return shape

    def _start(self, key: ChunkKey, shape: ChunkShape) -> None:
        source = self._dram.index.ready(key)
        assert source is not None, "a dirty chunk is ready in DRAM"
        if self._disk.index.get(key) is not None:
            return
        target = self._disk.reserve(source.entry, source.namespace, source.codec, shape.sizes)
        if target is None:
            self._counters.refused_chunks[MissReason.NO_ROOM] += 1
            return
        lease = self._dram.index.lease([source])
        chores = self._disk.take_chores()
        started = self._clock.now()
        self.inflight_count += 1

        def settle(outcome: Fault | None) -> None:
            self.inflight_count -= 1
            if outcome is None:
                self._counters.written_bytes += target.entry.nbytes
                self._counters.write_latency.observe(self._clock.now() - started)
                self._disk.commit(target)
            else:
                self._fail(target, chores, outcome)
            lease.release()
            if outcome is not None and self._dram.index.get(key) is source:
                self._requeue(key, shape)
            self.pump()

        def done(outcome: Fault | None) -> None:
            with self._lock:
                if isinstance(outcome, DeadlineError):
                    # The write is still out; it keeps its pins and its place in the count.
                    self._disk.write_failed(outcome)
                else:
                    settle(outcome)

        def late(outcome: Fault | None) -> None:
            with self._lock:
                settle(outcome)

        work = self._writing(source, target, shape, chores)
        self._executor.write(work, done, deadline=started + WRITE_DEADLINE_S, late=late)

    def _writing(
        self, source: DramRecord, target: DiskRecord, shape: ChunkShape, chores: Chores
    ) -> Callable[[], None]:
        """Return the blocking work of a write; the source is pinned until it ends."""
        entry = source.entry
        jobs = [
            (
                target.places[shard].path,
                self._dram.arena.view(slot),
                ShardDescription(
                    chunk=entry.key,
                    shard=shard,
                    parent=entry.parent,
                    position=entry.position,
                    namespace=source.namespace,
                    codec=source.codec,
                    codec_params={},
                    layout=shape.layouts[shard],
                    token_count=shape.layouts[shard].tokens,
                    has_sinks=False,
                    section_bytes=shape.geometries[shard].section_bytes,
                ),
            )
            for shard, slot in source.places.items()
        ]

        def write_shards() -> None:
            self._do(chores)
            for path, slot, description in jobs:
                self._files.write(path, slot, description)

        return write_shards

    def _fail(self, target: DiskRecord, chores: Chores, fault: Fault) -> None:
        self._counters.io_errors += 1
        self._disk.abort(target)
        self._disk.return_chores(chores)
        self._disk.write_failed(fault)

    def _requeue(self, key: ChunkKey, shape: ChunkShape) -> None:
        """Try a chunk again, and before its descendants, once the disk may be written to."""
        later, self._dirty = self._dirty, {}
        self._dirty_bytes = sum(shape.chunk_bytes for shape in later.values())
        self.add(key, shape)
        self._dirty |= later

    def _start_chores(self) -> None:
        chores = self._disk.take_chores()
        if not chores.remove and not chores.quarantine:
            return
        self._chores_out = True

        def done(outcome: Fault | None) -> None:
            with self._lock:
                self._chores_out = False
                if outcome is not None:
                    self._disk.return_chores(chores)
                    self._disk.write_failed(outcome)

        self._executor.write(lambda: self._do(chores), done, deadline=math.inf, late=done)

    def _do(self, chores: Chores) -> None:
        for place in chores.quarantine:
            self._files.quarantine(place.path)
            _log.warning("quarantined %s", place.path)
        for place in chores.remove:
            self._files.remove(place.path)
