"""The raw op for pools in host memory: all rows of a call move by address, in one copy.

torch pays per strided copy (one for each layer's K and V) and per element of an indexed one.
numpy moves items of any width by their index, each with one ``memmove`` and without the GIL, so a
call becomes a list of items, as wide as rows lie together in the pool and in the section::

    pool     [ .. | item 7 | item 8 | .. | item 2 | .. ]   from the lowest address of any layer
    section  [ item 7 | item 8 | item 2 | .. ]

Items need not lie in one allocation: numpy is shown all memory between the lowest row and the
highest, and touches what the index names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from kvtier_kernels.raw import Span
    from kvtier_kernels.raw.views import PoolLayers

_Index = npt.NDArray[np.int64]

# Narrower items than rows come from allocations that lie at odd distances. Below this width an
# item costs more than torch's copies.
_ITEM_BYTES_MIN: Final = 64


class _Memory:
    """A range of addresses in numpy's terms; whoever makes an array of it keeps it allocated."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, width: int, count: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (count,),
            "typestr": f"|V{width}",
        }


@dataclass(frozen=True, slots=True)
class Items:
    """What moves: ``count_total`` items of ``width`` bytes from ``address`` on are the pool.

    ``pool`` says which of them move, in the order of the section; ``section`` says where to, or
    None where they fill it.
    """

    address: int
    width: int
    count_total: int
    pool: _Index
    section: _Index | None

    def memory(self) -> npt.NDArray[np.void]:
        """The pool's items."""
        return np.asarray(_Memory(self.address, self.width, self.count_total))


def items(layers: PoolLayers, span: Span) -> Items | None:
    """Cut the span's rows into items; None where that is not worth it or K and V differ."""
    if layers.steps is None:
        return None
    row_bytes = layers.row_bytes
    head_step = layers.steps[2]
    pieces = _pieces(layers, span)
    low = min(layers.addresses)
    plane_bytes = span.tokens * row_bytes
    first = min(start for start, _, _ in pieces)
    distances = [address - low for address in layers.addresses]
    width = math.gcd(
        plane_bytes,
        head_step if span.head_count > 1 else 0,
        *distances,
        *(number for start, row, size in pieces for number in (start - first, row, size)),
    )
    if width < min(row_bytes, _ITEM_BYTES_MIN):
        return None
    parts = layers.parts
    starts = np.array(distances, np.int64).reshape(-1, 1, parts, 1) // width
    heads = np.arange(span.head_count, dtype=np.int64).reshape(1, -1, 1, 1)
    cut = [range(0, size, width) for _, _, size in pieces]
    inner = [start - first + at for (start, _, _), r in zip(pieces, cut, strict=True) for at in r]
    pool = starts + heads * (head_step // width) + np.array(inner, np.int64) // width
    section = None
    if not span.whole:
        rows = [row + at for (_, row, _), r in zip(pieces, cut, strict=True) for at in r]
        section = _section_index(layers, span, plane_bytes // width, rows, width)
    flat = pool.reshape(-1)
    address = low + first + span.pool_head_start * head_step
    return Items(address, width, int(flat.max()) + 1, flat, section)


def pack(moved: Items, section: torch.Tensor) -> None:
    """Copy the items from the pool into ``section`` (uint8, contiguous)."""
    target = section.numpy().view(f"V{moved.width}")
    if moved.section is None:
        # "clip" spares numpy a buffer for the output; no index is out of range.
        np.take(moved.memory(), moved.pool, out=target, mode="clip")
    else:
        target[moved.section] = moved.memory()[moved.pool]


def unpack(section: torch.Tensor, moved: Items) -> None:
    """Copy the items from ``section`` into the pool: the inverse of ``pack``."""
    source = section.numpy().view(f"V{moved.width}")
    moved.memory()[moved.pool] = source if moved.section is None else source[moved.section]


def _pieces(layers: PoolLayers, span: Span) -> list[tuple[int, int, int]]:
    """The span's rows of one head as ``(start in the pool, start in the plane, length)``, in bytes.

    A piece is as long as its rows lie together in the pool.
    """
    assert layers.steps is not None, "layers without common steps"
    row_bytes = layers.row_bytes
    block_step, token_step, _ = layers.steps
    pieces: list[tuple[int, int, int]] = []
    first = span.token_start % layers.block_tokens
    row = 0
    for block in span.block_ids:
        count = min(layers.block_tokens - first, span.token_count - row)
        start = block * block_step + first * token_step
        plane_row = (span.token_start + row) * row_bytes
        if token_step != row_bytes:
            pieces += [
                (start + i * token_step, plane_row + i * row_bytes, row_bytes) for i in range(count)
            ]
        elif pieces and pieces[-1][0] + pieces[-1][2] == start:
            pieces[-1] = (*pieces[-1][:2], pieces[-1][2] + count * row_bytes)
        else:
            pieces.append((start, plane_row, count * row_bytes))
        row += count
        first = 0
    return pieces


def _section_index(
    layers: PoolLayers, span: Span, plane_items: int, rows: list[int], width: int
) -> _Index:
    """Where the items lie in the section, in the order of the pool's index."""
    parts = layers.parts
    layer = np.arange(len(layers), dtype=np.int64).reshape(-1, 1, 1, 1)
    heads = np.arange(span.head_start, span.head_start + span.head_count).reshape(1, -1, 1, 1)
    part = np.arange(parts, dtype=np.int64).reshape(1, 1, -1, 1)
    plane = (layer * span.kv_heads + heads) * parts + part
    return (plane * plane_items + np.array(rows, np.int64) // width).reshape(-1)
