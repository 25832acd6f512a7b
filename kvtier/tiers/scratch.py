"""Memory for bytes that pass through: aligned for direct I/O, and used again.

A fresh page costs microseconds, and direct I/O into small pages is slow: buffers are kept.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.constants import HUGE_PAGE_BYTES, SCRATCH_BUFFERS_KEPT


class Scratch:
    """Hands out buffers, each to one user at a time. Safe from any thread.

    There are as many as users at once; of those that were given back the largest
    ``SCRATCH_BUFFERS_KEPT`` are kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[memoryview] = []  # The largest last.

    def take(self, nbytes: int) -> memoryview:
        """Return a writable buffer of at least ``nbytes``; what it holds is undefined."""
        with self._lock:
            for index, buffer in enumerate(self._idle):
                if len(buffer) >= nbytes:
                    return self._idle.pop(index)
        mapping = mmap.mmap(-1, -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        with contextlib.suppress(OSError):  # A kernel without huge pages.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(mapping)

    def give(self, buffer: memoryview) -> None:
        """Take a whole buffer back, which nobody uses any more."""
        with self._lock:
            self._idle.append(buffer)
            self._idle.sort(key=len)
            del self._idle[:-SCRATCH_BUFFERS_KEPT]

    @contextmanager
    def lent(self, nbytes: int) -> Iterator[memoryview]:
        """Take a buffer and give it back."""
        buffer = self.take(nbytes)
        try:
            yield buffer
        finally:
            self.give(buffer)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffers that nobody uses."""
        with self._lock:
            return sum(map(len, self._idle))
