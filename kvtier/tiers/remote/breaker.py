"""A circuit breaker with a probe of its own, and how long to wait between tries. Pure.

::

    closed ──failures in a row──► open ──back-off over──► half open ──probe works──► closed
                                    ▲                         │
                                    └──────probe fails────────┘

No request is ever the probe: while the breaker is not closed, requests go on without the remote.
Waits are drawn, so that the engines that share a store do not come back in step (full jitter:
Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import random
from enum import StrEnum

from kvtier.constants import (
    BREAKER_FAILURES_MAX,
    HEALTH_BACKOFF_S_MAX,
    HEALTH_BACKOFF_S_MIN,
    REMOTE_RETRY_S,
)


class BreakerState(StrEnum):
    """Whether a remote is asked."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Decides whether a remote may be asked. Owned by its tier, used under the cache's lock.

    ``word`` and ``detail`` tell of the latest fault while it is not closed.
    """

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._failures = 0
        self._state = BreakerState.CLOSED
        self._backoff_s = HEALTH_BACKOFF_S_MIN
        self._probe_at = 0.0
        self.word = ""
        self.detail = ""

    @property
    def state(self) -> BreakerState:
        """Closed; open; or half open, which is while a probe is out."""
        return self._state

    @property
    def closed(self) -> bool:
        """True while requests may ask."""
        return self._state is BreakerState.CLOSED

    def take_probe(self, now: float) -> bool:
        """Tell whether a probe is to be sent now; then the breaker is half open.

        The caller ends the probe with ``success`` or ``failure``.
        """
        if self._state is BreakerState.OPEN and now >= self._probe_at:
            self._state = BreakerState.HALF_OPEN
            return True
        return False

    def failure(self, word: str, detail: str, now: float) -> None:
        """Note a fault, or an answer that did not come in time.

        What fails while the breaker is open had been under way before and changes nothing.
        """
        self.word, self.detail = word, detail
        if self._state is BreakerState.OPEN:
            return
        self._failures += 1
        if self._state is BreakerState.CLOSED and self._failures < BREAKER_FAILURES_MAX:
            return
        self._state = BreakerState.OPEN
        self._probe_at = now + self._draws.uniform(self._backoff_s / 2, self._backoff_s)
        self._backoff_s = min(self._backoff_s * 2, HEALTH_BACKOFF_S_MAX)

    def success(self, *, probe: bool = False) -> None:
        """Note that the remote did what was asked.

        Only a probe closes a breaker: what succeeds late had been asked before it opened.
        """
        if probe or self._state is BreakerState.CLOSED:
            self._failures = 0
            self._state = BreakerState.CLOSED
            self._backoff_s = HEALTH_BACKOFF_S_MIN
            self.word = self.detail = ""


def retry_delay_s(tries: int, draws: random.Random) -> float:
    """Return how long to wait after so many failed tries of one call."""
    assert tries > 0, "a first try waits for nothing"
    return draws.uniform(0.0, REMOTE_RETRY_S * 2 ** (tries - 1))
