"""Memory that is used again, and how much of it is kept."""

from __future__ import annotations

from kvtier.constants import HUGE_PAGE_BYTES, SCRATCH_BUFFERS_KEPT
from kvtier.tiers.scratch import Scratch


def test_a_buffer_is_large_enough_and_used_again() -> None:
    scratch = Scratch()
    with scratch.lent(HUGE_PAGE_BYTES + 1) as buffer:
        assert len(buffer) >= HUGE_PAGE_BYTES + 1
        assert scratch.idle_bytes == 0
        buffer[-1] = 7
    assert scratch.idle_bytes == len(buffer)
    with scratch.lent(1) as again:
        assert again[len(buffer) - 1] == 7, "the same"
    with scratch.lent(len(buffer) + 1) as larger:
        assert len(larger) > len(buffer)


def test_two_users_never_have_the_same_buffer() -> None:
    scratch = Scratch()
    with scratch.lent(10) as one, scratch.lent(10) as other:
        one[0], other[0] = 1, 2
        assert (one[0], other[0]) == (1, 2)


def test_only_so_many_are_kept_and_the_largest_ones() -> None:
    scratch = Scratch()
    buffers = [scratch.take(nth * HUGE_PAGE_BYTES) for nth in range(1, SCRATCH_BUFFERS_KEPT + 3)]
    for buffer in buffers:
        scratch.give(buffer)
    kept = sorted(map(len, buffers))[-SCRATCH_BUFFERS_KEPT:]
    assert scratch.idle_bytes == sum(kept)
