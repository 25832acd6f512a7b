"""The raw codec: the pool's own bytes, so that store and load are byte-exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvtier.codecs.paged import Kernel, PagedCodec
from kvtier.codecs.sections import section_offset
from kvtier.constants import ALIGN_BYTES
from kvtier.errors import LayoutError
from kvtier.interfaces import PagedPool
from kvtier.types import CodecTraits, Move, Part, ShardLayout

if TYPE_CHECKING:
    from kvtier_kernels.raw import LayerViews, PoolLayers

_Key = tuple[int, int, ShardLayout, int, int]

# Stretches of one pool that are remembered: as many as it has KV groups, unless loads stop midway.
_STRETCHES_MAX: Final = 256


class RawCodec(PagedCodec):
    """Planes as the pool holds them, in the order ``[layer][kv_head][K, V][tokens][dim]``.

    Remembers the views of the pool it saw last, and keeps that pool alive.
    """

    def __init__(self) -> None:
        self._seen: tuple[PagedPool | None, dict[_Key, PoolLayers]] = (None, {})

    @property
    def name(self) -> str:
        """``raw``."""
        return "raw"

    @property
    def traits(self) -> CodecTraits:
        """Exact."""
        return CodecTraits(exact=True)

    def section_bytes(self, layout: ShardLayout, section: int) -> int:
        """Size of one section's planes."""
        plane_bytes = layout.plane_bytes(Part.K) + layout.plane_bytes(Part.V)
        return len(layout.section_layer_range(section)) * layout.kv_heads * plane_bytes

    def _import_kernel(self) -> Kernel:
        from kvtier_kernels import raw

        return raw

    def _sections(
        self, pool: PagedPool, move: Move, payload: memoryview
    ) -> Iterator[tuple[memoryview, Sequence[LayerViews]]]:
        """The move's sections, as one where they touch: a section is nothing but its layers."""
        first, layout = move.first_section, move.layout
        last = first + move.section_count - 1
        inner = range(first, min(last, layout.sections))
        if any(self.section_bytes(layout, section) % ALIGN_BYTES for section in inner):
            yield from super()._sections(pool, move, payload)
            return
        layers = self._layers(pool, move, payload)
        end = section_offset(self, layout, last) + self.section_bytes(layout, last)
        yield payload[section_offset(self, layout, first) : end], layers

    def _layers(self, pool: PagedPool, move: Move, payload: memoryview) -> PoolLayers:
        """The pool's views of all the move's layers, checked at the first move of its kind."""
        if self._seen[0] is not pool or len(self._seen[1]) >= _STRETCHES_MAX:
            self._seen = (pool, {})
        known = self._seen[1]
        span = move.first_section, move.section_count
        key = (move.shard.group, move.pool_layer_start, move.layout, *span)
        layers = known.get(key)
        if layers is None:
            from kvtier_kernels.raw import PoolLayers

            sections = super()._sections(pool, move, payload)
            try:
                layers = PoolLayers(layer for _, part in sections for layer in part)
            except ValueError as error:
                raise LayoutError(f"shard {tuple(move.shard)}: {error}") from error
            known[key] = layers
        return layers
