"""A breaker for one medium: closes off what fails, tries again later, opens again. Pure.

Back-off doubles from ``HEALTH_BACKOFF_S_MIN`` to ``HEALTH_BACKOFF_S_MAX``, so that a dead disk
costs a probe now and then and a recovered one is used again within that time.
"""

from __future__ import annotations

import math

from kvtier.constants import (
    HEALTH_BACKOFF_S_MAX,
    HEALTH_BACKOFF_S_MIN,
    SLOW_BYTES_PER_S,
    SLOW_S_MIN,
)


def is_slow(waited_s: float, nbytes: int) -> bool:
    """Tell whether a read that has not ended after so long says anything against its medium.

    What its caller allowed it is no measure: one that gives up after some milliseconds would have
    the medium closed off for everybody.
    """
    return waited_s >= SLOW_S_MIN + nbytes / SLOW_BYTES_PER_S


class Health:
    """Decides whether a medium may be asked. Owned by its tier, used under the cache's lock.

    ``word`` and ``detail`` tell of the latest fault; both are empty once it is forgiven.
    """

    def __init__(self, failures_max: int = 1) -> None:
        self._failures_max = failures_max
        self._failures = 0
        self._backoff_s = HEALTH_BACKOFF_S_MIN
        self._retry_at = -math.inf
        self.word = ""
        self.detail = ""

    @property
    def ok(self) -> bool:
        """False from the failure that opened the breaker until a success."""
        return self._failures < self._failures_max

    def allows(self, now: float) -> bool:
        """Tell whether the medium may be asked now: it is well, or a probe is due."""
        return self.ok or now >= self._retry_at

    def failure(self, word: str, detail: str, now: float) -> None:
        """Note a fault. Opens the breaker at the configured count and lengthens the back-off.

        What fails before a probe was due had been under way already and lengthens nothing.
        """
        self._failures += 1
        self.word = word
        self.detail = detail
        if not self.ok and now >= self._retry_at:
            self._retry_at = now + self._backoff_s
            self._backoff_s = min(self._backoff_s * 2, HEALTH_BACKOFF_S_MAX)

    def success(self) -> None:
        """Note that the medium did what was asked: everything is forgiven."""
        self._failures = 0
        self._backoff_s = HEALTH_BACKOFF_S_MIN
        self._retry_at = -math.inf
        self.word = ""
        self.detail = ""
