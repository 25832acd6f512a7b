"""Taking chunks from the engine's blocks into DRAM."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from kvtier.cache.lookup import Shapes
from kvtier.cache.planner import ChunkShape, shard_writers, store_moves
from kvtier.cache.plans import OpenPlans
from kvtier.cache.sequence import Sequence
from kvtier.cache.writeout import Writeout
from kvtier.constants import STORE_CHUNKS_INFLIGHT_MAX, STORE_DEADLINE_S
from kvtier.interfaces import Clock
from kvtier.obs.stats import TierCounters
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.types import (
    Blocks,
    ChunkKey,
    Direction,
    Entry,
    MissReason,
    Move,
    Placement,
    Plan,
)


class Storer:
    """Reserves room, orders stores, settles them. Used under the cache's lock."""

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier | None,
        writeout: Writeout | None,
        shapes: Shapes,
        plans: OpenPlans,
        counters: TierCounters,
        clock: Clock,
        codec: str,
        workers: SequenceOf[Placement],
    ) -> None:
        self._dram = dram
        self._disk = disk
        self._writeout = writeout
        self._shapes = shapes
        self._plans = plans
        self._counters = counters
        self._clock = clock
        self._codec = codec
        self._workers = workers
        self.inflight_count = 0

    def begin(self, sequence: Sequence, chunks: range, blocks: Blocks) -> Plan | None:
        """Order what is not held yet; stop at the first chunk that is refused."""
        layout = sequence.namespace.layout
        shape = self._shapes.of(layout)
        writers = shard_writers(layout, shape, self._workers)
        moves: list[Move] = []
        records: list[DramRecord] = []
        for chunk in chunks:
            if self._held(sequence.chunk_keys[chunk], shape):
                continue
            record = self._reserve(sequence, chunk, shape)
            if record is None:
                break
            records.append(record)
            self.inflight_count += 1
            moves += store_moves(
                layout,
                shape,
                writers,
                chunk=chunk,
                blocks=blocks,
                slots=record.places.__getitem__,
            )
        if not records:
            return None
        plan = Plan(
            plan_id=self._plans.new_id(),
            direction=Direction.STORE,
            codec=self._codec,
            deadline=self._clock.now() + STORE_DEADLINE_S,
            moves=tuple(moves),
        )
        self._plans.open(plan, lambda reason: self._end(records, shape, reason))
        return plan

    def _held(self, key: ChunkKey, shape: ChunkShape) -> bool:
        """Tell whether a chunk needs no store."""
        record = self._dram.index.get(key)
        if record is not None:
            if self._dram.index.ready(key) is None or record.pins:
                return True
            if record.places.keys() == shape.layouts.keys():
                return True
            self._dram.leave(record)  # It came from a disk that had lost a shard of it.
        below = self._disk.shards(key) if self._disk is not None else ()
        return set(below) == shape.layouts.keys()

    def _reserve(self, sequence: Sequence, chunk: int, shape: ChunkShape) -> DramRecord | None:
        if self.inflight_count >= STORE_CHUNKS_INFLIGHT_MAX:
            self._counters.refused_chunks[MissReason.UNAVAILABLE] += 1
            return None
        key, parent = sequence.chunk_keys[chunk], sequence.entry_parent(chunk)
        entry = Entry(key, parent, shape.chunk_bytes, chunk, sequence.features)
        record = self._dram.reserve(entry, sequence.root, self._codec, shape.sizes)
        if record is None and self._disk is not None and entry.nbytes <= self._dram.capacity_bytes:
            before = reversed(sequence.chunk_keys[:chunk])
            while record is None and self._dram.give_way(before, self._disk.shards):
                record = self._dram.reserve(entry, sequence.root, self._codec, shape.sizes)
        if record is None:
            self._counters.refused_chunks[MissReason.NO_ROOM] += 1
        return record

    def _end(self, records: list[DramRecord], shape: ChunkShape, reason: MissReason | None) -> None:
        self.inflight_count -= len(records)
        for record in records:
            if reason is not None:
                self._dram.abort(record)
                self._counters.refused_chunks[reason] += 1
                continue
            self._dram.commit(record)
            self._counters.written_bytes += record.entry.nbytes
            if self._writeout is not None:
                self._writeout.note(record.entry.key, shape, record.entry.features)
