"""Free block ids as runs of consecutive ids, because attention reads a run without copying it."""

from __future__ import annotations

from collections.abc import Iterator


class FreeRuns:
    """A set of ids of ``0 .. count - 1``, kept as maximal runs; all of them are in it at first.

    Adding an id costs O(1), taking ids O(runs). Not thread-safe: one owner.
    """

    def __init__(self, count: int) -> None:
        self._end_of = {0: count} if count else {}
        self._start_of = {count: 0} if count else {}
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start in sorted(self._end_of):
            yield from range(start, self._end_of[start])

    def add(self, block_id: int) -> None:
        """Put an id back and join it to its neighbours. The caller promises that it is not held."""
        start, end = block_id, block_id + 1
        if start in self._start_of:
            start = self._start_of[start]
            del self._end_of[start], self._start_of[block_id]
        if end in self._end_of:
            last = self._end_of.pop(end)
            del self._start_of[last]
            end = last
        self._put(start, end)
        self._count += 1

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Remove ``count`` ids and return them in the order in which a sequence should use them.

        The run that follows ``after``, the sequence's last block, is used first: it lets the
        sequence grow in place. The caller promises that so many are there.
        """
        assert count <= self._count, f"{count} blocks taken of {self._count}"
        taken: list[int] = []
        if after is not None and after + 1 in self._end_of:
            taken += self._cut(after + 1, after + 1, count)
        while len(taken) < count:
            taken += self._from_a_run(count - len(taken))
        return taken

    def _from_a_run(self, count: int) -> list[int]:
        """Take from the middle of the largest run: the owner of what lies before it may grow too.

        ::

            before   [owner A]..............................
            after    [owner A]...........[new one]..........
        """
        start = max(self._end_of, key=lambda first: (self._end_of[first] - first, -first))
        spare = max(0, self._end_of[start] - start - count)
        return self._cut(start, start + spare // 2 if start else 0, count)

    def _cut(self, start: int, first: int, count: int) -> list[int]:
        """Take up to ``count`` ids from ``first`` on, out of the run that begins at ``start``."""
        end = self._end_of.pop(start)
        del self._start_of[end]
        stop = min(end, first + count)
        if start < first:
            self._put(start, first)
        if stop < end:
            self._put(stop, end)
        self._count -= stop - first
        return list(range(first, stop))

    def _put(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
