"""Free ranges against a row of bytes, each free or taken."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies

from kvtier.tiers.extents import Extents

LENGTH = 40


def free_runs(taken: list[bool]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    position = 0
    for value, group in itertools.groupby(taken):
        length = len(list(group))
        if not value:
            runs.append((position, length))
        position += length
    return runs


@given(
    steps=strategies.lists(
        strategies.tuples(
            strategies.booleans(), strategies.integers(1, 9), strategies.integers(1, 5)
        )
    )
)
def test_ranges_are_what_a_row_of_bytes_says(steps: list[tuple[bool, int, int]]) -> None:
    extents = Extents(LENGTH)
    taken = [False] * LENGTH
    ours: list[tuple[int, int]] = []
    for take, unit, count in steps:
        runs = free_runs(taken)
        if take:
            got = extents.take(unit, count)
            longest = max((length for _, length in runs), default=0)
            if got is None:
                assert longest < unit
                continue
            offset, units = got
            whole = [length for _, length in runs if length >= unit * count]
            length = dict(runs)[offset]
            assert units == min(count, longest // unit)
            assert length == (min(whole) if whole else longest)
            ours.append((offset, units * unit))
            taken[offset : offset + units * unit] = [True] * (units * unit)
        elif ours:
            offset, nbytes = ours.pop((unit * count) % len(ours))
            extents.give(offset, nbytes)
            taken[offset : offset + nbytes] = [False] * nbytes
        assert extents.spans() == free_runs(taken)
    for offset, nbytes in ours:
        extents.give(offset, nbytes)
    assert extents.spans() == [(0, LENGTH)]
