"""Taking chunks from DRAM to a remote that lacks them, in the background and in batches.

``through`` writes what was stored or has come up, ``back`` waits until much of DRAM is not in the
remote yet. What is not written by the time it leaves DRAM is not written at all, and counted.
Nothing waits for a remote: what it does not take in time is dropped.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from kvtier.cache.below.deletions import Deletions
from kvtier.cache.below.encoder import ChunkEncoder, Shrinkage, describe
from kvtier.cache.below.remote_source import Remote
from kvtier.cache.below.upload_job import Outbound, UploadJob, Waiting, sealed
from kvtier.cache.executor import Executor, Fault
from kvtier.cache.shapes import Shapes
from kvtier.cache.tenancy.quota import NoQuotas, Quotas
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
from kvtier.errors import ConnectorRefusedError, DeadlineError
from kvtier.interfaces import AdmissionPolicy, Clock
from kvtier.obs.counters import Counters
from kvtier.tiers.dram import DramTier
from kvtier.tiers.remote.batches import batch_count
from kvtier.types import ChunkKey, Features, KVLayout, MissReason, Tier


class Uploader:
    """Owns what is to be written to one remote. Under the cache's lock, which callbacks take."""

    def __init__(
        self,
        remote: Remote,
        deletions: Deletions,
        dram: DramTier,
        executor: Executor,
        lock: threading.Lock,
        counters: Counters,
        clock: Clock,
        shapes: Shapes,
        mode: WriteMode,
        admission: AdmissionPolicy,
        encoder: ChunkEncoder | None = None,
    ) -> None:
        """With an ``encoder`` chunks are encoded before room is made for what comes of them."""
        self._remote = remote
        self._tier = remote.tier
        self._deletions = deletions
        self._dram = dram
        self._executor = executor
        self._lock = lock
        self._counters = counters
        self._clock = clock
        self._shapes = shapes
        self._write_all = mode is WriteMode.THROUGH
        self._admission = admission
        self._encoder = encoder
        self._shrinkage = Shrinkage()
        self._draining = False
        self._waiting: dict[ChunkKey, Waiting] = {}  # parents first
        self._waiting_bytes = 0
        self._numbers = itertools.count()
        self._moving: set[ChunkKey] = set()
        self._jobs = 0
        #: What is asked before a write, and which roots are a tenant's; ``RemoteRoom.serve``.
        self.quotas: Quotas = NoQuotas()
        self.owned: Callable[[bytes], bool] = lambda _: False

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
        expected = replace(entry, nbytes=self._shrinkage.expected_bytes(entry.nbytes))
        if not self._admission.offer(expected, now):
            return
        if len(self._waiting) >= UPLOADS_WAITING_MAX:
            self._refuse(key, MissReason.UNAVAILABLE)
            return
        self._wait(key, Waiting(entry, layout, next(self._numbers)))

    def left_dram(self, key: ChunkKey) -> None:
        """Note that a chunk leaves DRAM; what has not been written by now is not."""
        if self._drop(key) is not None:
            self._refuse(key, MissReason.NO_ROOM)

    def writes(self, key: ChunkKey) -> bool:
        """Tell whether a chunk is being written now."""
        return key in self._moving

    def waits(self, key: ChunkKey) -> bool:
        """Tell whether a chunk is still to be written."""
        return key in self._waiting

    def owes(self, key: ChunkKey) -> bool:
        """Tell whether it is to be written now: the remote takes it."""
        return key in self._waiting and self._tier.writable

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
        if self._moving and not self._jobs:  # A job of none is one whose chunks were all refused.
            raise AssertionError(f"no job writes {len(self._moving)} chunks")

    def _enough(self) -> bool:
        """Tell whether to write now. Write-back goes on until little waits."""
        share = self._waiting_bytes / self._dram.capacity_bytes
        self._draining = share > (DIRTY_SHARE_LOW if self._draining else DIRTY_SHARE_HIGH)
        return self._write_all or self._draining

    def _wait(self, key: ChunkKey, waiting: Waiting) -> None:
        self._waiting[key] = waiting
        self._waiting_bytes += waiting.entry.nbytes

    def _drop(self, key: ChunkKey) -> Waiting | None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._waiting_bytes -= waiting.entry.nbytes
        return waiting

    def _refuse(self, key: ChunkKey, reason: MissReason) -> None:
        """Give up a chunk that the admission takes for written."""
        self._counters[Tier.REMOTE].refused_chunks[reason] += 1
        self._admission.left(key, self._clock.now())

    def _start(self) -> None:
        """Start a job with what waits first, as much as goes into one batch."""
        first = list(itertools.islice(self._waiting.values(), UPLOAD_CHUNKS_MAX))
        sizes = [waiting.entry.nbytes for waiting in first]
        count = batch_count(sizes, items_max=UPLOAD_CHUNKS_MAX, bytes_max=REMOTE_BATCH_BYTES)
        chunks = [self._outbound(each) for each in first[:count]]
        started = self._clock.now()
        job = UploadJob(
            chunks,
            self._dram.index.lease([chunk.record for chunk in chunks]),
            self._remote.channel,
            self._executor,
            self._encoder,
            started,
            started + WRITE_DEADLINE_S,
        )
        self._moving.update(chunk.waiting.entry.key for chunk in chunks)
        self._jobs += 1
        self._do(job, job.prepare(), partial(self._prepared, job))

    def _do(
        self,
        job: UploadJob,
        work: Coroutine[Any, Any, None],
        then: Callable[[Fault | None], None],
    ) -> None:
        """Have work done, and ``then`` be called with its fault, under the lock."""

        def done(outcome: Fault | None) -> None:
            with self._lock:
                if isinstance(outcome, DeadlineError):
                    self._tier.failed(outcome)  # The job is out still, and keeps its pins.
                else:
                    then(outcome)

        def late(outcome: Fault | None) -> None:
            with self._lock:
                then(outcome)

        future = self._remote.channel.submit(work)
        self._executor.watch(future, done, deadline=job.deadline, late=late)

    def _outbound(self, waiting: Waiting) -> Outbound:
        """Say what goes there of a chunk that waits, and have it wait no more."""
        key = waiting.entry.key
        self._drop(key)
        self._deletions.forget(key)
        record = self._dram.index.ready(key)
        assert record is not None, "what waits is ready in DRAM"
        shape = self._shapes.of(waiting.layout, waiting.entry.position, record.codec)
        slots = {shard: self._dram.arena.view(slot) for shard, slot in record.places.items()}
        descriptions = {
            shard: describe(waiting.entry, record.namespace, shape, shard) for shard in slots
        }
        spoiled = self._tier.spoiled(key)
        return Outbound(waiting, record, slots, descriptions, sealed(slots), spoiled)

    def _prepared(self, job: UploadJob, fault: Fault | None) -> None:
        """Make room for what is to be written, and have it sent."""
        if fault is not None:
            self._settle(job, fault)
            return
        job.chunks = [chunk for chunk in job.chunks if self._fits(job, chunk)]
        holdings = self._tier.holdings
        going = holdings.take_deletions() if holdings is not None else []

        def sent(fault: Fault | None) -> None:
            if fault is not None and holdings is not None:
                holdings.return_deletions(going)
            self._settle(job, fault)

        self._do(job, job.send([place.key for place in going]), sent)

    def _fits(self, job: UploadJob, chunk: Outbound) -> bool:
        """Tell whether a chunk goes on, where it is ours to say: there is room, and it may."""
        key, record, holdings = chunk.waiting.entry.key, chunk.record, self._tier.holdings
        if chunk.outcome is not None:
            return True
        entry = replace(chunk.waiting.entry, nbytes=chunk.nbytes)
        if not chunk.was_there:
            self._shrinkage.note(record.entry.nbytes, entry.nbytes)
        refused: MissReason | None = None
        if not chunk.was_there and not self.quotas.room_in_remote(record.namespace, entry):
            refused = MissReason.QUOTA
        elif holdings is not None:
            old = holdings.index.ready(key)
            if old is not None:
                holdings.forget(old)  # It lacks a shard, or a listing knew it.
            if holdings.index.get(key) is None:
                sizes = chunk.stored.sizes
                chunk.place = holdings.reserve(entry, record.namespace, record.codec, sizes)
            refused = MissReason.NO_ROOM if chunk.place is None else None
        if refused is not None:
            self._moving.discard(key)
            job.give_back(chunk)
            self._refuse(key, refused)
        elif not chunk.was_there:
            self._count(chunk)  # From now on: others may be on their way at the same time.
        return refused is None

    def _count(self, chunk: Outbound) -> None:
        """Count what is written for a tenant."""
        root = chunk.record.namespace
        if self.owned(root):
            key, shards = chunk.record.entry.key, frozenset(chunk.slots)
            self._tier.written.note(key, root, chunk.nbytes, shards)

    def _settle(self, job: UploadJob, outcome: Fault | None) -> None:
        counters = self._counters[Tier.REMOTE]
        self._jobs -= 1
        for chunk in job.chunks:
            key = chunk.record.entry.key
            self._moving.discard(key)
            fault = outcome or chunk.outcome
            if fault is not None:
                self._failed(chunk, fault)
                continue
            if chunk.place is not None and self._tier.holdings is not None:
                self._tier.holdings.commit(chunk.place)
            self._tier.learn(key, frozenset(chunk.slots))
            if not chunk.was_there:
                self._tier.wrote(key)
                self._count(chunk)
                counters.written_bytes += chunk.nbytes
                counters.write_latency.observe(self._clock.now() - job.started)
                self._tier.refusing = ""
                self._tier.succeeded()
        job.end()
        if outcome is not None:
            self._tier.failed(outcome)
        self.pump()

    def _failed(self, chunk: Outbound, fault: Fault) -> None:
        """Try a chunk again later, unless the remote said no or it was tried often enough."""
        self._counters[Tier.REMOTE].io_errors += 1
        key = chunk.record.entry.key
        if chunk.was_there is False:  # Else what was written before may lie there still.
            self._tier.written.drop(key)
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
