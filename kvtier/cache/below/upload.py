"""Taking chunks from DRAM to a remote that lacks them, in the background and in batches.

``through`` writes what was stored or has come up, ``back`` waits until much of DRAM is not in the
remote yet. What is not written by the time it leaves DRAM is not written at all, and counted.
Nothing waits for a remote: what it does not take in time is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvtier.cache.below.encoder import describe
from kvtier.cache.below.remote_source import Remote
from kvtier.cache.executor import Executor, Fault
from kvtier.cache.shapes import Shapes
from kvtier.config import WriteMode
from kvtier.constants import (
    DIRTY_SHARE_HIGH,
    DIRTY_SHARE_LOW,
    REMOTE_BATCH_BYTES,
    UPLOAD_CHUNKS_MAX,
    UPLOAD_JOBS_MAX,
    UPLOAD_TRIES_MAX,
    UPLOADS_WAITING_MAX,
    WRITE_DEADLINE_S,
)
from kvtier.errors import ConnectorRefusedError, DeadlineError, KVTierError
from kvtier.interfaces import AdmissionPolicy, Clock
from kvtier.keys import shard_key
from kvtier.obs.counters import Counters
from kvtier.shard_format import ShardDescription, seal
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.tiers.index import Lease
from kvtier.tiers.remote.batches import batch_count
from kvtier.tiers.remote.holdings import RemoteRecord
from kvtier.types import (
    ChunkKey,
    Entry,
    Features,
    KVLayout,
    MissReason,
    ShardId,
    ShardKey,
    Slot,
    Tier,
    WriteItem,
)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A chunk to be written. ``number`` is its place in the order of stores: parents first."""

    entry: Entry
    layout: KVLayout
    number: int
    tries: int = 0


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk on its way: what it is written from, and where to."""

    waiting: _Waiting
    record: DramRecord
    place: RemoteRecord | None
    slots: dict[ShardId, memoryview]
    descriptions: dict[ShardId, ShardDescription]
    outcome: KVTierError | None = None
    was_there: bool = False


class Uploader:
    """Owns what is to be written to one remote. Under the cache's lock, which callbacks take."""

    def __init__(
        self,
        remote: Remote,
        dram: DramTier,
        executor: Executor,
        lock: threading.Lock,
        counters: Counters,
        clock: Clock,
        shapes: Shapes,
        mode: WriteMode,
        admission: AdmissionPolicy,
    ) -> None:
        self._remote = remote
        self._tier = remote.tier
        self._dram = dram
        self._executor = executor
        self._lock = lock
        self._counters = counters
        self._clock = clock
        self._shapes = shapes
        self._write_all = mode is WriteMode.THROUGH
        self._admission = admission
        self._draining = False
        self._waiting: dict[ChunkKey, _Waiting] = {}  # parents first
        self._waiting_bytes = 0
        self._numbers = itertools.count()
        self._moving: set[ChunkKey] = set()
        self._jobs = 0

    @property
    def waiting_count(self) -> int:
        """Chunks that are to be written, those included that are being written."""
        return len(self._waiting) + len(self._moving)

    def note(self, key: ChunkKey, layout: KVLayout, features: Features) -> None:
        """Note an access to a chunk: if it is whole in DRAM, it may belong there too."""
        if key in self._waiting or key in self._moving:
            return
        whole = self._shapes.shards(layout)
        now = self._clock.now()
        if self._tier.shards(key) == whole:
            self._admission.touch(key, now, features)
            return
        record = self._dram.index.ready(key)
        if record is None or record.places.keys() != whole:
            return
        entry = replace(record.entry, features=features)
        if not self._admission.offer(entry, now):
            return
        if len(self._waiting) >= UPLOADS_WAITING_MAX:
            self._refuse(key, MissReason.UNAVAILABLE)
            return
        self._wait(key, _Waiting(entry, layout, next(self._numbers)))

    def left_dram(self, key: ChunkKey) -> None:
        """Note that a chunk leaves DRAM; what has not been written by now is not."""
        if self._drop(key) is not None:
            self._refuse(key, MissReason.NO_ROOM)

    def writes(self, key: ChunkKey) -> bool:
        """Tell whether a chunk is being written now."""
        return key in self._moving

    def left_remote(self, key: ChunkKey) -> None:
        """Note that the remote gave a chunk up."""
        self._admission.left(key, self._clock.now())

    def flush(self) -> None:
        """From now on write everything, whatever the mode."""
        self._write_all = True
        self.pump()

    def pump(self) -> None:
        """Start as many jobs as may be out."""
        # Where we delete what we evict, no job may overtake the deletions of another.
        jobs_max = UPLOAD_JOBS_MAX if self._tier.holdings is None else 1
        while self._waiting and self._jobs < jobs_max and self._tier.writable and self._enough():
            self._start()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        found = sum(waiting.entry.nbytes for waiting in self._waiting.values())
        if found != self._waiting_bytes:
            raise AssertionError(f"{self._waiting_bytes} bytes wait as counted, {found} found")
        for key in self._waiting:
            if self._dram.index.ready(key) is None:
                raise AssertionError(f"{key.hex()} is to be written and not in DRAM")
        if (self._jobs == 0) != (not self._moving):
            raise AssertionError(f"{self._jobs} jobs write {len(self._moving)} chunks")

    def _enough(self) -> bool:
        """Tell whether to write now. Write-back goes on until little waits."""
        share = self._waiting_bytes / self._dram.capacity_bytes
        self._draining = share > (DIRTY_SHARE_LOW if self._draining else DIRTY_SHARE_HIGH)
        return self._write_all or self._draining

    def _wait(self, key: ChunkKey, waiting: _Waiting) -> None:
        self._waiting[key] = waiting
        self._waiting_bytes += waiting.entry.nbytes

    def _drop(self, key: ChunkKey) -> _Waiting | None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._waiting_bytes -= waiting.entry.nbytes
        return waiting

    def _refuse(self, key: ChunkKey, reason: MissReason) -> None:
        """Give up a chunk that the admission takes for written."""
        self._counters[Tier.REMOTE].refused_chunks[reason] += 1
        self._admission.left(key, self._clock.now())

    def _start(self) -> None:
        """Write the next batch."""
        first = list(itertools.islice(self._waiting.values(), UPLOAD_CHUNKS_MAX))
        sizes = [waiting.entry.nbytes for waiting in first]
        count = batch_count(sizes, items_max=UPLOAD_CHUNKS_MAX, bytes_max=REMOTE_BATCH_BYTES)
        chunks = [chunk for each in first[:count] if (chunk := self._chunk(each)) is not None]
        if not chunks:
            return
        holdings = self._tier.holdings
        going = holdings.take_deletions() if holdings is not None else []
        lease = self._dram.index.lease([chunk.record for chunk in chunks])
        self._moving.update(chunk.waiting.entry.key for chunk in chunks)
        self._jobs += 1
        started = self._clock.now()
        deadline = started + WRITE_DEADLINE_S

        def done(outcome: Fault | None) -> None:
            with self._lock:
                if isinstance(outcome, DeadlineError):
                    self._tier.failed(outcome)  # The job is out still, and keeps its pins.
                else:
                    self._settle(chunks, lease, outcome, started)

        def late(outcome: Fault | None) -> None:
            with self._lock:
                self._settle(chunks, lease, outcome, started)

        work = self._write(chunks, [place.key for place in going], deadline)
        future = self._remote.channel.submit(work)
        self._executor.watch(future, done, deadline=deadline, late=late)

    def _chunk(self, waiting: _Waiting) -> _Chunk | None:
        """Make room for a chunk where that is ours to do, and say what goes there."""
        key = waiting.entry.key
        self._drop(key)
        record = self._dram.index.ready(key)
        assert record is not None, "what waits is ready in DRAM"
        shape = self._shapes.of(waiting.layout, waiting.entry.position, record.codec)
        holdings, place = self._tier.holdings, None
        if holdings is not None:
            old = holdings.index.ready(key)
            if old is not None:
                holdings.forget(old)  # It lacks a shard, or a listing knew it.
            if holdings.index.get(key) is None:
                place = holdings.reserve(waiting.entry, record.namespace, record.codec, shape.sizes)
            if place is None:
                self._refuse(key, MissReason.NO_ROOM)
                return None
        slots = {shard: self._dram.arena.view(slot) for shard, slot in record.places.items()}
        descriptions = {
            shard: describe(waiting.entry, record.namespace, shape, shard) for shard in slots
        }
        return _Chunk(waiting, record, place, slots, descriptions)

    async def _write(
        self, chunks: Sequence[_Chunk], going: Sequence[ShardKey], deadline: float
    ) -> None:
        """Delete what gives way, find out what is there, seal and write the rest."""
        channel = self._remote.channel
        if going:
            await channel.delete(going)
        keys = [
            shard_key(chunk.record.entry.key, shard) for chunk in chunks for shard in chunk.slots
        ]
        there = iter(await channel.contains(keys))
        lacking: list[_Chunk] = []
        for chunk in chunks:
            found = [next(there) for _ in chunk.slots]
            chunk.was_there = all(found)
            if not chunk.was_there:
                lacking.append(chunk)
        sealed = [self._executor.prepare(partial(_seal, chunk)) for chunk in lacking]
        # All of them to their end, whatever becomes of one: the slots are lent to the connector.
        ends = await asyncio.gather(
            *(
                self._write_chunk(chunk, asyncio.wrap_future(ready), deadline)
                for chunk, ready in zip(lacking, sealed, strict=True)
            ),
            return_exceptions=True,
        )
        for end in ends:
            if end is not None:
                raise end

    async def _write_chunk(
        self, chunk: _Chunk, sealed: asyncio.Future[None], deadline: float
    ) -> None:
        try:
            await sealed
        except KVTierError as error:
            chunk.outcome = error
            return
        writes = [
            self._remote.channel.write(
                WriteItem(shard_key(chunk.record.entry.key, shard), slot), deadline=deadline
            )
            for shard, slot in chunk.slots.items()
        ]
        for outcome in await asyncio.gather(*writes, return_exceptions=True):
            if isinstance(outcome, KVTierError):
                chunk.outcome = chunk.outcome or outcome
            elif isinstance(outcome, BaseException):
                raise outcome

    def _settle(
        self,
        chunks: Sequence[_Chunk],
        lease: Lease[Slot],
        outcome: Fault | None,
        started: float,
    ) -> None:
        counters = self._counters[Tier.REMOTE]
        lease.release()
        self._jobs -= 1
        for chunk in chunks:
            self._moving.discard(chunk.record.entry.key)
            fault = outcome or chunk.outcome
            if fault is not None:
                self._failed(chunk, fault)
                continue
            if chunk.place is not None and self._tier.holdings is not None:
                self._tier.holdings.commit(chunk.place)
            self._tier.learn(chunk.record.entry.key, frozenset(chunk.slots))
            if not chunk.was_there:
                counters.written_bytes += chunk.record.entry.nbytes
                counters.write_latency.observe(self._clock.now() - started)
                self._tier.refusing = ""
                self._tier.succeeded()
        if outcome is not None:
            self._tier.failed(outcome)
        self.pump()

    def _failed(self, chunk: _Chunk, fault: Fault) -> None:
        """Try a chunk again later, unless the remote said no or it was tried often enough."""
        self._counters[Tier.REMOTE].io_errors += 1
        key = chunk.record.entry.key
        if chunk.place is not None and self._tier.holdings is not None:
            self._tier.holdings.abort(chunk.place)
        if chunk.outcome is not None:
            self._tier.failed(chunk.outcome)
        waiting = replace(chunk.waiting, tries=chunk.waiting.tries + 1)
        if isinstance(fault, ConnectorRefusedError):
            self._tier.refusing = str(fault)
            self._refuse(key, MissReason.NO_ROOM)
        elif waiting.tries >= UPLOAD_TRIES_MAX or self._dram.index.get(key) is not chunk.record:
            self._refuse(key, MissReason.IO_ERROR)
        else:
            self._wait(key, waiting)
            ordered = sorted(self._waiting.items(), key=lambda item: item[1].number)
            self._waiting = dict(ordered)


def _seal(chunk: _Chunk) -> None:
    for shard, description in chunk.descriptions.items():
        seal(chunk.slots[shard], description)
