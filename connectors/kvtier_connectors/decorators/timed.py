"""``Timed``: how often, how much, how long, and what came of it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvtier.clock import SystemClock
from kvtier.errors import ConnectorError
from kvtier.interfaces import Clock, Connector, ReadOutcome
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.decorators.base import Decorator

#: Upper ends of the latency classes in seconds: 64 us to 67 s by factors of two; slower is last.
LATENCY_BOUNDS_S: Final = tuple(2.0**exponent * 1e-6 for exponent in range(6, 27))


class Calls:
    """What was counted of one operation. Grows only; fixed size."""

    def __init__(self) -> None:
        """Start at zero."""
        self.count = 0
        self.keys = 0
        #: Payload of what succeeded.
        self.nbytes = 0
        self.seconds = 0.0
        #: "hit", "miss" or "done", or the class name of the error, for each key.
        self.outcomes: Final[Counter[str]] = Counter()
        #: Calls per latency class: those at most as slow as each bound, then the slower ones.
        self.latencies: Final = [0] * (len(LATENCY_BOUNDS_S) + 1)

    def latency_s(self, share: float) -> float:
        """Return a bound that ``share`` of the calls did not exceed; 0 before the first call.

        The upper end of a class, so at most twice the true value; ``inf`` behind the last one.
        """
        seen = 0
        for bound, count in zip((*LATENCY_BOUNDS_S, float("inf")), self.latencies, strict=True):
            seen += count
            if self.count and seen >= share * self.count:
                return bound
        return 0.0


class Timed(Decorator):
    """Counts calls, keys, bytes and outcomes, and sorts the calls by latency. Changes nothing.

    A call that is cancelled or raises is not counted. The figures are this object's own; read them
    at any time.
    """

    def __init__(self, inner: Connector, *, clock: Clock | None = None) -> None:
        """Wrap ``inner``."""
        super().__init__(inner)
        self.lookups: Final = Calls()
        self.reads: Final = Calls()
        self.writes: Final = Calls()
        self.deletes: Final = Calls()
        self._clock = clock or SystemClock()

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask, and count hits and misses."""
        start = self._clock.now()
        found = await super().contains(keys)
        self._count(self.lookups, start, ["hit" if there else "miss" for there in found])
        return found

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Read, and count hits, misses, errors and the bytes that came."""
        start = self._clock.now()
        outcomes = await super().read(requests, into)
        self._count(self.reads, start, [_name_of_read(outcome) for outcome in outcomes])
        self.reads.nbytes += sum(each for each in outcomes if isinstance(each, int))
        return outcomes

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Write, and count successes, errors and the bytes that went."""
        start = self._clock.now()
        outcomes = await super().write(items)
        names = ["done" if outcome is None else type(outcome).__name__ for outcome in outcomes]
        self._count(self.writes, start, names)
        pairs = zip(items, outcomes, strict=True)
        self.writes.nbytes += sum(item.data.nbytes for item, outcome in pairs if outcome is None)
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete, and count."""
        start = self._clock.now()
        await super().delete(keys)
        self._count(self.deletes, start, ["done" for _ in keys])

    def _count(self, calls: Calls, start: float, outcomes: Sequence[str]) -> None:
        seconds = self._clock.now() - start
        calls.count += 1
        calls.keys += len(outcomes)
        calls.seconds += seconds
        calls.outcomes.update(outcomes)
        calls.latencies[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1


def _name_of_read(outcome: ReadOutcome) -> str:
    if isinstance(outcome, ConnectorError):
        return type(outcome).__name__
    return "miss" if outcome is None else "hit"
