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

# The dimension of blocks in a run's view: ``[layer, part, head, block, token, dim]``.
_BLOCKS: Final = 3

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


class _Planes(NamedTuple):
    """Planes that move together: their view of the pool and their section, both as integers.

    ``view`` is the first plane's layer, ``[block, token, head, dim]``. Where all of a section's
    layers lie evenly spaced in one allocation, one of these stands for all of its planes, and
    they move in one copy; else each layer's K and V has its own. ``pool_steps`` and
    ``plane_steps`` lead from a layer and from a part to the next, in elements, as ``counts`` says
    how many there are. ``plane_start`` is where the first head's first row lies in the section,
    ``head_step`` how far the same row of the next head is.
    """

    view: torch.Tensor
    section: torch.Tensor
    pool_head: int
    head_count: int
    plane_start: int
    head_step: int
    counts: tuple[int, int] = (1, 1)
    pool_steps: tuple[int, int] = (0, 0)
    plane_steps: tuple[int, int] = (0, 0)

    def pool_rows(self, run: _Run) -> torch.Tensor:
        """The run in the pool: ``[layer, part, head, block, token, dim]``."""
        block_step, token_step, head_step, value_step = self.view.stride()
        first = run.block * block_step + run.token * token_step + self.pool_head * head_step
        return self.view.as_strided(
            (
                *self.counts,
                self.head_count,
                run.block_count,
                run.token_count,
                self.view.shape[3],
            ),
            (*self.pool_steps, head_step, block_step, token_step, value_step),
            self.view.storage_offset() + first,
        )

    def plane_rows(self, run: _Run) -> torch.Tensor:
        """The run in the section: ``[layer, part, head, block, token, dim]``."""
        dim = self.view.shape[3]
        return self.section.as_strided(
            (*self.counts, self.head_count, run.block_count, run.token_count, dim),
            (*self.plane_steps, self.head_step, run.token_count * dim, dim, 1),
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
    for planes in _planes(layers, span, section):
        for run in schedule.runs:
            planes.plane_rows(run).copy_(planes.pool_rows(run))
        if schedule.indexed is not None:
            source, target = _indexed_rows(planes, schedule.indexed)
            if target.device == source.device:
                torch.index_select(source, _BLOCKS, schedule.indexed.ids, out=target)
            else:
                target.copy_(source.index_select(_BLOCKS, schedule.indexed.ids))


def unpack(section: torch.Tensor, layers: Sequence[LayerViews], span: Span) -> None:
    """Copy the span's rows from ``section`` into the pool: the inverse of ``pack``."""
    schedule = _schedule(layers, span)
    for planes in _planes(layers, span, section.to(layers[0][0].device)):
        for run in schedule.runs:
            planes.pool_rows(run).copy_(planes.plane_rows(run))
        if schedule.indexed is not None:
            target, source = _indexed_rows(planes, schedule.indexed)
            target.index_copy_(_BLOCKS, schedule.indexed.ids, source)


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


def _planes(layers: Sequence[LayerViews], span: Span, section: torch.Tensor) -> Iterator[_Planes]:
    integer = _INTEGERS[layers[0][0].element_size()]
    elements = section.view(integer)
    plane_start = int(elements.storage_offset())
    pool_steps = _even_steps(layers)
    for layer in layers:
        parts = [part for part in layer if part is not None]
        head_step = span.tokens * sum(part.shape[3] for part in parts)
        layer_step = span.kv_heads * head_step
        for part in parts:
            dim = part.shape[3]
            first = plane_start + span.head_start * head_step + span.token_start * dim
            view = part.view(integer)
            planes = _Planes(
                view, elements, span.pool_head_start, span.head_count, first, head_step
            )
            if pool_steps is not None:
                yield planes._replace(
                    counts=(len(layers), len(parts)),
                    pool_steps=pool_steps,
                    plane_steps=(layer_step, span.tokens * dim),
                )
                return
            yield planes
            plane_start += span.tokens * dim
        plane_start += layer_step - head_step


def _even_steps(layers: Sequence[LayerViews]) -> tuple[int, int] | None:
    """How many elements lead from a layer to the next and from K to V, where that is the same
    for all of them, and all are of one shape in one allocation; else None.
    """
    first = layers[0][0]
    parts = [part for layer in layers for part in layer if part is not None]
    storage = first.untyped_storage().data_ptr()
    if any(
        part.untyped_storage().data_ptr() != storage
        or part.shape != first.shape
        or part.stride() != first.stride()
        for part in parts
    ):
        return None
    offsets = [int(part.storage_offset()) for part in parts]
    width = len(parts) // len(layers)
    assert width * len(layers) == len(parts), "some layers have a V, some have none"
    part_step = offsets[1] - offsets[0] if width == 2 else 0
    layer_step = offsets[width] - offsets[0] if len(layers) > 1 else 0
    even = all(
        offset == offsets[0] + index // width * layer_step + index % width * part_step
        for index, offset in enumerate(offsets)
    )
    # torch's views step forwards only.
    return (layer_step, part_step) if even and min(layer_step, part_step) >= 0 else None


def _indexed_rows(planes: _Planes, indexed: _Indexed) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool's blocks and the planes': ``[layer, part, head, block, token, dim]``, or with the
    last two as one where a head's tokens of one block touch: a copy per block, not per token.
    """
    pool, plane = planes.pool_rows(indexed.pool), planes.plane_rows(indexed.plane)
    if pool.stride(4) == pool.shape[5] and pool.stride(5) == 1:
        return pool.flatten(4), plane.flatten(4)
    return pool, plane
