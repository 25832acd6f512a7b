"""What the codecs that pack token by token share: the format of a section, and moving its rows.

A row is one token of one plane. It is packed on its own, into a few bytes of each of the format's
regions, so that moves of other tokens and heads write other bytes. A section is its regions, one
after the other without a gap, each in the order of the raw planes::

    region 0  [layer][kv_head][K, V][tokens][bytes of a row]     the codes
    region 1  [layer][kv_head][K, V][tokens][bytes of a row]     side data: scales, escapes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvtier_kernels import raw
from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.raw import reference as raw_reference
from kvtier_kernels.rotated_format import Area
from kvtier_kernels.rows.scratch import scratch
from kvtier_kernels.transfer.stripes import Shape

__all__ = [
    "Engine",
    "Packed",
    "UnrepresentableError",
    "blocks",
    "gather",
    "layer_runs",
    "pack",
    "pack_blocks",
    "packed_form",
    "planes_shape",
    "scatter",
    "unpack",
    "unpack_blocks",
]

#: How many values the arithmetic in torch takes at a time: few enough to stay in a CPU's cache.
_BLOCK_VALUES = 2**17
#: How many are gathered from the pool at a time, in whole layers.
_GATHERED_VALUES = 2**22


class UnrepresentableError(ValueError):
    """Values that the format cannot carry; what was written of the target is undefined."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed rows: those of a whole section, or in the same format just the ones that move.

    ``data`` is flat and uint8; ``row_bytes[region][part]`` are the bytes of one row.
    """

    data: torch.Tensor
    layers: int
    kv_heads: int
    tokens: int
    row_bytes: tuple[tuple[int, ...], ...]

    def start(self, region: int, part: int) -> int:
        """Where the first row of K (0) or V (1) lies."""
        return self._end(region) + self.tokens * sum(self.row_bytes[region][:part])

    def head_bytes(self, region: int) -> int:
        """From a row to the same one of the next head."""
        return self.tokens * sum(self.row_bytes[region])

    def area(self, region: int, part: int) -> Area:
        """Where K's (0) or V's (1) rows lie."""
        row_bytes = self.row_bytes[region][part]
        return Area(self.start(region, part), self.head_bytes(region), self.tokens, row_bytes)

    def rows(self, region: int, part: int) -> torch.Tensor:
        """View ``[layers, kv_heads, tokens, bytes]``."""
        head_bytes, row_bytes = self.head_bytes(region), self.row_bytes[region][part]
        return self.data.as_strided(
            (self.layers, self.kv_heads, self.tokens, row_bytes),
            (self.kv_heads * head_bytes, head_bytes, row_bytes, 1),
            int(self.data.storage_offset()) + self.start(region, part),
        )

    def regions(self, part: int) -> list[torch.Tensor]:
        """The rows of every region, as ``rows`` gives them."""
        return [self.rows(region, part) for region in range(len(self.row_bytes))]

    def moved(self, span: Span, device: torch.device) -> Packed:
        """Room on ``device`` for the rows of ``span`` alone."""
        few = replace(self, kv_heads=span.head_count, tokens=span.token_count)
        data = torch.empty(few.nbytes, dtype=torch.uint8, device=device)
        return replace(few, data=data)

    @property
    def nbytes(self) -> int:
        """Size by the format, whatever ``data`` has."""
        return self._end(len(self.row_bytes))

    def _end(self, regions: int) -> int:
        """Where the first ``regions`` regions end."""
        planes = self.layers * self.kv_heads * self.tokens
        return planes * sum(sum(parts) for parts in self.row_bytes[:regions])


class Engine(Protocol):
    """A format's arithmetic on one kind of device. Arguments were checked at the door.

    ``packed`` has exactly the span's rows and lies on the pool's device.
    """

    def pack(self, layers: Sequence[LayerViews], span: Span, packed: Packed) -> None:
        """Pack the span's rows. Raises ``UnrepresentableError``."""

    def unpack(self, packed: Packed, layers: Sequence[LayerViews], span: Span) -> None:
        """Write the span's rows into the pool."""


#: The bytes of one row of some values in each region.
RowBytes = Callable[[int], tuple[int, ...]]


def pack(
    layers: Sequence[LayerViews],
    span: Span,
    target: memoryview,
    stream: int,
    row_bytes: RowBytes,
    engine: Engine,
) -> None:
    """Pack the span's rows into ``target``, one whole section; no other byte of it changes.

    Contract of ``raw.pack``. In addition raises ``UnrepresentableError``.
    """
    if target.readonly:
        raise ValueError("the target is read-only")
    section = _section(layers, span, target, row_bytes)
    device = layers[0][0].device
    with raw.on_stream(device, stream):
        if span.whole and device.type == "cpu":
            engine.pack(layers, span, section)
            return
        packed = section.moved(span, device)
        engine.pack(layers, span, packed)
        if span.whole:
            section.data.copy_(packed.data)
            return
        # One transfer instead of one for each region and part.
        packed = replace(packed, data=packed.data.cpu())
        for moved, rows in _matching_rows(packed, section, span):
            rows.copy_(moved)


def unpack(
    source: memoryview,
    layers: Sequence[LayerViews],
    span: Span,
    stream: int,
    row_bytes: RowBytes,
    engine: Engine,
) -> None:
    """Unpack the span's rows from ``source``, one whole section, into the pool; no other byte.

    Contract of ``raw.unpack``.
    """
    section = _section(layers, span, source, row_bytes)
    if len(set(span.block_ids)) < len(span.block_ids):
        raise ValueError("a block is named twice")
    device = layers[0][0].device
    packed = section
    if not span.whole:
        packed = section.moved(span, section.data.device)
        for moved, rows in _matching_rows(packed, section, span):
            moved.copy_(rows)
    with raw.on_stream(device, stream):
        engine.unpack(replace(packed, data=packed.data.to(device)), layers, span)


def packed_form(shape: Shape, row_bytes: RowBytes) -> Packed:
    """The form of a section, without its bytes."""
    return Packed(
        data=torch.empty(0, dtype=torch.uint8),
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        tokens=shape.tokens,
        row_bytes=tuple(zip(*map(row_bytes, shape.dims), strict=True)),
    )


def layer_runs(layers: Sequence[LayerViews], span: Span) -> list[slice]:
    """Layers whose rows are gathered together: few, so that they stay in a cache till packed."""
    layer_values = math.prod(planes_shape(layers[:1], span))
    step = min(max(1, _GATHERED_VALUES // layer_values), len(layers))
    return [slice(start, start + step) for start in range(0, len(layers), step)]


def _gathered(layers: Sequence[LayerViews], span: Span) -> tuple[list[slice], torch.Tensor | None]:
    """The runs, and on a CPU room for the planes of each."""
    runs, first = layer_runs(layers, span), layers[0][0]
    if first.device.type != "cpu":
        return runs, None
    values = math.prod(planes_shape(layers[runs[0]], span))
    return runs, scratch(values * first.element_size())[0].view(first.dtype)


def planes_shape(layers: Sequence[LayerViews], span: Span) -> tuple[int, int, int]:
    """The planes in which the span's rows lie when gathered, in the pool's values."""
    dims = [part.shape[3] for part in layers[0] if part is not None]
    local = _local(layers, span)
    return len(layers), local.kv_heads, local.tokens * sum(dims)


def gather(
    layers: Sequence[LayerViews], span: Span, room: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The span's rows of K, and of V where there is one: ``[layers, heads, tokens, dim]``.

    They lie in ``room`` if it is given: ``planes_shape`` values of the pool's dtype, or more.
    """
    planes, parts = _planes(layers, span, room)
    if planes.device.type == "cpu":
        raw.pack(layers, _local(layers, span), planes.numpy().data)
    else:
        raw_reference.pack(layers, _local(layers, span), planes)
    return parts


def scatter(
    layers: Sequence[LayerViews],
    span: Span,
    write: Callable[[int, torch.Tensor], None],
    room: torch.Tensor | None = None,
) -> None:
    """Write the span's rows into the pool: ``write(part, rows)`` fills ``rows`` first.

    ``room`` as for ``gather``.
    """
    planes, parts = _planes(layers, span, room)
    for part, rows in enumerate(parts):
        write(part, rows)
    if planes.device.type == "cpu":
        raw.unpack(planes.numpy().data, layers, _local(layers, span))
    else:
        raw_reference.unpack(planes, layers, _local(layers, span))


def blocks(values: torch.Tensor, *packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut rows ``[layers, heads, tokens, n]`` alike into blocks ``[planes, tokens, n]``.

    Views: what is written into a block is written into the whole.
    """
    plane_values = max(1, values.shape[2] * values.shape[3])
    planes = max(1, _BLOCK_VALUES // plane_values)
    cut = (torch.split(rows.flatten(0, 1), planes) for rows in (values, *packed))
    yield from zip(*cut, strict=True)


def pack_blocks(
    layers: Sequence[LayerViews], span: Span, packed: Packed, encode: Callable[..., None]
) -> None:
    """Gather the span's rows and have ``encode`` fill what is packed of them, block by block.

    It is called with a block of values and the same block of each region of a row, all views.
    """
    runs, room = _gathered(layers, span)
    for run in runs:
        for part, values in enumerate(gather(layers[run], span, room)):
            for block in blocks(values, *(rows[run] for rows in packed.regions(part))):
                encode(*block)


def unpack_blocks(
    packed: Packed, layers: Sequence[LayerViews], span: Span, decode: Callable[..., None]
) -> None:
    """Have ``decode`` fill values from what is packed, called as ``encode`` is; scatter them."""
    runs, room = _gathered(layers, span)
    for run in runs:

        def write(part: int, values: torch.Tensor, run: slice = run) -> None:
            for block in blocks(values, *(rows[run] for rows in packed.regions(part))):
                decode(*block)

        scatter(layers[run], span, write, room)


def _section(
    layers: Sequence[LayerViews], span: Span, section: memoryview, row_bytes: RowBytes
) -> Packed:
    raw.check_span(layers, span)
    first = layers[0][0]
    dims = tuple(part.shape[3] for part in layers[0] if part is not None)
    shape = Shape(len(layers), span.kv_heads, span.tokens, dims, first.dtype, first.device)
    packed = packed_form(shape, row_bytes)
    if not section.c_contiguous or section.nbytes != packed.nbytes:
        raise ValueError(f"a contiguous section has {packed.nbytes} bytes, not {section.nbytes}")
    return replace(packed, data=torch.frombuffer(section, dtype=torch.uint8))


def _matching_rows(
    packed: Packed, section: Packed, span: Span
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what moves: rows of ``packed``, and the same of ``section``."""
    heads = slice(span.head_start, span.head_start + span.head_count)
    tokens = slice(span.token_start, span.token_start + span.token_count)
    return [
        (packed.rows(region, part), section.rows(region, part)[:, heads, tokens])
        for region, parts in enumerate(section.row_bytes)
        for part in range(len(parts))
    ]


def _local(layers: Sequence[LayerViews], span: Span) -> Span:
    """The span in planes that hold what moves and, before it, the rest of its first block."""
    skipped = span.token_start % layers[0][0].shape[1]
    return replace(
        span,
        tokens=skipped + span.token_count,
        token_start=skipped,
        kv_heads=span.head_count,
        head_start=0,
    )


def _planes(
    layers: Sequence[LayerViews], span: Span, room: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Raw planes for ``_local`` as uint8, and the span's rows in them by part."""
    first, local = layers[0][0], _local(layers, span)
    dims = [part.shape[3] for part in layers[0] if part is not None]
    shape = planes_shape(layers, span)
    if room is None:
        planes = torch.empty(shape, dtype=first.dtype, device=first.device)
    else:
        planes = room[: math.prod(shape)].view(shape)
    parts = [
        rows.view(*shape[:2], local.tokens, -1)[:, :, local.token_start :]
        for rows in torch.split(planes, [local.tokens * dim for dim in dims], 2)
    ]
    return planes.view(torch.uint8).flatten(), parts
