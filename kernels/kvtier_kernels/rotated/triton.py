"""The rotated codecs on a GPU: one pass over the pool's rows each way, bit for bit the reference.

A program takes some rows of one piece of one plane, ``[ROWS, BLOCK_DIM]`` in registers; columns
from ``DIM`` on are padding and stay zero. Runs are turned by tensor cores: what is summed up are
integers, exact in float16, whose sums are exact in float32. Fused multiply-adds are switched off at
the launch, and divisions and square roots are the IEEE ones: the rest is ``reference``'s order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kvtier_kernels.raw import LayerViews, Span
from kvtier_kernels.rotated.centre import Centre
from kvtier_kernels.rotated.codebooks import LEVELS, factors, matrix, run_of
from kvtier_kernels.rotated.fields import Packed
from kvtier_kernels.rotated.reference import FIXED_PEAK, factors_of
from kvtier_kernels.rotated_format import Format, Piece, Section
from kvtier_kernels.rows import UnrepresentableError
from kvtier_kernels.rows.triton import from_float32, to_float32
from kvtier_kernels.transfer.stripes import COSINE, MEAN, PARTNER, SINE, Means, Stripe
from kvtier_kernels.transfer.triton import field_rows, kernel_around, launch_section, place

#: Values that a program holds at a time.
_TILE_VALUES: Final = 8192
#: The fewest: Triton 3.6 gets products of smaller tiles wrong.
_TILE_VALUES_MIN: Final = 4096
#: The narrowest rows that tensor cores multiply, and the fewest of them.
_SIDE_MIN: Final = 16
#: How kernels are compiled: see above.
OPTIONS: Final = {"num_warps": 4, "enable_fp_fusion": False}
#: In each kernel's scope another one: see ``kernel_around``.
body: Any = None

_MEAN = tl.constexpr(MEAN)
_PARTNER = tl.constexpr(PARTNER)
_COSINE = tl.constexpr(COSINE)
_SINE = tl.constexpr(SINE)
_FIXED_PEAK = tl.constexpr(FIXED_PEAK)
_FIXED_STEP = tl.constexpr(1.0 / FIXED_PEAK)
# Adding and taking 1.5 * 2**23 rounds what is below 2**22 to an integer, ties to even; in between,
# that integer stands in the lower bits.
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)
# What an integer below 2**22 is put into to be 2**23 more as a float, or its half 2**22 more.
_WHOLE_BITS, _WHOLE = tl.constexpr(0x4B000000), tl.constexpr(8388608.0)
_HALF_BITS, _HALVES = tl.constexpr(0x4A800000), tl.constexpr(4194304.0)
_LARGEST_4 = tl.constexpr(LEVELS[4].largest)
_LARGEST_5 = tl.constexpr(LEVELS[5].largest)
_A_4, _B_4 = tl.constexpr(LEVELS[4].a), tl.constexpr(LEVELS[4].b)
_A_5, _B_5, _C_5 = (tl.constexpr(getattr(LEVELS[5], name)) for name in "abc")
_P0_4, _P1_4, _P2_4 = map(tl.constexpr, LEVELS[4].p)
_P0_5, _P1_5, _P2_5, _P3_5 = map(tl.constexpr, LEVELS[5].p)


def pack(
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    packed: Packed,
    centre: Centre | None,
) -> None:
    """Fill the codes and scales of the span's rows; waits for the outcome."""
    if not _run(layers, span, form, packed, centre, packs=True):
        raise UnrepresentableError("a NaN, an infinity or values too large")


def unpack(
    packed: Packed,
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    centre: Centre | None,
) -> None:
    """Write the span's rows into the pool."""
    _run(layers, span, form, packed, centre, packs=False)


def _run(
    layers: Sequence[LayerViews],
    span: Span,
    form: Format,
    packed: Packed,
    centre: Centre | None,
    *,
    packs: bool,
) -> bool:
    """Move the span's rows, and tell whether all could be packed: waits for that outcome."""
    device = packed.data.device
    failed = torch.zeros(1, dtype=torch.int32, device=device)
    means = Means(centre.mean, centre.partner) if centre else None
    turns = (centre.cos, centre.sin) if centre else None
    for stripe in stripes(form, packed.section, span.token_count, device, means):
        views = [view for layer in layers if (view := layer[stripe.part]) is not None]
        launch_section(stripe, views, span, packed.data, failed, packs=packs, turns=turns)
    return not packs or not failed.item()


def stripes(
    form: Format, section: Section, tokens: int, device: torch.device, means: Means | None
) -> list[Stripe]:
    """One stripe for each piece; the sink tokens beside them are rows as they are."""
    made: list[Stripe] = []
    for index, piece in enumerate(form.pieces):
        centred = means is not None and piece.part == 0
        stripe = Stripe(
            part=piece.part,
            areas=(*section.codes[index], section.scales[index]),
            rows=tokens,
            pack=kernel_around(_rotated_kernel, pack_rows),
            unpack=kernel_around(_rotated_kernel, unpack_rows),
            constants=constants(piece, tokens) | {"CENTRED": centred, "STAGES": 1},
            options=OPTIONS,
            arguments=(matrix(piece.dim, device), form.part_dims[piece.part]),
            column_bytes=piece.start * form.element_bytes,
            means=means if centred else None,
        )
        made.append(stripe)
    return made


def constants(piece: Piece, tokens: int) -> dict[str, Any]:
    """What the kernels are specialized for, by a piece and the number of its rows."""
    code, run = piece.code, run_of(piece.dim)
    odd, exponent = factors(piece.dim)
    block_dim = max(_SIDE_MIN, triton.next_power_of_2(piece.dim))
    few = max(_TILE_VALUES_MIN // block_dim, triton.next_power_of_2(tokens))
    known = factors_of(piece.dim, code)
    return {
        "START": piece.start,
        "DIM": piece.dim,
        "BLOCK_DIM": block_dim,
        "ROWS": max(_SIDE_MIN, min(_TILE_VALUES // block_dim, few)),
        "RUN": run,
        "SIDE": max(_SIDE_MIN, run),
        "HALVINGS": exponent - (run.bit_length() - 1),
        "ODD": odd,
        "PEAK": code.peak,
        "HALF": 0 if code.peak else 1 << (code.bits - 1),
        "TO_CODE": known.there if code.peak else known.to_deviations,
        "TO_SCALE": known.there / code.peak if code.peak else known.to_scale,
        "BACK": known.back,
        "FIRST_BITS": code.widths[0],
        "SECOND_BITS": code.widths[1] if len(code.widths) > 1 else 0,
    }


@triton.jit
def _turn(
    values, matrix, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, SIDE: tl.constexpr,
    HALVINGS: tl.constexpr, RUN: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    """Integers ``[ROWS, BLOCK_DIM]`` times the matrix, run by run, and then mixed across runs."""
    runs = tl.reshape(values.to(tl.float16), (ROWS * BLOCK_DIM // SIDE, SIDE))
    values = tl.reshape(tl.dot(runs, matrix), (ROWS, BLOCK_DIM))
    for stage in tl.static_range(HALVINGS):
        pairs = tl.reshape(values, (ROWS, BLOCK_DIM // (RUN << (stage + 1)), 2, RUN << stage))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        joined = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
        values = tl.reshape(joined, (ROWS, BLOCK_DIM))
    if ODD > 1:
        parts = tl.reshape(values, (ROWS, BLOCK_DIM // RUN, RUN))
        total = tl.sum(parts, axis=1)
        values = tl.reshape(parts * ODD - (total * 2)[:, None, :], (ROWS, BLOCK_DIM))
    return values


@triton.jit
def _reciprocal(values):
    """1 / values, 0 for zero and where it would be infinite."""
    inverse = tl.div_rn(1.0, tl.where(values == 0, 1.0, values))
    return tl.where((values == 0) | (inverse == float("inf")), 0.0, inverse)


@triton.jit
def _join_bits(codes, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes ``[ROWS, BLOCK_DIM * WIDTH / 8]`` of codes, the earlier ones in the lower bits."""
    for step in tl.static_range(3):
        if WIDTH << step < 8:
            low, high = tl.split(tl.reshape(codes, (ROWS, BLOCK_DIM >> (step + 1), 2)))
            codes = low | (high << (WIDTH << step))
    return codes.to(tl.uint8)


@triton.jit
def _split_bits(joined, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of ``_join_bits``, as int32."""
    codes = joined.to(tl.int32)
    for step in tl.static_range(3):
        if (4 >> step) >= WIDTH:
            low, high = codes & ((1 << (4 >> step)) - 1), codes >> (4 >> step)
            codes = tl.reshape(tl.join(low, high), (ROWS, (BLOCK_DIM * WIDTH // 4) << step))
    return codes


@triton.jit
def _offsets(
    mean, partner, cosine, sine, row, column, wanted, part_dim, START: tl.constexpr
):  # fmt: skip
    """What the centre takes from the rows: ``mean * cos + partner * sin``."""
    columns = START + column
    inside = columns < part_dim
    turn = row.to(tl.int64)[:, None] * part_dim + columns
    turned = tl.load(mean + columns, mask=inside, other=0.0)
    turned = turned * tl.load(cosine + turn, mask=wanted, other=0.0).to(tl.float32)
    crossed = tl.load(partner + columns, mask=inside, other=0.0)
    crossed = crossed * tl.load(sine + turn, mask=wanted, other=0.0).to(tl.float32)
    return turned + crossed


@triton.jit
def _level_codes(places, HALF: tl.constexpr):
    """The codes of values in standard deviations, in the lower bits of what is returned."""
    if HALF == 8:
        places = tl.minimum(tl.maximum(places, -_LARGEST_4), _LARGEST_4)
        slope = _A_4 - places * places * _B_4
    else:
        places = tl.minimum(tl.maximum(places, -_LARGEST_5), _LARGEST_5)
        square = places * places
        slope = _A_5 - square * (_B_5 - square * _C_5)
    return (places * slope + (HALF - 0.5) + _ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def _levels(codes, HALF: tl.constexpr):
    """The levels of codes. No step's rounding matters, so these multiply-adds may be fused."""
    place = (codes * 2 | _HALF_BITS).to(tl.float32, bitcast=True) - (_HALVES + HALF - 0.5)
    square = place * place
    if HALF == 8:
        slope = tl.fma(tl.fma(square, _P2_4, _P1_4), square, _P0_4)
    else:
        slope = tl.fma(tl.fma(tl.fma(square, _P3_5, _P2_5), square, _P1_5), square, _P0_5)
    return tl.fma(place, slope, _ROUNDER) - _ROUNDER


@triton.jit
def pack_rows(
    rows, live, row, first, second, scales, failed, matrix, mean, partner, cosine, sine, part_dim,
    CENTRED: tl.constexpr, DTYPE: tl.constexpr,
    START: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, SIDE: tl.constexpr, HALVINGS: tl.constexpr, ODD: tl.constexpr,
    PEAK: tl.constexpr, HALF: tl.constexpr, TO_CODE: tl.constexpr, TO_SCALE: tl.constexpr,
    BACK: tl.constexpr, FIRST_BITS: tl.constexpr, SECOND_BITS: tl.constexpr,
):  # fmt: skip
    """Quantise ROWS rows; set ``failed`` where one cannot be stored."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    inside = column < DIM
    wanted = live[:, None] & inside
    values = to_float32(tl.load(rows + START + column, mask=wanted, other=0), DTYPE)
    if CENTRED:
        values -= _offsets(mean, partner, cosine, sine, row, column, wanted, part_dim, START)
        values = tl.where(wanted, values, 0.0)
    # As integers, NaN is larger than infinity and every number.
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    peak = bits.to(tl.float32, bitcast=True)
    step = peak * _FIXED_STEP
    shifted = values * (_reciprocal(peak) * _FIXED_PEAK)[:, None] + _ROUNDER
    turned = _turn(shifted - _ROUNDER, matrix, ROWS, BLOCK_DIM, SIDE, HALVINGS, RUN, ODD)
    if HALF:
        whole = shifted.to(tl.int32, bitcast=True) - _ROUNDER_BITS
        square = tl.maximum(tl.sum(whole * whole, axis=1), 1)
        root = tl.sqrt_rn(square.to(tl.float32))
        scale = root * TO_SCALE * step
        deviations = tl.div_rn(1.0, root) * TO_CODE
        codes = _level_codes(turned * deviations[:, None], HALF)
        scale = scale.to(tl.float16)
    else:
        if BLOCK_DIM > DIM:
            turned = tl.where(inside, turned, 0.0)
        largest = tl.max(turned.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        largest = largest.to(tl.float32, bitcast=True)
        scale = (largest * TO_SCALE * step).to(tl.float16)
        factor = step * TO_CODE * _reciprocal(scale.to(tl.float32))
        factor = tl.minimum(factor, _reciprocal(largest) * PEAK)
        codes = (turned * factor[:, None] + _ROUNDER).to(tl.int32, bitcast=True)
        if FIRST_BITS < 8:
            codes += PEAK + 1
    scale_bits = scale.to(tl.int16, bitcast=True)
    bad = (scale_bits & 0x7FFF) >= 0x7C00
    tl.store(failed, 1, mask=tl.max(bad.to(tl.int32), axis=0) > 0)
    tl.store(scales.to(tl.pointer_type(tl.int16)), scale_bits, mask=live)
    codes = codes & ((1 << (FIRST_BITS + SECOND_BITS)) - 1)
    if BLOCK_DIM > DIM:
        codes = tl.where(inside, codes, 0)
    used: tl.constexpr = (DIM * FIRST_BITS + 7) // 8
    byte = tl.arange(0, BLOCK_DIM * FIRST_BITS // 8)[None, :]
    upper = _join_bits(codes >> SECOND_BITS, ROWS, BLOCK_DIM, FIRST_BITS)
    tl.store(first[:, None] + byte, upper, mask=live[:, None] & (byte < used))
    if SECOND_BITS:
        rest: tl.constexpr = (DIM * SECOND_BITS + 7) // 8
        byte = tl.arange(0, BLOCK_DIM * SECOND_BITS // 8)[None, :]
        lower = _join_bits(codes & ((1 << SECOND_BITS) - 1), ROWS, BLOCK_DIM, SECOND_BITS)
        tl.store(second[:, None] + byte, lower, mask=live[:, None] & (byte < rest))


@triton.jit
def unpack_rows(
    rows, live, row, first, second, scales, failed, matrix, mean, partner, cosine, sine, part_dim,
    CENTRED: tl.constexpr, DTYPE: tl.constexpr,
    START: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, SIDE: tl.constexpr, HALVINGS: tl.constexpr, ODD: tl.constexpr,
    PEAK: tl.constexpr, HALF: tl.constexpr, TO_CODE: tl.constexpr, TO_SCALE: tl.constexpr,
    BACK: tl.constexpr, FIRST_BITS: tl.constexpr, SECOND_BITS: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows into the pool; arguments as ``pack_rows``."""
    column = tl.arange(0, BLOCK_DIM)[None, :]
    inside = column < DIM
    wanted = live[:, None] & inside
    used: tl.constexpr = (DIM * FIRST_BITS + 7) // 8
    byte = tl.arange(0, BLOCK_DIM * FIRST_BITS // 8)[None, :]
    upper = tl.load(first[:, None] + byte, mask=live[:, None] & (byte < used), other=0)
    codes = _split_bits(upper, ROWS, BLOCK_DIM, FIRST_BITS)
    if SECOND_BITS:
        rest: tl.constexpr = (DIM * SECOND_BITS + 7) // 8
        byte = tl.arange(0, BLOCK_DIM * SECOND_BITS // 8)[None, :]
        lower = tl.load(second[:, None] + byte, mask=live[:, None] & (byte < rest), other=0)
        codes = (codes << SECOND_BITS) | _split_bits(lower, ROWS, BLOCK_DIM, SECOND_BITS)
    if HALF:
        values = _levels(codes, HALF)
    elif FIRST_BITS == 8:
        values = ((codes ^ 128) | _WHOLE_BITS).to(tl.float32, bitcast=True) - (_WHOLE + 128)
    else:
        values = (codes | _WHOLE_BITS).to(tl.float32, bitcast=True) - (_WHOLE + PEAK + 1)
    if BLOCK_DIM > DIM:
        values = tl.where(inside, values, 0.0)
    scale = tl.load(scales.to(tl.pointer_type(tl.int16)), mask=live, other=0)
    scale = scale.to(tl.float16, bitcast=True).to(tl.float32) * BACK
    # Signs come after the butterflies: the matrix, which has them before, turned over.
    values = _turn(values, tl.trans(matrix), ROWS, BLOCK_DIM, SIDE, HALVINGS, RUN, ODD)
    values = values * scale[:, None]
    if CENTRED:
        values += _offsets(mean, partner, cosine, sine, row, column, wanted, part_dim, START)
    if DTYPE == "float16":
        values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    tl.store(rows + START + column, from_float32(values, DTYPE), mask=wanted)


def _rotated_kernel(
    jobs, blocks, failed, total, tiles, heads, tokens, skipped, block_tokens,
    first_head, first_bytes, second_head, second_bytes, third_head, third_bytes, matrix, part_dim,
    STAGES: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr,
    ALIGN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    CENTRED: tl.constexpr,
    START: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, SIDE: tl.constexpr, HALVINGS: tl.constexpr, ODD: tl.constexpr,
    PEAK: tl.constexpr, HALF: tl.constexpr, TO_CODE: tl.constexpr, TO_SCALE: tl.constexpr,
    BACK: tl.constexpr, FIRST_BITS: tl.constexpr, SECOND_BITS: tl.constexpr,
):  # fmt: skip
    """Pack or unpack one piece of all jobs' rows by ``body``."""
    side = tl.arange(0, SIDE)
    loaded = tl.load(matrix + side[:, None] * SIDE + side[None, :])
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        job, head, row, live, rows = place(
            jobs, blocks, tile, tiles, heads, tokens, skipped, block_tokens, ROWS, ELEMENT, ALIGN
        )
        first = field_rows(job, head, row, first_head, first_bytes, 0, FIRST)
        second = first
        scales = field_rows(job, head, row, second_head, second_bytes, 1, SECOND)
        if SECOND_BITS:
            second = scales
            scales = field_rows(job, head, row, third_head, third_bytes, 2, THIRD)
        floats: tl.constexpr = tl.pointer_type(tl.float32)
        halves: tl.constexpr = tl.pointer_type(tl.float16)
        # Rows of other dims begin anywhere, but are read value by value.
        mean = tl.multiple_of(tl.load(job + _MEAN).to(floats), 16) + head * part_dim
        partner = tl.multiple_of(tl.load(job + _PARTNER).to(floats), 16) + head * part_dim
        cosine = tl.multiple_of(tl.load(job + _COSINE).to(halves), 16)
        sine = tl.multiple_of(tl.load(job + _SINE).to(halves), 16)
        body(
            rows, live, row, first, second, scales, failed,
            loaded, mean, partner, cosine, sine, part_dim,
            CENTRED, DTYPE, START, DIM, BLOCK_DIM, ROWS, RUN, SIDE, HALVINGS, ODD,
            PEAK, HALF, TO_CODE, TO_SCALE, BACK, FIRST_BITS, SECOND_BITS,
        )  # fmt: skip
