"""The raw codec: the pool's own bytes, so that store and load are byte-exact."""

from __future__ import annotations

from kvtier.codecs.paged import Kernel, PagedCodec
from kvtier.types import Part, ShardLayout


class RawCodec(PagedCodec):
    """Planes as the pool holds them, in the order ``[layer][kv_head][K, V][tokens][dim]``."""

    @property
    def name(self) -> str:
        """``raw``."""
        return "raw"

    def section_bytes(self, layout: ShardLayout, section: int) -> int:
        """Size of one section's planes."""
        plane_bytes = layout.plane_bytes(Part.K) + layout.plane_bytes(Part.V)
        return len(layout.section_layer_range(section)) * layout.kv_heads * plane_bytes

    def _import_kernel(self) -> Kernel:
        from kvtier_kernels import raw

        return raw
