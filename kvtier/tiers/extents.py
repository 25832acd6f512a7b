"""The parts of an arena that no slab covers: found by length, joined with their neighbours."""

from __future__ import annotations

import bisect


class Extents:
    """Free ranges of ``capacity_bytes``, none of which touches another. Not thread-safe.

    ``take`` and ``give`` search by bisection; moving a list's tail is a matter of microseconds
    at the tens of thousands of ranges that an arena has at most.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._by_length = [(capacity_bytes, 0)]  # (nbytes, offset), sorted
        self._length_at = {0: capacity_bytes}
        self._start_of_end = {capacity_bytes: 0}

    def spans(self) -> list[tuple[int, int]]:
        """Return all as (offset, nbytes), by offset."""
        return sorted(self._length_at.items())

    def hold(self, nbytes: int) -> bool:
        """Tell whether a range is as long."""
        return bool(self._by_length) and self._by_length[-1][0] >= nbytes

    def take(self, unit: int, count: int) -> tuple[int, int] | None:
        """Cut ``count`` units from the shortest range that has them, or what the longest has.

        Returns the offset and how many units there are, at least one; None when no range holds
        a single unit.
        """
        place = bisect.bisect_left(self._by_length, (unit * count, 0))
        if place == len(self._by_length):
            place -= 1
        if place < 0 or self._by_length[place][0] < unit:
            return None
        nbytes, offset = self._by_length[place]
        taken = min(count, nbytes // unit)
        self._remove(offset)
        if nbytes > taken * unit:
            self._add(offset + taken * unit, nbytes - taken * unit)
        return offset, taken

    def give(self, offset: int, nbytes: int) -> None:
        """Return a range that was taken; it joins the free ranges on both sides."""
        end = offset + nbytes
        if (before := self._start_of_end.get(offset)) is not None:
            self._remove(before)
            offset = before
        if (after := self._length_at.get(end)) is not None:
            self._remove(end)
            end += after
        self._add(offset, end - offset)

    def _add(self, offset: int, nbytes: int) -> None:
        bisect.insort(self._by_length, (nbytes, offset))
        self._length_at[offset] = nbytes
        self._start_of_end[offset + nbytes] = offset

    def _remove(self, offset: int) -> None:
        nbytes = self._length_at.pop(offset)
        del self._start_of_end[offset + nbytes]
        del self._by_length[bisect.bisect_left(self._by_length, (nbytes, offset))]
