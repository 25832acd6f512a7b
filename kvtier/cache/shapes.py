"""The shapes of chunks under the codecs of this process, computed once."""

from __future__ import annotations

from kvtier.cache.planner import ChunkShape, chunk_shape
from kvtier.codecs.known import KnownCodecs
from kvtier.codecs.opaque import OpaqueCodec
from kvtier.errors import KVTierError
from kvtier.layout import shard_ids
from kvtier.types import Fidelity, KVLayout, ShardId

_SHAPES_MAX = 64


class Shapes:
    """Chunk shapes by layout, codec and place, computed once. Used under the cache's lock."""

    def __init__(self, codecs: KnownCodecs) -> None:
        self.codecs = codecs
        self._shapes: dict[tuple[KVLayout, str, bool], ChunkShape] = {}
        self._shards: dict[KVLayout, frozenset[ShardId]] = {}

    def of(self, layout: KVLayout, chunk: int, codec: str) -> ChunkShape:
        """Return the shape of a sequence's chunk under a codec that can be made.

        An opaque one has a layout of its own.
        """
        place = (layout, codec, chunk == 0)
        shape = self._shapes.get(place)
        if shape is None:
            if len(self._shapes) >= _SHAPES_MAX:
                self._shapes.clear()
            maker = self.codecs.get(codec)
            cut = maker.layout if isinstance(maker, OpaqueCodec) else layout
            shape = self._shapes[place] = chunk_shape(cut, maker, chunk=chunk)
        return shape

    def usable(self, layout: KVLayout, codec: str, fidelity: Fidelity) -> bool:
        """Tell whether a layout's chunks may be used as a codec packed them.

        It is known here, exact enough, and takes such a layout: any name may stand in a header.
        """
        if not self.codecs.readable(codec, fidelity):
            return False
        try:
            self.of(layout, 1, codec)
        except KVTierError:
            return False
        return True

    def shards(self, layout: KVLayout) -> frozenset[ShardId]:
        """Return the shards of a whole chunk, which are the same under every codec."""
        shards = self._shards.get(layout)
        if shards is None:
            if len(self._shards) >= _SHAPES_MAX:
                self._shards.clear()
            shards = self._shards[layout] = frozenset(shard_ids(layout))
        return shards
