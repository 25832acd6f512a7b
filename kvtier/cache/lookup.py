"""What is held of a sequence, and counting what was asked for."""

from __future__ import annotations

from kvtier.cache.fill import Filler
from kvtier.cache.match import Ready
from kvtier.cache.planner import ChunkShape, chunk_shape, present_groups, usable_chunks
from kvtier.cache.sequence import Sequence
from kvtier.interfaces import BlockCodec
from kvtier.obs.stats import TierCounters
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.types import ChunkHit, KVLayout, MissReason, Tier

_SHAPES_MAX = 64


class Shapes:
    """Chunk shapes by layout, computed once. Used under the cache's lock."""

    def __init__(self, codec: BlockCodec) -> None:
        self._codec = codec
        self._shapes: dict[KVLayout, ChunkShape] = {}

    def of(self, layout: KVLayout) -> ChunkShape:
        """Return a layout's shape."""
        shape = self._shapes.get(layout)
        if shape is None:
            if len(self._shapes) >= _SHAPES_MAX:
                self._shapes.clear()
            shape = self._shapes[layout] = chunk_shape(layout, self._codec)
        return shape


class Lookup:
    """Finds and counts. Used under the cache's lock; changes nothing but order and counters."""

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier | None,
        filler: Filler | None,
        shapes: Shapes,
        counters: dict[Tier, TierCounters],
    ) -> None:
        self._dram = dram
        self._disk = disk
        self._filler = filler
        self._shapes = shapes
        self._counters = counters

    def hits(self, sequence: Sequence) -> tuple[ChunkHit, ...]:
        """Return the longest usable prefix, each chunk with the fastest tier that holds it."""
        layout = sequence.namespace.layout
        whole = self._shapes.of(layout).layouts.keys()
        every = frozenset(range(len(layout.groups)))
        disk = self._disk if self._filler is not None and self._filler.available() else None
        hits: list[ChunkHit] = []
        present: list[frozenset[int]] = []
        for key in sequence.chunk_keys:
            record = self._dram.index.ready(key)
            source = disk.index.ready(key) if record is None and disk is not None else None
            found = record or source
            if found is None:
                break
            shards = found.places.keys()
            present.append(every if shards == whole else present_groups(layout, shards))
            hits.append(ChunkHit(key, Tier.DRAM if record is not None else Tier.DISK))
        return tuple(hits[: usable_chunks(layout, present)])

    def touch(self, match: Ready) -> None:
        """Note an access to all that a match found, the deepest chunk first."""
        keys = [hit.key for hit in reversed(match.hits)]
        self._dram.touch(keys, match.sequence.features)
        if self._disk is not None:
            self._disk.touch(keys, match.sequence.features)

    def count(self, match: Ready, start_token: int, end_token: int) -> None:
        """Count the whole chunks between two tokens that each tier was asked for in vain."""
        size = match.sequence.chunk_tokens
        reason = MissReason.ABSENT
        if self._disk is not None and not self._disk.readable():
            reason = MissReason.UNAVAILABLE
        for chunk in range(start_token // size, end_token // size):
            tokens = (chunk + 1) * size - max(start_token, chunk * size)
            tier = match.hits[chunk].tier if chunk < len(match.hits) else None
            if tier is not Tier.DRAM:
                self._counters[Tier.DRAM].miss_tokens[MissReason.ABSENT] += tokens
            if tier is None and self._disk is not None:
                self._counters[Tier.DISK].miss_tokens[reason] += tokens
