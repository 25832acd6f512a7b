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

    They are the span's rows from ``row`` on. With more than one block, they are all its tokens.
    """

    row: int
    block: int
    block_count: int
    token: int
    token_count: int


@dataclass(frozen=True, slots=True)
class _Indexed:
    """Whole blocks that move by their ids, which lie on the pool's device.

    ``pool`` is the run of all the pool's blocks; the rows of ``plane`` are those that move.
    """

    ids: torch.Tensor
    pool: _Run
    plane: _Run


@dataclass(frozen=True, slots=True)
class _Schedule:
    """How a span's rows move: by strided copies and by at most one indexed copy."""

    runs: tuple[_Run, ...]
    indexed: _Indexed | None


class _Pair(NamedTuple):
    """One layer's K or V: its view of the pool and its section, both as integers.

    ``plane_start`` is where the span's first row of its first head lies in the section, in
    elements; ``head_step`` is how far the same row of the next head is.
    """

    view: torch.Tensor
    section: torch.Tensor
    pool_head: int
    head_count: int
    plane_start: int
    head_step: int

    def pool_rows(self, run: _Run) -> torch.Tensor:
        """The run in the pool: ``[head, block, token, dim]``."""
        block_step, token_step, head_step, _ = self.view.stride()
        first = run.block * block_step + run.token * token_step + self.pool_head * head_step
        return self.view.as_strided(
            (self.head_count, run.block_count, run.token_count, self.view.shape[3]),
            (head_step, block_step, token_step, 1),
            self.view.storage_offset() + first,
        )

    def plane_rows(self, run: _Run) -> torch.Tensor:
        """The run in the section: ``[head, block, token, dim]``."""
        dim = self.view.shape[3]
        return self.section.as_strided(
            (self.head_count, run.block_count, run.token_count, dim),
            (self.head_step, run.token_count * dim, dim, 1),
            self.plane_start + run.row * dim,
        )


def pack(layers: Sequence[LayerViews], span: Span, section: torch.Tensor) -> None:
    """Copy the span's rows from the pool into ``section`` (uint8, contiguous)."""
    device = layers[0][0].device
    if span.whole and section.device != device:
        # One transfer instead of one for each layer and part.
        staging = torch.empty(section.shape, dtype=section.dtype, device=device)
        pack(layers, span, staging)
        section.copy_(staging)
        return
    schedule = _schedule(layers, span)
    for pair in _pairs(layers, span, section):
        for run in schedule.runs:
            pair.plane_rows(run).copy_(pair.pool_rows(run))
        if schedule.indexed is not None:
            source, target = _indexed_rows(pair, schedule.indexed)
            if target.device == source.device:
                torch.index_select(source, 1, schedule.indexed.ids, out=target)
            else:
                target.copy_(source.index_select(1, schedule.indexed.ids))


def unpack(section: torch.Tensor, layers: Sequence[LayerViews], span: Span) -> None:
    """Copy the span's rows from ``section`` into the pool: the inverse of ``pack``."""
    schedule = _schedule(layers, span)
    for pair in _pairs(layers, span, section.to(layers[0][0].device)):
        for run in schedule.runs:
            pair.pool_rows(run).copy_(pair.plane_rows(run))
        if schedule.indexed is not None:
            target, source = _indexed_rows(pair, schedule.indexed)
            target.index_copy_(1, schedule.indexed.ids, source)


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
    block_count, block_tokens = layers[0][0].shape[:2]
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
        return _Schedule((*edges, *runs), None)
    ids = torch.tensor(whole, device=layers[0][0].device)
    pool = _Run(0, 0, block_count, 0, block_tokens)
    plane = _Run(whole_row, 0, len(whole), 0, block_tokens)
    return _Schedule(tuple(edges), _Indexed(ids, pool, plane))


def _consecutive(blocks: Sequence[int], row: int, block_tokens: int) -> list[_Run]:
    """Whole blocks, whose rows start at ``row``, as runs of consecutive block ids."""
    runs: list[_Run] = []
    start = 0
    for stop in range(1, len(blocks) + 1):
        if stop == len(blocks) or blocks[stop] != blocks[stop - 1] + 1:
            first_row = row + start * block_tokens
            runs.append(_Run(first_row, blocks[start], stop - start, 0, block_tokens))
            start = stop
    return runs


def _pairs(layers: Sequence[LayerViews], span: Span, section: torch.Tensor) -> Iterator[_Pair]:
    integer = _INTEGERS[layers[0][0].element_size()]
    elements = section.view(integer)
    plane_start = int(elements.storage_offset())
    for layer in layers:
        parts = [part for part in layer if part is not None]
        head_step = span.tokens * sum(part.shape[3] for part in parts)
        for part in parts:
            dim = part.shape[3]
            first = plane_start + span.head_start * head_step + span.token_start * dim
            view = part.view(integer)
            yield _Pair(view, elements, span.pool_head_start, span.head_count, first, head_step)
            plane_start += span.tokens * dim
        plane_start += (span.kv_heads - 1) * head_step


def _indexed_rows(pair: _Pair, indexed: _Indexed) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool's blocks and the plane's, ``[head, block, token, dim]`` or with the last two as one.

    One dimension where a head's tokens of one block touch: a copy per block, not one per token.
    """
    pool, plane = pair.pool_rows(indexed.pool), pair.plane_rows(indexed.plane)
    if pool.stride(2) == pool.shape[3]:
        return pool.flatten(2), plane.flatten(2)
    return pool, plane
