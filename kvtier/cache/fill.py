"""Bringing one chunk from disk into DRAM, section by section, for however many loads want it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.cache.executor import Executor, Fault
from kvtier.cache.planner import ChunkShape
from kvtier.cache.shapes import Shapes
from kvtier.errors import DeadlineError, ShardError
from kvtier.interfaces import Clock
from kvtier.obs.stats import TierCounters
from kvtier.tiers.arrival import Expected
from kvtier.tiers.disk.shard_files import DirectoryLostError
from kvtier.tiers.disk.tier import DiskRecord, DiskTier
from kvtier.tiers.disk.volume import DiskPlace
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.tiers.index import Lease
from kvtier.types import ChunkKey, Entry, KVLayout, MissReason, ShardId


@dataclass(slots=True, eq=False)
class Fill:
    """A chunk on its way. ``verified`` counts, per shard, the sections that may be used.

    Whoever uses the record pins it for itself; the fill keeps its own pin until its I/O has
    ended, also after its deadline, so no slot is given away while the kernel may write to it.
    """

    record: DramRecord
    source: DiskRecord
    source_lease: Lease[DiskPlace]
    verified: dict[ShardId, int]
    started: float
    deadline: float
    failure: MissReason | None = None
    failed_shard: ShardId | None = None


class Filler:
    """Starts fills and settles them. Used under the cache's lock, which its callbacks take."""

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier,
        executor: Executor,
        lock: threading.Lock,
        counters: TierCounters,
        clock: Clock,
        shapes: Shapes,
    ) -> None:
        self._dram = dram
        self._disk = disk
        self._shapes = shapes
        self._executor = executor
        self._lock = lock
        self._counters = counters
        self._clock = clock
        self._running: dict[ChunkKey, Fill] = {}

    @property
    def late_count(self) -> int:
        """Reads that are overdue and have not ended."""
        return sum(volume.late_count for volume in self._disk.volumes)

    def running(self, key: ChunkKey) -> Fill | None:
        """Return the fill of a chunk that is under way, for another load to follow."""
        return self._running.get(key)

    def available(self) -> bool:
        """Tell whether any of the disk's directories may be asked: few answers are overdue."""
        return any(volume.answers for volume in self._disk.volumes)

    def start(self, source: DiskRecord, layout: KVLayout, deadline: float) -> Fill | None:
        """Read a chunk into DRAM until ``deadline``. None: no room beside what is pinned."""
        origin = source.entry
        shape = self._shapes.of(layout, origin.position, source.codec)
        # What lies on disk may lack shards of the chunk; what comes into DRAM then lacks them too.
        sizes = {shard: size for shard, size in shape.sizes.items() if shard in source.places}
        entry = Entry(origin.key, origin.parent, sum(sizes.values()), origin.position)
        record = self._dram.reserve(entry, source.namespace, source.codec, sizes)
        if record is None:
            return None
        lease = self._disk.index.lease([source])
        verified = dict.fromkeys(sizes, 0)
        fill = Fill(record, source, lease, verified, self._clock.now(), deadline)
        self._running[entry.key] = fill
        self._executor.read(
            self._disk.volume_of(source).number,
            self._reading(fill, shape),
            lambda outcome: self._settle(fill, outcome),
            deadline=deadline,
            late=lambda _: self._end_late(fill),
        )
        return fill

    def _reading(self, fill: Fill, shape: ChunkShape) -> Callable[[], None]:
        """Return the blocking work of a fill; it owns the slots until it ends."""
        files = self._disk.volume_of(fill.source).files
        jobs = [
            (
                fill.source.places[shard].path,
                self._dram.arena.view(slot),
                Expected(
                    chunk=fill.record.entry.key,
                    shard=shard,
                    namespace=fill.record.namespace,
                    codec=fill.record.codec,
                    layout=shape.layouts[shard],
                    geometry=shape.geometries[shard],
                ),
            )
            for shard, slot in fill.record.places.items()
        ]

        def read_shards() -> None:
            for path, slot, expected in jobs:
                if fill.failure is not None:  # Overdue: nobody wants the rest.
                    return

                def progress(sections: int, shard: ShardId = expected.shard) -> None:
                    with self._lock:
                        fill.verified[shard] = sections

                try:
                    files.read(path, slot, expected, progress)
                except ShardError:
                    fill.failed_shard = expected.shard
                    raise

        return read_shards

    def _settle(self, fill: Fill, outcome: Fault | None) -> None:
        volume = self._disk.volume_of(fill.source)
        with self._lock:
            del self._running[fill.record.entry.key]
            if isinstance(outcome, DeadlineError):
                fill.failure = MissReason.DEADLINE
                volume.late_count += 1
                volume.read_failed(outcome)
                self._dram.abandon(fill.record)
                return
            if outcome is None:
                volume.read_succeeded()
                self._counters.read_bytes += fill.source.entry.nbytes
                self._counters.read_latency.observe(self._clock.now() - fill.started)
                self._dram.commit(fill.record)
            else:
                fill.failure = self._blame(fill, outcome)
                self._dram.abort(fill.record)
            fill.source_lease.release()

    def _blame(self, fill: Fill, fault: Fault) -> MissReason:
        """Say why a read failed and make the disk tier draw its conclusion."""
        # A directory that is gone may come back with all that it holds.
        lost = isinstance(fault, DirectoryLostError)
        held = self._disk.index.get(fill.source.entry.key) is fill.source
        volume = self._disk.volume_of(fill.source)
        if isinstance(fault, ShardError):
            volume.read_succeeded()
            self._counters.corrupt_shards += 1
            if held and fill.failed_shard is not None:
                self._disk.condemn(fill.source, fill.failed_shard)
            return MissReason.CORRUPT
        if isinstance(fault, FileNotFoundError) and not lost:
            if held:
                self._disk.forget(fill.source)
            return MissReason.ABSENT
        self._counters.io_errors += 1
        volume.read_failed(fault)
        return MissReason.IO_ERROR

    def _end_late(self, fill: Fill) -> None:
        """The overdue I/O has ended: its slots may be used for something else."""
        with self._lock:
            self._disk.volume_of(fill.source).late_count -= 1
            self._dram.index.unpin(fill.record)
            fill.source_lease.release()
