"""The codecs over a paged pool in plain torch: some layers at a time, each piece in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import torch

from kvtier_kernels import rows
from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rotated import reference, rowwise
from kvtier_kernels.rotated.centre import Centre, Taken
from kvtier_kernels.rotated.fields import Packed
from kvtier_kernels.rotated_format import Code, Format, Piece
from kvtier_kernels.rows.scratch import scratch

#: Values that are worked on together: they and their temporaries stay in a core's cache.
_VALUES_TOGETHER: Final = 2**19


class Arithmetic(Protocol):
    """One piece's arithmetic on rows ``[planes, tokens, dim]`` of the pool's dtype.

    ``scales`` are float16 ``[planes, tokens, 1]``, ``planes`` the bit planes
    ``[planes, tokens, row_bytes]``. ``taken`` is what is taken from K, None for other rows.
    """

    def encode(
        self,
        values: torch.Tensor,
        taken: Taken | None,
        scales: torch.Tensor,
        planes: Sequence[torch.Tensor],
    ) -> None:
        """Fill scales and planes. A scale beyond 65504 or NaN: the row cannot be stored."""

    def decode(
        self,
        values: torch.Tensor,
        taken: Taken | None,
        scales: torch.Tensor,
        planes: Sequence[torch.Tensor],
    ) -> None:
        """Fill values."""


class ReferenceArithmetic:
    """The reference as it is: any dim on any device."""

    def __init__(self, dim: int, code: Code) -> None:
        self._dim, self._code = dim, code

    def encode(
        self,
        values: torch.Tensor,
        taken: Taken | None,
        scales: torch.Tensor,
        planes: Sequence[torch.Tensor],
    ) -> None:
        """Contract of ``Arithmetic``."""
        wide = values.float() if taken is None else values.float() - taken.offsets()
        encoded = reference.encode(wide.flatten(0, 1), self._code)
        scales.copy_(encoded.scales.view(scales.shape))
        for target, plane in zip(planes, encoded.planes, strict=True):
            target.copy_(plane.view(target.shape))

    def decode(
        self,
        values: torch.Tensor,
        taken: Taken | None,
        scales: torch.Tensor,
        planes: Sequence[torch.Tensor],
    ) -> None:
        """Contract of ``Arithmetic``."""
        flat = reference.Rows(tuple(plane.flatten(0, 1) for plane in planes), scales.flatten())
        wide = reference.decode(flat, self._dim, self._code).view(values.shape)
        if taken is not None:
            wide = wide + taken.offsets()
        bound = torch.finfo(values.dtype).max
        values.copy_(wide.clamp_(-bound, bound))


class _Block(NamedTuple):
    """Some planes' rows of one piece: views of the whole. As in ``Arithmetic``."""

    values: torch.Tensor
    taken: Taken | None
    scales: torch.Tensor
    planes: list[torch.Tensor]


def pack(
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    packed: Packed,
    centre: Centre | None,
) -> None:
    """Fill the codes and scales of the span's rows."""
    work = _work(layers, span, form, packed, centre)
    for run in work.runs:
        parts = rows.gather(_some(layers, run), span, work.room)
        for piece, arithmetic, cut in work.pieces:
            for block in cut(parts[piece.part], run):
                arithmetic.encode(*block)
    for area in packed.section.scales:
        scales = packed.field(area).view(torch.float16)
        # NaN compares false as well.
        if not bool((scales <= reference.FLOAT16_MAX).all()):
            raise rows.UnrepresentableError("a NaN, an infinity or values too large")


def unpack(
    packed: Packed,
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    centre: Centre | None,
) -> None:
    """Write the span's rows into the pool."""
    work = _work(layers, span, form, packed, centre)
    for run in work.runs:

        def write(part: int, values: torch.Tensor, run: slice = run) -> None:
            for piece, arithmetic, cut in work.pieces:
                if piece.part == part:
                    for block in cut(values, run):
                        arithmetic.decode(*block)

        rows.scatter(_some(layers, run), span, write, work.room)


#: Cuts a part's rows of some layers, ``[layers, heads, tokens, dim]``, and what belongs to them.
_Cut = Callable[[torch.Tensor, slice], Iterator[_Block]]


def _some(layers: Sequence[LayerViews], run: slice) -> Sequence[LayerViews]:
    """Layers that were checked stay so if they are all."""
    return layers if run.stop - run.start >= len(layers) else layers[run]


class _Work(NamedTuple):
    """What is done with each run of layers: gathered in ``room``, then cut piece by piece."""

    runs: list[slice]
    room: torch.Tensor
    pieces: list[tuple[Piece, Arithmetic, _Cut]]


def _work(
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    packed: Packed,
    centre: Centre | None,
) -> _Work:
    first, runs = layers[0][0], rows.layer_runs(layers, span)
    gathered_values = math.prod(rows.planes_shape(layers[runs[0]], span))
    together = []
    for piece in form.pieces:
        planes = max(1, _VALUES_TOGETHER // (span.token_count * piece.dim))
        together.append(min(planes, len(layers[runs[0]]) * span.head_count))
    if first.device.type == "cpu":
        # Pieces share their room: one is worked on at a time.
        blocks = zip(together, form.pieces, strict=True)
        values = max(planes * span.token_count * piece.dim for planes, piece in blocks)
        gathered, wide = scratch(gathered_values * first.element_size(), 3 * 4 * values)
        room, wide = gathered.view(first.dtype), wide.view(torch.float32)
    else:
        room, wide = first.new_empty(gathered_values), torch.empty(0)
    pieces: list[tuple[Piece, Arithmetic, _Cut]] = []
    for index, piece in enumerate(form.pieces):
        arithmetic: Arithmetic = ReferenceArithmetic(piece.dim, piece.code)
        if rowwise.suits(piece.dim, first.device):
            arithmetic = rowwise.RowwiseArithmetic(piece.dim, piece.code, wide)
        pieces.append((piece, arithmetic, _cut(packed, form, index, centre, together[index])))
    return _Work(runs, room, pieces)


def _cut(packed: Packed, form: Format, index: int, centre: Centre | None, together: int) -> _Cut:
    """Cut one piece into blocks of ``together`` planes."""
    piece = form.pieces[index]
    fields = [packed.field(packed.section.scales[index]).view(torch.float16)]
    fields += [packed.field(area) for area in packed.section.codes[index]]
    taken = None
    if centre is not None and piece.part == 0:
        taken = centre.taken(piece.start, piece.dim)
        fields += [taken.mean, taken.partner]

    def blocks(values: torch.Tensor, run: slice) -> Iterator[_Block]:
        values = values[..., piece.start : piece.start + piece.dim]
        whole = [values, *(field[run] for field in fields)]
        # Views, never copies.
        flat = (torch.split(part.view(-1, *part.shape[2:]), together) for part in whole)
        for block, scales, *some in zip(*flat, strict=True):
            own = None
            if taken is not None:
                own = Taken(some[-2], some[-1], taken.cos, taken.sin)
                del some[-2:]
            yield _Block(block, own, scales, some)

    return blocks
