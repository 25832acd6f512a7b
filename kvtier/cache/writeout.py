"""Bringing chunks from DRAM to disk: what is dirty, in which order, and how it went.

``through`` writes a chunk as soon as it is stored, ``back`` when dirty chunks take more than
their share of DRAM. Either way few writes are out at a time and each pins its chunk; what waits
stays evictable, so a slow disk costs dropped chunks (counted), never memory or waiting.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Dirty:
    """A chunk to be written. ``number`` is its place in the order of stores: parents first."""

    shape: ChunkShape
    number: int


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
        self._dirty: dict[ChunkKey, _Dirty] = {}  # oldest first
        self._numbers = itertools.count()
        self._dirty_bytes = 0
        self._chores_out = False
        # Why room was not made; set by the writing thread, cleared when nothing is out there.
        self._no_room_made: OSError | None = None
        self.inflight_count = 0

    @property
    def dirty_count(self) -> int:
        """Chunks in DRAM that are to be written and are not being written yet."""
        return len(self._dirty)

    def add(self, key: ChunkKey, shape: ChunkShape) -> None:
        """Note that a chunk, whole and ready in DRAM, belongs on disk too."""
        held = self._disk.index.ready(key)
        if held is not None and held.places.keys() != shape.layouts.keys():
            self._disk.forget(held)  # It has lost a shard; the whole chunk takes its place.
        if key not in self._dirty and self._disk.index.get(key) is None:
            self._dirty[key] = _Dirty(shape, next(self._numbers))
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
            enough = self._write_all or self._dirty_bytes > self._high_bytes
            if not enough and not self._disk.probe_due():
                break
            key = next(iter(self._dirty))
            dirty = self._take(key)
            assert dirty is not None, "taken from what is dirty"
            self._start(key, dirty)
        if self.inflight_count == 0 and not self._chores_out and self._disk.writable():
            self._start_chores()

    @property
    def _high_bytes(self) -> float:
        return DIRTY_SHARE_HIGH * self._dram.capacity_bytes

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        dirty_bytes = sum(dirty.shape.chunk_bytes for dirty in self._dirty.values())
        if dirty_bytes != self._dirty_bytes:
            raise AssertionError(f"{self._dirty_bytes} dirty bytes counted, {dirty_bytes} found")
        for key in self._dirty:
            if self._dram.index.ready(key) is None:
                raise AssertionError(f"{key.hex()} is dirty and not in DRAM")
        if not 0 <= self.inflight_count <= WRITES_INFLIGHT_MAX:
            raise AssertionError(f"{self.inflight_count} writes are out")

    def _take(self, key: ChunkKey) -> _Dirty | None:
        dirty = self._dirty.pop(key, None)
        if dirty is not None:
            self._dirty_bytes -= dirty.shape.chunk_bytes
        return dirty

    def _start(self, key: ChunkKey, dirty: _Dirty) -> None:
        source = self._dram.index.ready(key)
        assert source is not None, "a dirty chunk is ready in DRAM"
        if self._disk.index.get(key) is not None:
            return
        sizes = dirty.shape.sizes
        target = self._disk.reserve(source.entry, source.namespace, source.codec, sizes)
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
                self._requeue(key, dirty)
            self._forgive()
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

        work = self._writing(source, target, dirty.shape, chores)
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

    def _requeue(self, key: ChunkKey, dirty: _Dirty) -> None:
        """Try a chunk again, and before its descendants, once the disk may be written to."""
        self._dirty[key] = dirty
        self._dirty_bytes += dirty.shape.chunk_bytes
        self._dirty = dict(sorted(self._dirty.items(), key=lambda item: item[1].number))

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
                self._forgive()

        self._executor.write(lambda: self._do(chores), done, deadline=math.inf, late=done)

    def _forgive(self) -> None:
        """What starts from now on takes the chores that failed with it."""
        if self.inflight_count == 0 and not self._chores_out:
            self._no_room_made = None

    def _do(self, chores: Chores) -> None:
        """Make room; in the writing thread. Raises ``OSError``.

        Once it could not be made, all that is out fails: it was given room that is not there.
        """
        if self._no_room_made is not None:
            raise OSError(self._no_room_made.errno, "no room was made before") from (
                self._no_room_made
            )
        try:
            for place in chores.quarantine:
                self._files.quarantine(place.path)
                _log.warning("quarantined %s", place.path)
            for place in chores.remove:
                self._files.remove(place.path)
        except OSError as error:
            self._no_room_made = error
            raise
