"""The rotated codecs on a CPU: the reference's numbers, several times as fast.

Rows stay where they lie, instead of being turned to columns, and as all sums are exact (see
``reference``) they are taken by products of int8 matrices. What has more bits than that is cut in
two bytes side by side, ``q = low + base * high``; the matrix has a row for each, the second one
times ``base``. Butterflies that come first make it smaller, while bytes have room for their sums.
Codes below 8 bits pass through tables of all that a byte can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from kvtier_kernels.rotated.centre import Taken
from kvtier_kernels.rotated.codebooks import LEVELS, factors, run_of, signs
from kvtier_kernels.rotated.reference import (
    FIXED_PEAK,
    FLOAT16_MAX,
    factors_of,
    integer_factors,
    level_factors,
    level_places,
    reciprocal,
)
from kvtier_kernels.rotated_format import Code

#: The narrowest matrix that is worth a product.
_RUN_MIN: Final = 16
#: Butterflies stop here: a smaller matrix would save less than they cost.
_BLOCK_MIN: Final = 32
#: How many butterflies bytes have room for: 4 * 2047 / 64 < 128, and 4 * 1000 / 32 < 128.
_STAGES_MAX: Final = 2
_FIXED_BASE: Final = 64
_LEVEL_BASE: Final = 32
_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: torch's product of int8 matrices is not public; without it the reference has to do.
_product: Any = getattr(torch, "_int_mm", None)


def suits(dim: int, device: torch.device) -> bool:
    """Whether pieces of ``dim`` on ``device`` can be worked on here."""
    return device.type == "cpu" and run_of(dim) >= _RUN_MIN and is_exact(_product)


@cache
def is_exact(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None) -> bool:
    """Whether there is a product of int8 matrices, and an exact one on this machine.

    There are instructions that cut sums of two products to 16 bits.
    """
    if product is None:
        return False
    generator = torch.Generator().manual_seed(1)
    for inner, outer in ((32, 16), (128, 64), (128, 128), (256, 128), (512, 512)):
        left = torch.randint(-128, 128, (67, inner), generator=generator)
        left[0], left[1] = 127, -128
        right = torch.randint(0, 2, (inner, outer), generator=generator) * 2 - 1
        right[1::2] *= _FIXED_BASE
        right[:, 0], right[:, 1] = _FIXED_BASE, -_FIXED_BASE
        if not torch.equal(product(left.to(torch.int8), right.to(torch.int8)), left @ right):
            return False
    return True


class _Room:
    """Three times as many float32 as a block has values, by what they hold.

    Few and again the same, so that they stay in a core's cache: ``wide`` and ``sums`` are one
    memory, which is also written from one to the other, and so are ``second``, ``words`` and
    ``spare`` together, and all that ``nth_bytes`` gives.
    """

    def __init__(self, room: torch.Tensor, shape: torch.Size) -> None:
        self.shape = shape
        self.wide, self.second, self.third = room[: 3 * shape.numel()].view(3, *shape)
        self.sums = self.wide.view(torch.int32)
        self.magnitudes = self.second.view(torch.int32)
        self.words, self.spare = self.second.view(torch.int16).view(2, *shape)
        self.nth_bytes = self.second.view(torch.int8).view(4, *shape)


class RowwiseArithmetic:
    """The arithmetic on pieces of one dim and code.

    ``dim`` suits. ``room`` is float32, three for each value that is worked on together; what it
    holds is undefined after each call. For one thread at a time.
    """

    def __init__(self, dim: int, code: Code, room: torch.Tensor) -> None:
        self._dim, self._code, self._known = dim, code, factors_of(dim, code)
        self._room = room
        self._last: _Room | None = None

    def encode(
        self,
        values: torch.Tensor,
        taken: Taken | None,
        scales: torch.Tensor,
        planes: Sequence[torch.Tensor],
    ) -> None:
        """Fill scales and planes from ``values``, which stay as they are.

        Scales that are no numbers up to 65504 mark rows that cannot be stored.
        """
        room = self._room_of(values.shape)
        wide, sums = room.wide, room.sums
        wide.copy_(values)
        if taken is not None:
            values = wide.sub_(taken.offsets(room.second, room.third))
        peak = _largest(values, room)
        step = peak * (1.0 / FIXED_PEAK)
        room.words.copy_(wide.mul_(reciprocal(peak) * FIXED_PEAK).round_())
        if self._code.peak:
            self._rotate(room)
            largest = torch.abs(sums, out=room.magnitudes).amax(-1, keepdim=True).float()
            factor, found = integer_factors(largest, step, self._code.peak, self._known)
            wide.copy_(sums).mul_(factor).round_()
        else:
            square = sums.copy_(room.words).mul_(sums).sum(-1, keepdim=True, dtype=torch.int32)
            self._rotate(room)
            factor, found = level_factors(square, step, self._known)
            wide.copy_(sums).mul_(factor)
            level_places(wide, LEVELS[self._code.bits], room.second, room.third)
        scales.copy_(found)
        self._pack(room, planes)

    def decode(
        self,
        values: torch.Tensor,
        taken: Taken | None,
        scales: torch.Tensor,
        planes: Sequence[torch.Tensor],
    ) -> None:
        """Fill ``values`` from what ``encode`` made."""
        room = self._room_of(values.shape)
        wide, sums = room.wide, room.sums
        if self._code.peak:
            codes = self._integers(room, planes)
            plan = _plan(self._dim, 0, 0, back=True)
        else:
            codes, spare = self._levels(room, planes)
            plan = _plan(self._dim, _STAGES_MAX, _LEVEL_BASE, back=True)
            for half in plan.halves:
                codes, spare = _butterfly(codes, spare, 2 * half)
        self._multiply(codes, plan, sums)
        if plan.signs is not None:
            sums.mul_(plan.signs)
        wide.copy_(sums).mul_(scales.float() * self._known.back)
        if taken is not None:
            wide += taken.offsets(room.second, room.third)
        # Other dtypes hold whatever codes, scales and centres can say.
        if values.dtype == torch.float16:
            wide.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
        values.copy_(wide)

    def _room_of(self, shape: torch.Size) -> _Room:
        if self._last is None or self._last.shape != shape:
            self._last = _Room(self._room, shape)
        return self._last

    def _rotate(self, room: _Room) -> None:
        """Signs and steps 3 and 4 of the words, which are used up, into the sums."""
        plan = _plan(self._dim, _STAGES_MAX, _FIXED_BASE, back=False)
        words, spare = room.words, room.spare
        if plan.signs is not None:
            words.mul_(plan.signs)
        for half in plan.halves:
            words, spare = _butterfly(words, spare, half)
        # In each word's low byte its lowest six bits, in its high byte what is above them.
        words.add_(torch.bitwise_right_shift(words, 6, out=spare), alpha=256 - _FIXED_BASE)
        self._multiply(words.view(torch.int8), plan, room.sums)

    def _multiply(self, codes: torch.Tensor, plan: _Plan, sums: torch.Tensor) -> None:
        """The product and step 4."""
        inner, outer = plan.matrix.shape
        _product(codes.view(-1, inner), plan.matrix, out=sums.view(-1, outer))
        odd, exponent = factors(self._dim)
        if odd > 1:
            runs = sums.view(-1, odd, 1 << exponent)
            total = runs.sum(1, keepdim=True, dtype=torch.int32)
            runs.mul_(odd).sub_(total, alpha=2)

    def _pack(self, room: _Room, planes: Sequence[torch.Tensor]) -> None:
        """What is ``wide``, whole numbers, as bit planes."""
        code = self._code
        if len(planes) == 1 and code.bits == 8:
            planes[0].view(torch.int8).copy_(room.wide)
            return
        codes, *both, _ = room.nth_bytes
        codes.copy_(room.wide)
        if code.peak:
            codes += code.peak + 1
        shift = code.bits
        for plane, width in zip(planes, code.widths, strict=True):
            shift -= width
            words, spare, moved = (part.view(_WORDS[8 // width]) for part in (codes, *both))
            if len(planes) > 1:
                mask = int.from_bytes(bytes([(1 << width) - 1]) * (8 // width))
                words = torch.bitwise_right_shift(words, shift, out=spare).bitwise_and_(mask)
            # Twice as many neighbours' bits come together each time, in the lowest byte at last.
            apart = 8 - width
            while apart < 8 * (8 // width - 1):
                torch.bitwise_right_shift(words, apart, out=moved)
                words = torch.bitwise_or(words, moved, out=spare)
                apart *= 2
            plane.copy_(words)

    def _integers(self, room: _Room, planes: Sequence[torch.Tensor]) -> torch.Tensor:
        """The codes as int8."""
        codes: torch.Tensor = room.nth_bytes[0]
        spare: torch.Tensor = room.nth_bytes[1]
        if len(planes) == 1:
            return codes.copy_(planes[0].view(torch.int8))
        upper, lower = _byte_tables(self._code)
        _look_up(planes[0], upper, room, codes)
        _look_up(planes[1], lower, room, spare)
        return codes.add_(spare)

    def _levels(
        self, room: _Room, planes: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The levels of all codes, each as two bytes, and as much room beside them."""
        pairs = planes[0]
        levels, spare = room.nth_bytes.view(2, -1)
        if len(planes) == 2:
            upper, lower = _pair_tables(self._code)
            pairs, more = spare.view(torch.int16).view(2, -1)
            _look_up(planes[0], upper, room, pairs)
            _look_up(planes[1], lower, room, more)
            pairs += more
        _look_up(pairs, _level_table(self._code.bits), room, levels)
        return levels, spare


def _look_up(places: torch.Tensor, table: torch.Tensor, room: _Room, found: torch.Tensor) -> None:
    index = room.sums.flatten()[: places.numel()]
    index.view(places.shape).copy_(places)
    torch.index_select(table, 0, index, out=found.flatten().view(table.dtype))


class _Plan(NamedTuple):
    """How sums over a piece are taken: butterflies over ``halves``, then runs by the matrix.

    Signs come apart where the matrix is narrower than their pattern.
    """

    halves: tuple[int, ...]
    matrix: torch.Tensor
    signs: torch.Tensor | None


@cache
def _plan(dim: int, stages: int, base: int, *, back: bool) -> _Plan:
    """The plan for single bytes (base 0) or pairs of them. Shared: never written to."""
    block = 1 << factors(dim)[1]
    halves: list[int] = []
    while block > _BLOCK_MIN and len(halves) < stages:
        block //= 2
        halves.append(block)
    matrix = torch.ones(1, 1, dtype=torch.int32)
    pair = torch.tensor([[1, 1], [1, -1]], dtype=torch.int32)
    while matrix.shape[0] < block:
        matrix = torch.kron(pair, matrix)
    run = run_of(dim)
    pattern = torch.tensor(signs(run), dtype=torch.int32)
    apart = None
    if block >= run:
        pattern = pattern.repeat(block // run)
        matrix = matrix * pattern if back else matrix * pattern[:, None]
    else:
        apart = pattern.repeat(dim // run).to(torch.int32 if back else torch.int16)
    if base:
        matrix = torch.stack([matrix, base * matrix], 1).flatten(0, 1)
    return _Plan(tuple(halves), matrix.to(torch.int8), apart)


def _butterfly(
    source: torch.Tensor, target: torch.Tensor, half: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One stage of step 3 into ``target``; returns it and what may be overwritten next."""
    pairs, sums = source.view(-1, 2, half), target.view(-1, 2, half)
    torch.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
    torch.sub(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
    return target, source


def _largest(values: torch.Tensor, room: _Room) -> torch.Tensor:
    """Each row's largest magnitude as float32, by the order of bits: a NaN is above all."""
    magnitudes = room.magnitudes if values.dtype == torch.float32 else room.words
    bits = torch.bitwise_and(
        values.view(magnitudes.dtype), torch.iinfo(magnitudes.dtype).max, out=magnitudes
    )
    return bits.amax(-1, keepdim=True).view(values.dtype).float()


@cache
def _level_table(bits: int) -> torch.Tensor:
    """Of two codes side by side both levels, four bytes as one int32."""
    pairs = torch.arange(1 << 2 * bits)
    codes = torch.stack([pairs & ((1 << bits) - 1), pairs >> bits], 1)
    levels = torch.tensor([LEVELS[bits].level(code) for code in range(1 << bits)])[codes]
    high = (levels + _LEVEL_BASE // 2) // _LEVEL_BASE
    both = torch.stack([levels - high * _LEVEL_BASE, high], 2)
    return both.flatten(1).to(torch.int8).view(torch.int32).flatten()


@cache
def _byte_tables(code: Code) -> tuple[torch.Tensor, ...]:
    """What each plane's byte adds to integer codes, a byte each, as one word."""
    upper, lower = _plane_values(code)
    parts = upper - (code.peak + 1), lower
    return tuple(part.to(torch.int8).view(_WORDS[part.shape[1]]).flatten() for part in parts)


@cache
def _pair_tables(code: Code) -> tuple[torch.Tensor, ...]:
    """What each plane's byte adds to the places of pairs in ``_level_table``, as one word."""
    pairs = [part[:, 0::2] | part[:, 1::2] << code.bits for part in _plane_values(code)]
    return tuple(part.to(torch.int16).view(_WORDS[2 * part.shape[1]]).flatten() for part in pairs)


def _plane_values(code: Code) -> list[torch.Tensor]:
    """For each plane of two, the bits that a byte gives its codes, where they belong: [256, n]."""
    shift, values = code.bits, []
    for width in code.widths:
        shift -= width
        places = torch.arange(0, 8, width)
        values.append(((torch.arange(256)[:, None] >> places) & ((1 << width) - 1)) << shift)
    return values
