"""KV through a codec and back, by the moves that a store and a later load make."""

from __future__ import annotations

from kvtier.cache.planner import chunk_shape, load_moves, shard_writers, store_moves
from kvtier.interfaces import BlockCodec
from kvtier.layout import shard_layout
from kvtier.types import Blocks, KVLayout, Placement, ShardId, Slot
from kvtier_engine.kv_pool import KVPool

_WORKERS = (Placement(),)


class RoundTrip:
    """One codec's way for chunks of a layout with one KV group, through one slot per shard."""

    def __init__(self, codec: BlockCodec, layout: KVLayout) -> None:
        """Raise ``CodecError`` or ``LayoutError`` for a layout that the codec cannot carry."""
        self._codec = codec
        self._layout = layout
        # The first chunk may be larger than those that follow.
        first = chunk_shape(layout, codec, chunk=0)
        self._shapes = (first, chunk_shape(layout, codec))
        self._writers = shard_writers(layout, first, _WORKERS)
        self._slots = {shard: bytearray(size) for shard, size in first.sizes.items()}

    def run(self, pool: KVPool, source: range, target: range, chunks: range) -> None:
        """Pack chunks from the blocks ``source`` and unpack them into the blocks ``target``.

        Both hold one sequence from its first token on. Raises ``CodecError`` for values that the
        codec refuses.
        """
        origin = Blocks(0, (tuple(source),), pool.block_tokens)
        goal = Blocks(0, (tuple(target),), pool.block_tokens)
        for chunk in chunks:
            shape = self._shapes[min(chunk, 1)]
            for move in store_moves(
                self._layout,
                shape,
                self._writers,
                chunk=chunk,
                blocks=origin,
                slots=self._slot,
            ):
                self._codec.pack(pool, move, self._payload(move.shard, move.payload_offset))
            for move in load_moves(
                self._layout,
                shape,
                _WORKERS,
                chunk=chunk,
                groups=frozenset({0}),
                end_token=chunks.stop * self._layout.chunk_tokens,
                blocks=goal,
                slots=self._slot,
                sections=lambda shard: range(self._shapes[0].layouts[shard].sections),
            ):
                self._codec.unpack(self._payload(move.shard, move.payload_offset), pool, move)

    def _slot(self, shard: ShardId) -> Slot:
        return Slot(0, len(self._slots[shard]))

    def _payload(self, shard: ShardId, offset: int) -> memoryview:
        return memoryview(self._slots[shard])[offset:]


def bits_per_value(codec: BlockCodec, layout: KVLayout) -> float:
    """Return the packed bits per value of a layout's first shard, scales and all."""
    shape = shard_layout(layout, ShardId(0, 0, 0))
    packed = sum(codec.section_bytes(shape, section) for section in range(shape.sections))
    values = shape.layers * shape.kv_heads * shape.tokens * (shape.k_dim + shape.v_dim)
    return 8.0 * packed / values
