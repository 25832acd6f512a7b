"""What a kernel moves in one go, and the table that tells it where everything lies.

A *stripe* is some columns of K's or V's rows and the fields of a section that hold them packed. A
*job* is a stripe of one layer of one shard: a row of the table. A launch runs through the jobs of
many layers and shards, so that none of them pays for a launch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvtier_kernels.rotated_format import Area

if TYPE_CHECKING:
    from kvtier_kernels.raw import Span

#: Columns of the table, in the order of the constants below, all int64. Addresses are bytes;
#: steps in the pool count elements.
JOB_FIELDS: Final = 12
POOL, BLOCK_STEP, TOKEN_STEP, HEAD_STEP, FIRST, SECOND, THIRD, BLOCKS, MEAN, PARTNER = range(10)
COSINE, SINE = 10, 11

#: A stripe's rows lie packed in at most so many fields.
AREAS_MAX: Final = 3
_ALIGN_BYTES: Final = 16

Table = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """A section: its layers, and of each of them heads, rows and the dims of K and V (if any).

    ``device`` is where kernels move it.
    """

    layers: int
    kv_heads: int
    tokens: int
    dims: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Cut:
    """Which rows of a section's fields move, and where the first of them lies in the pool.

    ``skipped`` rows of the first block come before it.
    """

    kv_heads: int
    head_start: int
    head_count: int
    row_start: int
    row_count: int
    skipped: int
    pool_head_start: int

    @staticmethod
    def of(span: Span, block_tokens: int) -> Cut:
        """The span's rows within a whole section."""
        return Cut(
            span.kv_heads,
            span.head_start,
            span.head_count,
            span.token_start,
            span.token_count,
            span.token_start % block_tokens,
            span.pool_head_start,
        )

    @staticmethod
    def alone(span: Span, block_tokens: int) -> Cut:
        """The span's rows within a section of nothing else."""
        cut = Cut.of(span, block_tokens)
        return replace(cut, kv_heads=span.head_count, head_start=0, row_start=0)


@dataclass(frozen=True, slots=True)
class Means:
    """What a centred stripe takes from K: float32 ``[layers, kv_heads, dim]`` on the device."""

    mean: torch.Tensor
    partner: torch.Tensor


@dataclass(frozen=True, slots=True)
class Stripe:
    """What one launch moves: rows of one part, by one kernel.

    ``areas`` place the fields within a section. ``rows`` is how many of a plane's rows have this
    stripe: all, or only the first ones; ``column_bytes`` is where its columns start in them.
    ``pack`` and ``unpack`` are kernels. ``arguments`` follow what every kernel takes; ``constants``
    and ``options`` go by name. ``means`` belong to the section's layers, if it is centred. ``pads``
    are bytes of the section that no stripe has; they are zero.
    """

    part: int
    areas: tuple[Area, ...]
    rows: int
    pack: Any
    unpack: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    arguments: tuple[Any, ...] = ()
    column_bytes: int = 0
    means: Means | None = None
    pads: tuple[tuple[int, int], ...] = ()

    def count(self, cut: Cut) -> int:
        """How many of the rows that move have this stripe."""
        return max(0, min(self.rows - cut.row_start, cut.row_count))


def job_rows(stripe: Stripe, views: Sequence[torch.Tensor], cut: Cut) -> Table:
    """The table's rows for one section's layers, given the pool's views of the stripe's part.

    Addresses of fields count from the section's start; blocks and turns are not filled in.
    """
    rows = np.zeros((len(views), JOB_FIELDS), np.int64)
    for layer, view in enumerate(views):
        block_step, token_step, head_step, _ = view.stride()
        address = view.data_ptr() + cut.pool_head_start * head_step * view.element_size()
        rows[layer, :FIRST] = address, block_step, token_step, head_step
        plane = layer * cut.kv_heads + cut.head_start
        for nth, area in enumerate(stripe.areas):
            first_row = plane * area.head_step + cut.row_start * area.row_bytes
            rows[layer, FIRST + nth] = area.offset + first_row
        if stripe.means is not None:
            for nth, values in ((MEAN, stripe.means.mean), (PARTNER, stripe.means.partner)):
                rows[layer, nth] = values.data_ptr() + plane * values.shape[2] * 4
    return rows


@dataclass(frozen=True, slots=True)
class PoolForm:
    """What a kernel must know of the pool's views of one part, alike in all layers.

    ``align_bytes`` divide the address of every row, 16 at the most.
    """

    block_tokens: int
    dtype: torch.dtype
    align_bytes: int

    @staticmethod
    def of(stripe: Stripe, views: Sequence[torch.Tensor]) -> PoolForm:
        """The form of the views of a stripe's part."""
        steps = [stripe.column_bytes]
        for view in views:
            steps.append(view.data_ptr())
            steps += [step * view.element_size() for step in view.stride()[:3]]
        return PoolForm(views[0].shape[1], views[0].dtype, alignment(steps))


def field_alignments(stripe: Stripe, table: Table) -> tuple[int, ...]:
    """How many bytes divide the address of every row of each field; unused ones count as 1."""
    aligned = [1] * AREAS_MAX
    for nth, area in enumerate(stripe.areas):
        starts = int(np.bitwise_or.reduce(table[:, FIRST + nth], initial=0))
        aligned[nth] = alignment([starts, area.head_step, area.row_bytes])
    return tuple(aligned)


def alignment(numbers: Sequence[int]) -> int:
    """The largest power of two up to 16 that divides all of them."""
    together = _ALIGN_BYTES
    for number in numbers:
        together |= number
    return together & -together
