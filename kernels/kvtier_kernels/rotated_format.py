"""The packed form of the rotated codecs: arithmetic on its sizes and offsets, without torch.

A row is one token's K or V of one head. It is cut into *pieces*, each rotated and scaled apart: one
piece as a rule; a latent row (no V) into its largest power of two and the rest, 512 + 64. A section
is a run of layers in three areas, each padded with zeros to whole lines of 128 bytes::

    codes    [layer][kv_head] [K pieces, V piece] [bit planes] [tokens][row_bytes]
    scales   [layer][kv_head] [K pieces, V piece] [tokens] float16
    sinks    [layer][kv_head] [K, V]              [sink_tokens][dim] as the pool has them

Every row of every field lies at a constant stride, so tokens and heads are written and read apart.
With chunks of 256 tokens every field is whole lines: a kernel that writes 128 tokens of a field
writes no part of a line of another.

A code's bits lie in one or two planes, the upper bits in the first. Within a row, values fill a
byte from its low bits up::

    8 bits   byte j = value j                 two's complement (int8)
    4 bits   byte j = v[2j] | v[2j+1] << 4    codes 0 .. 15 in order: 10 32 54 76 98 BA DC FE
    2 bits   byte j = v[4j] | v[4j+1] << 2 | v[4j+2] << 4 | v[4j+3] << 6
    1 bit    byte j = v[8j] | v[8j+1] << 1 | ... | v[8j+7] << 7

The bits of a row's last byte that no value needs are zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

LINE_BYTES: Final = 128
SCALE_BYTES: Final = 2
#: Sums over a piece stay below 2**24, where float32 is exact in any order.
PIECE_DIM_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class Code:
    """How a rotated value becomes bits: ``widths`` of its planes, upper bits first.

    With a ``peak`` the code is the integer -peak .. peak (stored as it is in one plane, else with
    an offset of ``peak + 1``); without, it is an index into the Lloyd-Max levels.
    """

    name: str
    widths: tuple[int, ...]
    peak: int = 0

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return sum(self.widths)

    def row_bytes(self, dim: int) -> tuple[int, ...]:
        """Bytes of a row in each bit plane."""
        return tuple(-(-dim * width // 8) for width in self.widths)


INT8: Final = Code("int8", (8,), peak=127)
INT6: Final = Code("int6", (4, 2), peak=31)
LM5: Final = Code("lm5", (4, 1))
LM4: Final = Code("lm4", (4,))


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns ``start .. start + dim`` of a part's rows: 0 for K, 1 for V."""

    part: int
    start: int
    dim: int
    code: Code


@dataclass(frozen=True, slots=True)
class Area:
    """One field of a section: ``[layers][kv_heads][rows][row_bytes]``.

    The first row of layer 0, head 0 lies at ``offset``; ``head_step`` bytes lead to the next head,
    ``kv_heads`` times that to the next layer. Rows touch.
    """

    offset: int
    head_step: int
    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Section:
    """Where all fields of a section lie. ``codes`` holds the bit planes of each piece."""

    layers: int
    kv_heads: int
    sink_tokens: int
    codes: tuple[tuple[Area, ...], ...]
    scales: tuple[Area, ...]
    sinks: tuple[Area, ...]
    pads: tuple[tuple[int, int], ...]
    nbytes: int

    @property
    def areas(self) -> Iterator[Area]:
        """All fields, in the order in which they lie."""
        for planes in self.codes:
            yield from planes
        yield from self.scales
        yield from self.sinks


@dataclass(frozen=True, slots=True)
class Format:
    """A codec's packed form for one kind of pool. ``v_dim`` 0 means latent rows."""

    k_dim: int
    v_dim: int
    k_code: Code
    v_code: Code
    element_bytes: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of one token's K and V, in the order in which they are stored."""
        if self.v_dim:
            return Piece(0, 0, self.k_dim, self.k_code), Piece(1, 0, self.v_dim, self.v_code)
        first = 1 << (self.k_dim.bit_length() - 1)
        pieces = [Piece(0, 0, first, self.k_code)]
        if self.k_dim > first:
            pieces.append(Piece(0, first, self.k_dim - first, self.k_code))
        return tuple(pieces)

    @property
    def part_dims(self) -> tuple[int, ...]:
        """Dims of K and, unless latent, V."""
        return (self.k_dim, self.v_dim) if self.v_dim else (self.k_dim,)

    def section(self, layers: int, kv_heads: int, tokens: int, sink_tokens: int) -> Section:
        """Lay out a section of ``layers``; its first ``sink_tokens`` rows are also kept exactly."""
        return _section(self, layers, kv_heads, tokens, sink_tokens)


# Each call that moves rows asks several times.
@lru_cache(maxsize=256)
def _section(form: Format, layers: int, kv_heads: int, tokens: int, sink_tokens: int) -> Section:
    pieces = form.pieces
    widths = [row for piece in pieces for row in piece.code.row_bytes(piece.dim)]
    cursor = _Cursor(layers * kv_heads)
    fields = iter(cursor.add([(tokens, width) for width in widths]))
    codes = tuple(tuple(next(fields) for _ in piece.code.widths) for piece in pieces)
    scales = cursor.add([(tokens, SCALE_BYTES)] * len(pieces))
    sinks = cursor.add([(sink_tokens, dim * form.element_bytes) for dim in form.part_dims])
    return Section(
        layers, kv_heads, sink_tokens, codes, scales, sinks, tuple(cursor.pads), cursor.nbytes
    )


class _Cursor:
    """Places areas one behind the other and remembers the padding between them."""

    def __init__(self, slabs: int) -> None:
        self.nbytes = 0
        self.pads: list[tuple[int, int]] = []
        self._slabs = slabs

    def add(self, fields: list[tuple[int, int]]) -> tuple[Area, ...]:
        """Interleave fields of (rows, row_bytes) head by head, then pad to whole lines."""
        head_step = sum(rows * row_bytes for rows, row_bytes in fields)
        areas: list[Area] = []
        offset = self.nbytes
        for rows, row_bytes in fields:
            areas.append(Area(offset, head_step, rows, row_bytes))
            offset += rows * row_bytes
        end = self.nbytes + self._slabs * head_step
        self.nbytes = -(-end // LINE_BYTES) * LINE_BYTES
        if self.nbytes > end:
            self.pads.append((end, self.nbytes))
        return tuple(areas)
