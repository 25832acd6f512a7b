"""The clock of production. Whatever waits or measures takes a ``Clock``, so tests need no sleep."""

from __future__ import annotations

import time


class SystemClock:
    """``time.monotonic``, whose instants are comparable between the processes of one host."""

    def now(self) -> float:
        """Seconds, monotonic."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)
