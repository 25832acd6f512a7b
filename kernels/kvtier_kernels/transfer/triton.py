"""The kernels' frame: a few programs that run through all jobs of a launch.

::

    tile    = (job * heads + head) * tiles + nth      ROWS rows of one plane's stripe
    program = 0 .. programs - 1, takes tiles program, program + programs, ...

Jobs come in the order of the table, so the first layers are done first. How many programs there
are bounds how many multiprocessors a transfer takes from the model. Rows lie in a pool and in
fields wherever the addresses of the table say: in the device's memory or in page-locked memory of
the host, which kernels reach at the same address.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier_kernels.raw import Span
from kvtier_kernels.transfer.stripes import (
    AREAS_MAX,
    BLOCK_STEP,
    BLOCKS,
    COSINE,
    FIRST,
    HEAD_STEP,
    JOB_FIELDS,
    POOL,
    SINE,
    TOKEN_STEP,
    Cut,
    PoolForm,
    Stripe,
    field_alignments,
    job_rows,
)

#: As many programs as there are tiles.
UNLIMITED: Final = 2**30

#: What differs from launch to launch: one compiled kernel for all of its values.
_VARYING: Final = ("total", "tiles", "heads", "tokens", "skipped")

_ELEMENTS: Final = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

_JOB_FIELDS = tl.constexpr(JOB_FIELDS)
_POOL = tl.constexpr(POOL)
_BLOCK_STEP = tl.constexpr(BLOCK_STEP)
_TOKEN_STEP = tl.constexpr(TOKEN_STEP)
_HEAD_STEP = tl.constexpr(HEAD_STEP)
_FIRST = tl.constexpr(FIRST)
_BLOCKS = tl.constexpr(BLOCKS)

#: In each kernel's scope another one: see ``kernel_around``.
body: Any = None


def launch(
    stripe: Stripe,
    form: PoolForm,
    cut: Cut,
    jobs: tuple[torch.Tensor, tuple[int, ...]],
    blocks: torch.Tensor,
    failed: torch.Tensor,
    *,
    packs: bool,
    programs: int = UNLIMITED,
) -> None:
    """Run one stripe's kernel over ``jobs``: a table on the device, its fields' alignments.

    ``form`` is that of the stripe's part in all layers of the table. ``blocks`` (int64) are the
    block ids that the table's entries point into; ``failed`` (int32) is set to 1 by a kernel that
    cannot pack.
    """
    table, (first, second, third) = jobs
    rows = stripe.constants["ROWS"]
    tokens = stripe.count(cut)
    tiles = triton.cdiv(tokens, rows)
    total = len(table) * cut.head_count * tiles
    if not total:
        return
    steps = [step for area in stripe.areas for step in (area.head_step, area.row_bytes)]
    steps += [0] * (2 * AREAS_MAX - len(steps))
    kernel = stripe.pack if packs else stripe.unpack
    kernel[(min(programs, total),)](
        table,
        blocks,
        failed,
        total,
        tiles,
        cut.head_count,
        tokens,
        cut.skipped,
        form.block_tokens,
        *steps,
        *stripe.arguments,
        ELEMENT=_ELEMENTS[form.dtype.itemsize],
        DTYPE=str(form.dtype).removeprefix("torch."),
        ALIGN=form.align_bytes,
        FIRST=first,
        SECOND=second,
        THIRD=third,
        **stripe.constants,
        **stripe.options,
    )


def launch_section(
    stripe: Stripe,
    views: Sequence[torch.Tensor],
    span: Span,
    section: torch.Tensor,
    failed: torch.Tensor,
    *,
    packs: bool,
    turns: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Run one stripe's kernel over the layers of one section, which has the span's rows alone.

    ``section`` (uint8, flat) lies on the pool's device, as ``turns`` do: the cosines and sines of
    those rows, for a centred stripe.
    """
    cut = Cut.alone(span, views[0].shape[1])
    table = job_rows(stripe, views, cut)
    table[:, FIRST : FIRST + AREAS_MAX] += section.data_ptr()
    if turns is not None:
        table[:, COSINE], table[:, SINE] = (turn.data_ptr() for turn in turns)
    both = np.concatenate([table.reshape(-1), np.array(span.block_ids, np.int64)])
    moved = torch.from_numpy(both).to(section.device)
    form = PoolForm.of(stripe, views)
    on_device = moved[: table.size].view(table.shape)
    jobs = on_device, field_alignments(stripe, table)
    launch(stripe, form, cut, jobs, moved[table.size :], failed, packs=packs)


@triton.jit
def place(
    jobs, blocks, tile, tiles, heads, tokens, skipped, block_tokens,
    ROWS: tl.constexpr, ELEMENT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A tile's job, head and rows, which of these are there, and pointers ``[ROWS, 1]`` to them."""
    job = jobs + (tile // (tiles * heads)).to(tl.int64) * _JOB_FIELDS
    head = ((tile // tiles) % heads).to(tl.int64)
    row = (tile % tiles) * ROWS + tl.arange(0, ROWS)
    live = row < tokens
    token = skipped + row
    names = blocks + tl.load(job + _BLOCKS)
    block = tl.load(names + token // block_tokens, mask=live, other=0)
    offset = block * tl.load(job + _BLOCK_STEP) + head * tl.load(job + _HEAD_STEP)
    offset += (token % block_tokens).to(tl.int64) * tl.load(job + _TOKEN_STEP)
    rows = tl.load(job + _POOL).to(tl.pointer_type(ELEMENT)) + offset
    return job, head, row, live, tl.multiple_of(rows[:, None], (ALIGN, ALIGN))


@triton.jit
def field_rows(
    job, head, row, head_step, row_bytes, NTH: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Pointers ``[ROWS]`` to the rows' bytes in a field."""
    start = tl.load(job + _FIRST + NTH) + head * head_step
    rows = (start + row.to(tl.int64) * row_bytes).to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(rows, (ALIGN,))


@cache
def kernel_around(function: Any, body: Any) -> Any:
    """A kernel as ``function`` says, whose ``body`` is this one.

    A global of its own, not one of its constants: engines have Triton tell what it compiles, and
    Triton writes constants down as JSON, which has no functions.
    """
    scope = {**function.__globals__, "body": body}
    made = FunctionType(function.__code__, scope, function.__name__)
    made.__annotations__ = function.__annotations__
    return triton.jit(made, do_not_specialize=_VARYING)


def row_kernel(body: Any) -> Any:
    """The kernel that moves rows by ``body``.

    It is given pointers to rows of the pool, which of them are there, three fields, constants.
    """
    return kernel_around(_row_kernel, body)


def _row_kernel(
    jobs, blocks, failed, total, tiles, heads, tokens, skipped, block_tokens,
    first_head, first_bytes, second_head, second_bytes, third_head, third_bytes,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    ELEMENT: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        job, head, row, live, rows = place(
            jobs, blocks, tile, tiles, heads, tokens, skipped, block_tokens, ROWS, ELEMENT, ALIGN
        )
        first = field_rows(job, head, row, first_head, first_bytes, 0, FIRST)
        second = field_rows(job, head, row, second_head, second_bytes, 1, SECOND)
        third = field_rows(job, head, row, third_head, third_bytes, 2, THIRD)
        body(rows, live, first, second, third, failed, DIM, BLOCK_DIM, ROWS, DTYPE)
