"""Bringing up what a queued request will load, before it has blocks: disk and remotes to DRAM.

What it has brought counts as a hit of the tier it lay in, for the request that it was brought for.
A prefetch is a hope: it takes a share of DRAM at most, pins nothing that has come, and ends at the
first chunk that does not come. The load does all again that was lost meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtier.cache.below.below import Below
from kvtier.cache.below.fill import Fill
from kvtier.cache.match import Ready
from kvtier.cache.tenancy.roots import Roots
from kvtier.constants import PREFETCH_CHUNKS_INFLIGHT_MAX, PREFETCHES_MAX
from kvtier.interfaces import Clock
from kvtier.tiers.dram import DramTier


@dataclass(slots=True, eq=False)
class _Prefetch:
    """One request's. ``left`` gives its chunks that are still to be begun."""

    match: Ready
    deadline: float
    left: Iterator[int]
    room_bytes: int
    coming: list[Fill] = field(default_factory=list)

    def end(self) -> None:
        for fill in self.coming:
            fill.leave()
        self.coming.clear()
        self.left = iter(())


class Prefetcher:
    """Owns the prefetches under way, a bounded number. Used under the cache's lock."""

    def __init__(
        self, dram: DramTier, below: Below, roots: Roots, clock: Clock, room_bytes: int
    ) -> None:
        """One prefetch takes ``room_bytes`` of DRAM at most; 0: nothing is brought up early."""
        self._dram = dram
        self._below = below
        self._room_bytes = room_bytes
        self._roots = roots
        self._clock = clock
        self._active: list[_Prefetch] = []
        self._pumping = False

    def begin(self, match: Ready, start_token: int, deadline: float) -> bool:
        """Begin to bring a match up; False: there are too many, or nothing is to be done."""
        chunks = [
            chunk
            for chunk in range(start_token // match.sequence.chunk_tokens, len(match.hits))
            if self._dram.index.get(match.hits[chunk].key) is None
        ]
        if not chunks or not self._room_bytes or len(self._active) >= PREFETCHES_MAX:
            return False
        self._active.append(_Prefetch(match, deadline, iter(chunks), self._room_bytes))
        self.pump()
        return True

    def pump(self) -> None:
        """Go on with all of them, in turn, as far as possible without waiting."""
        if self._pumping:
            return
        self._pumping = True
        try:
            for prefetch in self._active:
                self._go_on(prefetch)
            self._active = [prefetch for prefetch in self._active if prefetch.coming]
        finally:
            self._pumping = False

    def end(self) -> None:
        """Begin nothing more."""
        for prefetch in self._active:
            prefetch.end()
        self._active.clear()

    def _go_on(self, prefetch: _Prefetch) -> None:
        running = self._below.filler.running
        ended = [fill for fill in prefetch.coming if not running(fill.record.entry.key)]
        for fill in ended:
            fill.leave()
            prefetch.coming.remove(fill)
            if fill.failure is None:
                origin = fill.source.origin
                prefetch.match.sequence.prefetched[origin.position] = origin.tier
        stale = not self._roots.current(prefetch.match.sequence)
        overdue = self._clock.now() >= prefetch.deadline
        if stale or overdue or any(fill.failure is not None for fill in ended):
            prefetch.end()
        while len(prefetch.coming) < PREFETCH_CHUNKS_INFLIGHT_MAX:
            chunk = next(prefetch.left, None)
            if chunk is None or not self._begin(prefetch, chunk):
                prefetch.left = iter(())
                return

    def _begin(self, prefetch: _Prefetch, chunk: int) -> bool:
        """Begin to bring a chunk up, unless it is there or coming; False: no more of this one."""
        sequence, filler = prefetch.match.sequence, self._below.filler
        key = sequence.chunk_keys[chunk]
        if self._dram.index.get(key) is not None:
            return True
        source = self._below.find(sequence, chunk)
        if source is None:
            return False
        prefetch.room_bytes -= self._below.nbytes(source, sequence.layout)
        if prefetch.room_bytes < 0:
            return False
        fill = filler.start(source, sequence.layout, prefetch.deadline)
        if fill is not None:
            prefetch.coming.append(fill)
        return fill is not None
