"""Chunks on their way out of DRAM before any directory is chosen: pinned, and encoded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.cache.below.encoder import ChunkEncoder, EncodedChunk, Shrinkage, describe
from kvtier.cache.executor import Executor, Fault
from kvtier.cache.shapes import Shapes
from kvtier.constants import WRITES_INFLIGHT_MAX
from kvtier.shard_format import ShardDescription
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.tiers.index import Lease
from kvtier.types import ChunkKey, Entry, KVLayout, ShardId, Slot


@dataclass(frozen=True, slots=True)
class Dirty:
    """A chunk to be written. ``number`` is its place in the order of stores: parents first.

    ``staged`` pins the same chunk as it was packed for the disk, where that differs from DRAM's.
    """

    entry: Entry
    layout: KVLayout
    number: int
    staged: Lease[Slot] | None


@dataclass(slots=True, eq=False)
class Outgoing:
    """A chunk on its way to disk; ``lease`` pins ``source``. ``encoded``: once it is."""

    dirty: Dirty
    source: DramRecord
    lease: Lease[Slot]
    encoded: EncodedChunk | None = None


class Ahead:
    """Owns what is being encoded. Used under the cache's lock, which its callbacks take.

    Without an encoder it pins and describes alone.
    """

    def __init__(
        self,
        dram: DramTier,
        executor: Executor,
        lock: threading.Lock,
        shapes: Shapes,
        encoder: ChunkEncoder | None,
    ) -> None:
        self._dram = dram
        self._executor = executor
        self._lock = lock
        self._shapes = shapes
        self._encoder = encoder
        self._outgoing: dict[ChunkKey, Outgoing] = {}
        self._shrinkage = Shrinkage()

    def __len__(self) -> int:
        return len(self._outgoing)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._outgoing

    @property
    def encodes(self) -> bool:
        """True when chunks are encoded before they are written."""
        return self._encoder is not None

    @property
    def full(self) -> bool:
        """True when no more may be begun."""
        return len(self._outgoing) >= WRITES_INFLIGHT_MAX

    @property
    def first(self) -> Outgoing | None:
        """The chunk that is written next, parents first; None while that is not encoded."""
        if not self._outgoing:
            return None
        outgoing = min(self._outgoing.values(), key=lambda each: each.dirty.number)
        return outgoing if outgoing.encoded is not None else None

    def expected_bytes(self, nbytes: int) -> int:
        """Return about how many bytes a chunk of so many takes below DRAM."""
        return self._shrinkage.expected_bytes(nbytes)

    def pin(self, dirty: Dirty) -> Outgoing:
        """Pin what is written of a dirty chunk."""
        key = dirty.entry.key
        source = dirty.staged.records[0] if dirty.staged else self._dram.index.ready(key)
        assert source is not None, "a dirty chunk is ready in DRAM"
        return Outgoing(dirty, source, self._dram.index.lease([source]))

    def encode(self, dirty: Dirty, done: Callable[[Outgoing | None], None]) -> None:
        """Begin to encode a chunk; ``done`` is called under the lock, with it where that failed.

        It then is not here any more, and the caller's to release.
        """
        encoder = self._encoder
        assert encoder is not None, "nothing encodes here"
        outgoing = self._outgoing[dirty.entry.key] = self.pin(dirty)
        slots, descriptions = self.parts(outgoing)

        def ended(outcome: EncodedChunk | Fault) -> None:
            with self._lock:
                if isinstance(outcome, EncodedChunk):
                    outgoing.encoded = outcome
                    sealed_bytes = sum(map(len, slots.values()))
                    self._shrinkage.note(sealed_bytes, sum(outcome.sizes.values()))
                    done(None)
                else:
                    del self._outgoing[dirty.entry.key]
                    done(outgoing)

        self._executor.ahead(lambda: encoder.encode(slots, descriptions), ended)

    def take(self, outgoing: Outgoing) -> None:
        """Hand a chunk that is encoded over: it is the caller's to release."""
        del self._outgoing[outgoing.dirty.entry.key]

    def release(self, outgoing: Outgoing) -> None:
        """Give back what a chunk pins and holds; nobody reads it any more."""
        outgoing.lease.release()
        if outgoing.encoded is not None and self._encoder is not None:
            self._encoder.give_back(outgoing.encoded)

    def parts(
        self, outgoing: Outgoing
    ) -> tuple[dict[ShardId, memoryview], dict[ShardId, ShardDescription]]:
        """Return a chunk's slots, and what their headers say."""
        dirty, source = outgoing.dirty, outgoing.source
        shape = self._shapes.of(dirty.layout, dirty.entry.position, source.codec)
        slots = {shard: self._dram.arena.view(slot) for shard, slot in source.places.items()}
        root = source.namespace
        return slots, {shard: describe(dirty.entry, root, shape, shard) for shard in slots}
