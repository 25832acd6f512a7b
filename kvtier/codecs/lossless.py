"""bfloat16 in 12 bits a value, bit for bit; other dtypes as they are."""

from __future__ import annotations

from typing import Final

from kvtier.codecs.paged import Kernel, PagedCodec, section_bytes
from kvtier.types import DTYPE_BYTES, CodecTraits, ShardLayout

_SIDE_BYTES: Final = 8


class LosslessCodec(PagedCodec):
    """4-bit exponent codes beside sign and mantissa; format in ``kvtier_kernels.lossless``.

    What is served is bit-exact. Slots have one size, so a row whose exponents have no room (more
    than 15 different ones and three escapes, as in no model's KV) is a ``CodecError``: its chunk is
    not stored. Pools of other dtypes gain nothing: their sections are those of ``raw``.
    """

    @property
    def name(self) -> str:
        """``lossless``."""
        return "lossless"

    @property
    def traits(self) -> CodecTraits:
        """Exact."""
        return CodecTraits(exact=True)

    def section_bytes(self, layout: ShardLayout, section: int) -> int:
        """Size of the packed rows for bfloat16, else of the pool's own bytes."""
        value_bytes = DTYPE_BYTES[layout.dtype]
        packs = layout.dtype == "bfloat16"

        def row_bytes(dim: int) -> int:
            return dim + -(-dim // 2) + _SIDE_BYTES if packs else dim * value_bytes

        return section_bytes(layout, section, row_bytes)

    def _import_kernel(self) -> Kernel:
        from kvtier_kernels import lossless

        return lossless
