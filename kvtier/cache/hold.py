"""A chunk that is read where it lies in DRAM, by whoever shares the arena: a load without moves.

It counts as a load does, and stays as a load's chunks do: pinned, whatever becomes of its key.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.cache.load import LoadContext
from kvtier.cache.match import Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.spans import record_load
from kvtier.tiers.dram import DramRecord
from kvtier.types import ChunkHit, LoadOutcome, Tier


class Hold:
    """One pinned chunk of one shard. Any thread may release it; nobody else writes its slot."""

    __slots__ = ("_index", "_left", "_lock", "_record", "codec", "slot")

    def __init__(self, context: LoadContext, record: DramRecord, left: Callable[[], None]) -> None:
        """Pin it, under the cache's lock. ``left`` is called under it at the end."""
        self._lock, self._left = context.lock, left
        self._index = context.dram.index
        self._record: DramRecord | None = record
        self._index.pin(record)
        #: What packed it.
        self.codec = record.codec
        #: Where it lies in the arena, its header included.
        (self.slot,) = record.places.values()

    def release(self) -> None:
        """Let it go. A second call does nothing."""
        with self._lock:
            record, self._record = self._record, None
            if record is not None:
                self._index.unpin(record)
                self._left()


def hold_first(
    context: LoadContext, sequence: Sequence, left: Callable[[], None]
) -> tuple[Hold, Ready] | None:
    """Pin a sequence's first chunk, and return what was found; under the cache's lock.

    None: it does not lie in DRAM, in one shard and as the sequence takes it. Then nothing is
    counted.
    """
    key = sequence.chunk_keys[0]
    record = context.dram.index.ready(key)
    if record is None or len(record.places) != 1 or not sequence.takes(record.codec):
        return None
    tokens, tier = sequence.chunk_tokens, sequence.came_from(0, Tier.DRAM)
    context.counters.note_hit(sequence.namespace.tenant_salt, tier, tokens)
    if context.spans is not None:
        record_load(context.spans, LoadOutcome(0, tokens, {tier: tokens}, ()), 0.0)
    match = Ready(sequence, (ChunkHit(key, Tier.DRAM, record.codec),))
    return Hold(context, record, left), match
