"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading
from typing import Final

#: Real seconds after which a wait for another thread is taken for a deadlock.
_STUCK_S: Final = 30.0


class FakeClock:
    """A ``Clock`` that only ``advance`` moves. Safe to use from several threads.

    A thread in ``sleep`` wakes once the clock has been moved far enough. A test that lets threads
    sleep advances the clock past their time before it ends, or they wait for ever.
    """

    def __init__(self, now: float = 1000.0) -> None:
        """Start at the instant ``now``."""
        self._changed = threading.Condition()
        self._now = now
        self._sleepers = 0

    def now(self) -> float:
        """Return the instant last set."""
        with self._changed:
            return self._now

    def sleep(self, seconds: float) -> None:
        """Block the calling thread until the clock has been advanced by ``seconds``."""
        with self._changed:
            wake = self._now + seconds
            self._sleepers += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._now >= wake)
            self._sleepers -= 1

    def advance(self, seconds: float) -> None:
        """Move the clock and wake the threads whose time has come; does not wait for them."""
        assert seconds >= 0, "time never runs backwards"
        with self._changed:
            self._now += seconds
            self._changed.notify_all()

    def wait_for_sleepers(self, count: int) -> None:
        """Block until at least ``count`` threads are in ``sleep``."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._sleepers >= count, _STUCK_S)
        assert arrived, f"fewer than {count} threads came to sleep"
