"""Taking chunks from the engine's blocks into DRAM."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

from kvtier.cache.below.remote_room import RemoteRoom
from kvtier.cache.below.remotes import Remotes
from kvtier.cache.below.writeout import Writeout
from kvtier.cache.planner import ChunkShape, shard_writers, store_moves
from kvtier.cache.plans import OpenPlans
from kvtier.cache.sequence import Sequence
from kvtier.cache.shapes import Shapes
from kvtier.cache.spans import record_store
from kvtier.cache.tenancy.tenancy import Tenancy
from kvtier.constants import STORE_CHUNKS_INFLIGHT_MAX, STORE_DEADLINE_S
from kvtier.interfaces import Clock
from kvtier.obs.events import EventLog
from kvtier.obs.spans import Spans
from kvtier.obs.stats import TierCounters
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.types import (
    Blocks,
    ChunkKey,
    Direction,
    Entry,
    KVLayout,
    MissReason,
    Move,
    Placement,
    Plan,
)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A chunk that is being packed, and the same packed for the disk, where that differs."""

    record: DramRecord
    staged: DramRecord | None


class Storer:
    """Reserves room, orders stores, settles them. Used under the cache's lock.

    ``codec`` is the configured one; ``disk_codec`` packs a second time what is written to disk;
    None: disk takes what DRAM has. What lies ``afar`` needs no store, where DRAM keeps nothing;
    None: what is stored belongs in DRAM. A store lets no more than ``staying_bytes_max`` be what
    may not leave, so that there is room for what is loaded. What comes on top is ``CROWDED``: no
    engine's thread waits here, but whoever can offers it again, and it is stored in turns.
    """

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier | None,
        writeout: Writeout | None,
        room: RemoteRoom | None,
        shapes: Shapes,
        plans: OpenPlans,
        counters: TierCounters,
        clock: Clock,
        codec: str,
        disk_codec: str | None,
        workers: SequenceOf[Placement],
        events: EventLog | None,
        spans: Spans | None,
        tenancy: Tenancy,
        afar: Remotes | None,
        staying_bytes_max: float,
    ) -> None:
        self._dram = dram
        self._disk = disk
        self._writeout = writeout
        self._room = room
        self._shapes = shapes
        self._plans = plans
        self._counters = counters
        self._clock = clock
        self._codec = codec
        self._disk_codec = disk_codec
        self._workers = workers
        self._events = events
        self._spans = spans
        self._tenancy = tenancy
        self._afar = afar
        self._staying_bytes_max = staying_bytes_max
        self.inflight_count = 0
        self._staging_count = 0

    @property
    def codec_fallbacks(self) -> dict[tuple[str, str], int]:
        """Chunks that another codec packed than the configured one, by that and the reason."""
        return self._shapes.codecs.fallbacks

    def begin(self, sequence: Sequence, chunks: range, blocks: Blocks) -> Plan | None:
        """Order what is not held yet; stop at the first chunk that is refused.

        What came back from a lossy codec is never packed a second time: where no tier holds it any
        more, it stays away. Raises ``CodecError`` for a layout that a codec cannot pack, and then
        has reserved nothing.
        """
        layout = sequence.layout
        codec = sequence.codec or self._shapes.codecs.packing(self._codec, sequence.namespace)
        if self._disk_codec is not None and sequence.codec is None:
            # One that cannot pack this raises before room is taken.
            disk_codec = self._shapes.codecs.packing(self._disk_codec, sequence.namespace)
            self._shapes.of(layout, 1, disk_codec)
        workers = sequence.workers or self._workers
        writers = shard_writers(layout, self._shapes.of(layout, 1, codec), workers)
        moves: list[Move] = []
        stored: list[_Stored] = []
        for chunk in chunks:
            shape = self._shapes.of(layout, chunk, codec)
            lossy = chunk < sequence.lossy_chunks
            if lossy or self._held(sequence.chunk_keys[chunk], shape):
                continue
            record = self._reserve(sequence, chunk, shape)
            if record is None:
                self._note_crowded(sequence, range(chunk, chunks.stop))
                break
            if self._events is not None:
                sequence.teach(self._events, [chunk])
            pair = _Stored(record, self._stage(sequence, chunk))
            stored.append(pair)
            self.inflight_count += 1
            for packed in (record, pair.staged):
                if packed is not None:
                    moves += store_moves(
                        layout,
                        self._shapes.of(layout, chunk, packed.codec),
                        writers,
                        chunk=chunk,
                        blocks=blocks,
                        slots=packed.places.__getitem__,
                    )
        if not stored:
            return None
        self._note_packed(sequence, stored)
        plan = Plan(
            plan_id=self._plans.new_id(),
            direction=Direction.STORE,
            deadline=self._clock.now() + STORE_DEADLINE_S,
            moves=tuple(moves),
        )
        self._plans.open(plan, partial(self._end, stored, layout, self._clock.now()))
        return plan

    def _note_packed(self, sequence: Sequence, stored: list[_Stored]) -> None:
        """Count chunks that another codec packs than the one that is configured."""
        codecs, namespace = self._shapes.codecs, sequence.namespace
        if sequence.codec is None:
            codecs.note_packed(self._codec, namespace, len(stored))
        if self._disk_codec is not None:
            staged = sum(pair.staged is not None for pair in stored)
            codecs.note_packed(self._disk_codec, namespace, staged)

    def _held(self, key: ChunkKey, shape: ChunkShape) -> bool:
        """Tell whether a chunk needs no store."""
        record = self._dram.index.get(key)
        if record is not None:
            if self._dram.index.ready(key) is None or record.pins:
                return True
            if record.places.keys() == shape.layouts.keys():
                return True
            self._dram.leave(record)  # It came from a disk that had lost a shard of it.
        below = self._disk.find(key) if self._disk is not None else None
        if below is not None and shape.layouts.keys() == set(below[1]):
            return True
        return self._afar is not None and self._afar.look(key) == shape.layouts.keys()

    def _crowded(self, nbytes: int) -> bool:
        """Tell whether what has to stay leaves no room to what is loaded."""
        staying_bytes = self._dram.staying_bytes if self._staying_bytes_max < math.inf else 0
        return staying_bytes > 0 and staying_bytes + nbytes > self._staying_bytes_max

    def _note_crowded(self, sequence: Sequence, left: range) -> None:
        """Count what has to be offered again, each chunk once however often it is."""
        if sequence.refused is MissReason.CROWDED:
            counted = max(0, left.stop - max(left.start, sequence.crowded_end))
            self._counters.refused_chunks[MissReason.CROWDED] += counted
            sequence.crowded_end = max(sequence.crowded_end, left.stop)

    def _reserve(self, sequence: Sequence, chunk: int, shape: ChunkShape) -> DramRecord | None:
        if self._crowded(shape.chunk_bytes):
            sequence.refused = MissReason.CROWDED
            return None
        if self.inflight_count >= STORE_CHUNKS_INFLIGHT_MAX:
            sequence.refused = MissReason.UNAVAILABLE
            self._counters.refused_chunks[MissReason.UNAVAILABLE] += 1
            return None
        key, parent = sequence.chunk_keys[chunk], sequence.entry_parent(chunk)
        entry = Entry(key, parent, shape.chunk_bytes, chunk, sequence.features)
        if not self._tenancy.quotas.room_in_dram(sequence.root, entry):
            sequence.refused = MissReason.QUOTA
            self._counters.refused_chunks[MissReason.QUOTA] += 1
            return None
        record = self._dram.reserve(entry, sequence.root, shape.codec, shape.sizes)
        if record is None and self._disk is not None and entry.nbytes <= self._dram.capacity_bytes:
            before = reversed(sequence.chunk_keys[:chunk])
            while record is None and self._dram.give_way(before, self._disk.find):
                record = self._dram.reserve(entry, sequence.root, shape.codec, shape.sizes)
        if record is None:
            sequence.refused = MissReason.NO_ROOM
            self._counters.refused_chunks[MissReason.NO_ROOM] += 1
        else:
            self._tenancy.wishes.stored(sequence, entry)
        return record

    def _stage(self, sequence: Sequence, chunk: int) -> DramRecord | None:
        """Reserve room for what goes to disk; None: it takes what DRAM has, as ever."""
        if self._disk_codec is None or self._writeout is None or sequence.codec is not None:
            return None
        if not self._writeout.takes_staged(self._staging_count):
            return None
        codec = self._shapes.codecs.packing(self._disk_codec, sequence.namespace)
        shape = self._shapes.of(sequence.namespace.layout, chunk, codec)
        # A key that no lookup asks for.
        key = ChunkKey(hashlib.sha256(b"for the disk" + sequence.chunk_keys[chunk]).digest())
        if self._dram.index.get(key) is not None:
            return None
        entry = Entry(key, None, shape.chunk_bytes, chunk)
        if not self._tenancy.quotas.room_in_dram(sequence.root, entry):
            return None
        staged = self._dram.reserve(entry, sequence.root, shape.codec, shape.sizes)
        self._staging_count += staged is not None
        return staged

    def _end(
        self, stored: list[_Stored], layout: KVLayout, begun_s: float, reason: MissReason | None
    ) -> None:
        if self._spans is not None:
            records, seconds = [pair.record for pair in stored], self._clock.now() - begun_s
            record_store(self._spans, records, layout.chunk_tokens, reason, seconds)
        self.inflight_count -= len(stored)
        self._staging_count -= sum(pair.staged is not None for pair in stored)
        for pair in stored:
            record, staged = pair.record, pair.staged
            if reason is not None:
                self._counters.refused_chunks[reason] += 1
                for packed in (record, staged):
                    if packed is not None:
                        self._dram.abort(packed)
                continue
            lease = None
            if staged is not None:
                lease = self._dram.index.lease([staged])
                self._dram.commit(staged)
            self._dram.commit(record)
            self._counters.written_bytes += record.entry.nbytes
            if self._writeout is not None:
                self._writeout.note(record.entry.key, layout, record.entry.features, lease)
            if self._room is not None:
                self._room.note(record.entry.key, layout, record.entry.features)
