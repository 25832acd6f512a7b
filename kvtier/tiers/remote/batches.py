"""What goes into one call of a connector. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.constants import REMOTE_ASK_CHUNKS_MAX, REMOTE_ASK_CHUNKS_MIN


def ask_count(found: int) -> int:
    """Return how many chunks of a sequence to ask for, so many of which have been found.

    Few at first, then as many as were there: a long prefix takes a few questions, one that is not
    there costs little.
    """
    return max(REMOTE_ASK_CHUNKS_MIN, min(found, REMOTE_ASK_CHUNKS_MAX))


def batch_count(sizes: Sequence[int], *, items_max: int, bytes_max: int) -> int:
    """Return how many of the first items go into one batch: at least one, if there is one."""
    total = 0
    for count, nbytes in enumerate(sizes[:items_max]):
        total += nbytes
        if count and total > bytes_max:
            return count
    return min(len(sizes), items_max)
