"""How much may be written in a day, whatever an admission thinks is worth it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvtier.errors import ConfigError
from kvtier.interfaces import AdmissionPolicy
from kvtier.types import ChunkKey, Entry, Features

DAY_S: Final = 86_400.0
#: A budget that was not used up gathers for this long, and begins with as much.
BURST_S: Final = 600.0
#: Chunks remembered that were worth a write when the budget was spent.
WAITING_MAX: Final = 65_536


class WriteBudget:
    """A token bucket. Pure: time comes with the call; one that runs back counts as no time.

    In any window of 24 hours at most ``bytes_per_day`` are granted, and a burst on top: their share
    of ten minutes, or the largest chunk granted if that is larger.
    """

    def __init__(self, bytes_per_day: int) -> None:
        """Begin with a full burst. Raises ``ConfigError`` unless ``bytes_per_day`` is above 0."""
        if bytes_per_day <= 0:
            raise ConfigError(f"write budget is {bytes_per_day}; it must be above 0 bytes a day")
        self._bytes_per_day = bytes_per_day
        self._burst_bytes = bytes_per_day * BURST_S / DAY_S
        self._level_bytes = self._burst_bytes
        self._filled_at: float | None = None

    def take(self, nbytes: int, now: float) -> bool:
        """Grant ``nbytes``, or refuse and change nothing.

        A chunk larger than the burst is granted by a full bucket and paid off before the next. One
        larger than a day's bytes is never granted.
        """
        if self._filled_at is None:
            self._filled_at = now
        elapsed_s = max(0.0, now - self._filled_at)
        self._filled_at += elapsed_s
        gained = elapsed_s * self._bytes_per_day / DAY_S
        self._level_bytes = min(self._burst_bytes, self._level_bytes + gained)
        if nbytes > self._bytes_per_day or self._level_bytes < min(nbytes, self._burst_bytes):
            return False
        self._level_bytes -= nbytes
        return True


class Budgeted:
    """An ``AdmissionPolicy`` that writes what another one wants, as far as a budget goes.

    What was wanted when the budget was spent is remembered (the ``WAITING_MAX`` latest), so it is
    not judged anew: the inner admission takes it for written, is told of each further offer as of a
    touch, and the budget alone decides. A child waits for its parent.
    """

    def __init__(self, inner: AdmissionPolicy, budget: WriteBudget) -> None:
        self._inner = inner
        self._budget = budget
        self._waiting: OrderedDict[ChunkKey, None] = OrderedDict()

    @property
    def waiting_count(self) -> int:
        """Chunks that are worth a write and wait for the budget."""
        return len(self._waiting)

    def offer(self, entry: Entry, now: float) -> bool:
        """See ``AdmissionPolicy.offer``."""
        if entry.key in self._waiting:
            self._inner.touch(entry.key, now, entry.features)
        elif not self._inner.offer(entry, now):
            return False
        if entry.parent not in self._waiting and self._budget.take(entry.nbytes, now):
            self._waiting.pop(entry.key, None)
            return True
        self._waiting[entry.key] = None
        self._waiting.move_to_end(entry.key)
        if len(self._waiting) > WAITING_MAX:
            oldest, _ = self._waiting.popitem(last=False)
            self._inner.left(oldest, now)
        return False

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        """See ``AdmissionPolicy.touch``."""
        self._waiting.pop(key, None)
        self._inner.touch(key, now, features)

    def left(self, key: ChunkKey, now: float) -> None:
        """See ``AdmissionPolicy.left``."""
        self._waiting.pop(key, None)
        self._inner.left(key, now)
