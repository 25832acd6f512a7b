"""The shapes of chunks under the codecs of this process, computed once."""

from __future__ import annotations

from kvtier.cache.planner import ChunkShape, chunk_shape
from kvtier.codecs.known import KnownCodecs
from kvtier.types import KVLayout

_SHAPES_MAX = 64


class Shapes:
    """Chunk shapes by layout, codec and place, computed once. Used under the cache's lock.

    ``default`` is the codec that packs what is stored in DRAM.
    """

    def __init__(self, codecs: KnownCodecs, default: str) -> None:
        self.codecs = codecs
        self.default = default
        self._shapes: dict[tuple[KVLayout, str, bool], ChunkShape] = {}

    def of(self, layout: KVLayout, chunk: int, codec: str | None = None) -> ChunkShape:
        """Return the shape of a sequence's chunk under a codec that can be made."""
        name = codec or self.default
        place = (layout, name, chunk == 0)
        shape = self._shapes.get(place)
        if shape is None:
            if len(self._shapes) >= _SHAPES_MAX:
                self._shapes.clear()
            made = chunk_shape(layout, self.codecs.get(name), chunk=chunk)
            shape = self._shapes[place] = made
        return shape
