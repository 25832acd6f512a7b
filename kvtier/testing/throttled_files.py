"""A file system behind a link of so many bytes a second, shared by all who read."""

from __future__ import annotations

import math
import threading
from typing import Final

from kvtier.clock import SystemClock
from kvtier.interfaces import Clock
from kvtier.tiers.disk.files import LocalFiles

#: What passes at a time: readers take turns, and a new rate holds from the next one on.
_SLICE_BYTES: Final = 64 * 1024


class ThrottledFiles(LocalFiles):
    """Local files whose reads take at least their bytes over ``rate``. Writes are not held up."""

    def __init__(self, rate: float = math.inf, *, clock: Clock | None = None) -> None:
        """``rate`` in bytes a second; it may be set at any time."""
        self.rate = rate
        self._clock = clock or SystemClock()
        self._turn = threading.Lock()
        self._free_s = 0.0

    def read(self, path: str, offset: int, into: memoryview) -> int:
        """Read, and return no sooner than the link allows."""
        count = super().read(path, offset, into)
        for start in range(0, count, _SLICE_BYTES):
            nbytes = min(_SLICE_BYTES, count - start)
            with self._turn:
                now = self._clock.now()
                self._free_s = max(self._free_s, now) + nbytes / self.rate
                left_s = self._free_s - now
            if left_s > 0.0005:
                self._clock.sleep(left_s)
        return count
