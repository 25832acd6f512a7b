"""The raw op in plain torch, for any device. Arguments were checked at the door.

Elements move as integers of their own width: bytes survive whatever they mean, and dtypes that
lack an operation (float8) need none.

In the pool a head's rows lie scattered over blocks; in a plane they lie together::

    pool   block 7 [t0 .. t15]   block 2 [t16 .. t31]   block 9 [t32 .. t47]
    plane  [t0 .. t15 | t16 .. t31 | t32 .. t47]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from kvtier_kernels.raw import LayerViews, Span

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Starting a strided copy costs about as much as an indexed copy pays for this many blocks.
_RUN_BLOCKS_MIN: Final = 4


class _Run(NamedTuple):
    """Tokens ``token .. token + token_count`` of each of ``block_count`` consecutive blocks.

    They are the plane's rows from ``row`` on. With more than one block, they are all its tokens.
    """

    row: int
    block: int
    block_count: int
    token: int
    token_count: int


@dataclass(frozen=True, slots=True)
class _Schedule:
    """How a span's rows move: strided copies, then one indexed copy of whole blocks.

    Rows from ``indexed_row`` on move by ``indexed``, block ids on the pool's device.
    """

    runs: tuple[_Run, ...]
    indexed_row: int
    indexed: torch.Tensor | None


class _Pair(NamedTuple):
    """One layer's K or V twice: blocks ``[head, block, token, dim]``, plane ``[head, row, dim]``.

    Both hold only the span's heads; the plane holds only the span's rows.
    """

    blocks: torch.Tensor
    plane: torch.Tensor


def pack(layers: Sequence[LayerViews], span: Span, planes: torch.Tensor) -> None:
    """Copy the span's rows from the pool into ``planes`` (uint8, contiguous, a whole section)."""
    device = layers[0][0].device
    if span.whole and planes.device != device:
        # One transfer instead of one for each layer and part.
        staging = torch.empty(planes.shape, dtype=planes.dtype, device=device)
        pack(layers, span, staging)
        planes.copy_(staging)
        return
    schedule = _schedule(layers, span)
    for blocks, plane in _pairs(layers, span, planes):
        for run in schedule.runs:
            source, target = _run_views(blocks, plane, run)
            target.copy_(source)
        if schedule.indexed is not None:
            source, target = _indexed_views(blocks, plane, schedule)
            if target.device == source.device:
                torch.index_select(source, 1, schedule.indexed, out=target)
            else:
                target.copy_(source.index_select(1, schedule.indexed))


def unpack(planes: torch.Tensor, layers: Sequence[LayerViews], span: Span) -> None:
    """Copy the span's rows from ``planes`` into the pool: the inverse of ``pack``."""
    schedule = _schedule(layers, span)
    for blocks, plane in _pairs(layers, span, planes.to(layers[0][0].device)):
        for run in schedule.runs:
            target, source = _run_views(blocks, plane, run)
            target.copy_(source)
        if schedule.indexed is not None:
            target, source = _indexed_views(blocks, plane, schedule)
            target.index_copy_(1, schedule.indexed, source)


@contextmanager
def cuda_stream(device: torch.device, stream: int) -> Iterator[None]:
    """Run the body on a CUDA stream given by its handle (0: the default one), then wait for it."""
    if stream:
        queue: torch.cuda.Stream = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            stream, device=device
        )
    else:
        queue = torch.cuda.default_stream(device)
    with torch.cuda.stream(queue):
        yield
    queue.synchronize()


def _schedule(layers: Sequence[LayerViews], span: Span) -> _Schedule:
    """Whole blocks move in runs where these are long, else by index; partial blocks by run."""
    block_tokens = layers[0][0].shape[1]
    first = span.token_start % block_tokens
    edges: list[_Run] = []
    whole: list[int] = []
    row = whole_row = 0
    for block in span.block_ids:
        count = min(block_tokens - first, span.token_count - row)
        if count < block_tokens:
            edges.append(_Run(row, block, 1, first, count))
        else:
            whole_row = whole_row if whole else row
            whole.append(block)
        row += count
        first = 0
    runs = _consecutive(whole, whole_row, block_tokens)
    if len(runs) * _RUN_BLOCKS_MIN <= len(whole):
        return _Schedule((*edges, *runs), 0, None)
    indexed = torch.tensor(whole, device=layers[0][0].device)
    return _Schedule(tuple(edges), whole_row, indexed)


def _consecutive(blocks: Sequence[int], row: int, block_tokens: int) -> list[_Run]:
    """Whole blocks, whose rows start at ``row``, as runs of consecutive block ids."""
    runs: list[_Run] = []
    for block in blocks:
        if runs and block == runs[-1].block + runs[-1].block_count:
            runs[-1] = runs[-1]._replace(block_count=runs[-1].block_count + 1)
        else:
            runs.append(_Run(row, block, 1, 0, block_tokens))
        row += block_tokens
    return runs


def _pairs(layers: Sequence[LayerViews], span: Span, planes: torch.Tensor) -> Iterator[_Pair]:
    integer = _INTEGERS[layers[0][0].element_size()]
    rows = slice(span.token_start, span.token_start + span.token_count)
    heads = slice(span.head_start, span.head_start + span.head_count)
    pool_heads = slice(span.pool_head_start, span.pool_head_start + span.head_count)
    per_layer = planes.view(integer).view(len(layers), span.kv_heads, -1)
    for layer, layer_planes in zip(layers, per_layer, strict=True):
        column = 0
        for part in layer:
            if part is None:
                continue
            dim = part.shape[3]
            plane = layer_planes[heads, column : column + span.tokens * dim]
            column += span.tokens * dim
            blocks = part.view(integer)[:, :, pool_heads].permute(2, 0, 1, 3)
            yield _Pair(blocks, plane.view(span.head_count, span.tokens, dim)[:, rows])


def _run_views(
    blocks: torch.Tensor, plane: torch.Tensor, run: _Run
) -> tuple[torch.Tensor, torch.Tensor]:
    """A run in the pool and in the plane, both ``[head, block, token, dim]``."""
    pool_rows = blocks[
        :, run.block : run.block + run.block_count, run.token : run.token + run.token_count
    ]
    plane_rows = plane[:, run.row : run.row + run.block_count * run.token_count]
    return pool_rows, plane_rows.view(pool_rows.shape)


def _indexed_views(
    blocks: torch.Tensor, plane: torch.Tensor, schedule: _Schedule
) -> tuple[torch.Tensor, torch.Tensor]:
    """All the pool's blocks and the plane's rows of those that move, one block per index."""
    assert schedule.indexed is not None, "no indexed copy in this schedule"
    block_count, block_tokens = len(schedule.indexed), blocks.shape[2]
    stop = schedule.indexed_row + block_count * block_tokens
    rows = plane[:, schedule.indexed_row : stop]
    rows = rows.view(blocks.shape[0], block_count, block_tokens, blocks.shape[3])
    if blocks.stride(3) == 1 and blocks.stride(2) == blocks.shape[3]:
        # A head's tokens of one block lie together: one copy per block, not one per token.
        return blocks.flatten(2), rows.flatten(2)
    return blocks, rows
