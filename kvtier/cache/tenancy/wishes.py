"""What callers wish for the chunks of a request: that they stay, or leave at a time of their own.

Wishes, not orders: a pin is refused where too much is pinned, and a chunk whose time is over is
still served until it has left, which is soon. Neither outlives the process.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from kvtier.cache.sequence import Sequence
from kvtier.cache.tenancy.pins import Pins
from kvtier.constants import EXPIRING_CHUNKS_MAX, RECLAIMED_CHUNKS_MAX, WISHES_LOOK_S
from kvtier.interfaces import Clock
from kvtier.types import ChunkKey, Entry


class Wishes:
    """Carries out ``Features.ttl_s`` and ``pin_s``. Used under the cache's lock.

    A time to leave belongs to chunks that requests with one have stored. It moves to the latest
    that any of them said; an access by a request without one takes it away.
    """

    def __init__(self, clock: Clock, pins: Pins, remove: Callable[[ChunkKey], bool]) -> None:
        """``remove`` lets a chunk go from every tier; False: it is in use, ask again."""
        self._clock = clock
        self._pins = pins
        self._remove = remove
        self._ends: dict[ChunkKey, tuple[float, int]] = {}  # When, and the chunk's position.
        self._heap: list[tuple[float, int, ChunkKey]] = []  # With stale items among them.

        self._next_look = 0.0

    def found(self, sequence: Sequence, keys: SequenceOf[ChunkKey]) -> None:
        """Note an access to chunks, given from the first to the last."""
        features = sequence.features
        for key in keys if self._ends else ():
            known = self._ends.get(key)
            if known is not None and not features.ttl_s:
                del self._ends[key]
            elif known is not None:
                self._expire(key, known[1], max(known[0], self._clock.now() + features.ttl_s))
        if features.pin_s:
            self._pin(sequence, keys)

    def stored(self, sequence: Sequence, entry: Entry) -> None:
        """Note that a chunk is being stored."""
        features = sequence.features
        if features.ttl_s and len(self._ends) < EXPIRING_CHUNKS_MAX:
            self._expire(entry.key, entry.position, self._clock.now() + features.ttl_s)
        else:
            self._ends.pop(entry.key, None)
        if features.pin_s:
            self._pin(sequence, [entry.key])

    def step(self) -> None:
        """Let chunks leave whose time is over, some at a time, the deepest first."""
        now = self._clock.now()
        if now >= self._next_look:
            self._next_look = now + WISHES_LOOK_S
            self._pins.drop_over()
        due: list[tuple[int, ChunkKey]] = []
        while self._heap and self._heap[0][0] <= now and len(due) < RECLAIMED_CHUNKS_MAX:
            end, position, key = heapq.heappop(self._heap)
            if self._ends.get(key) == (end, position):
                due.append((position, key))
        for position, key in sorted(due, reverse=True):
            if self._pins.keeps(key) or not self._remove(key):
                self._expire(key, position, now + WISHES_LOOK_S)
            else:
                del self._ends[key]

    def _expire(self, key: ChunkKey, position: int, end: float) -> None:
        if self._ends.get(key) == (end, position):
            return
        self._ends[key] = end, position
        if len(self._heap) > 2 * EXPIRING_CHUNKS_MAX:
            self._heap = [(when, where, each) for each, (when, where) in self._ends.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (end, position, key))

    def _pin(self, sequence: Sequence, keys: SequenceOf[ChunkKey]) -> None:
        until = self._clock.now() + sequence.features.pin_s
        for key in keys:
            if self._pins.keep(sequence, key, until) is not None:
                return
