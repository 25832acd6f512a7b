"""No request fails because of the cache: what raises is logged and answered as if it were not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kvtier.constants import LOG_INTERVAL_S
from kvtier.interfaces import Clock

_log = logging.getLogger("kvtier.vllm")

T = TypeVar("T")


class Guard:
    """Calls the cache and counts its faults; logs one a minute. One thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_s: float | None = None
        self.faults = 0

    def call_boundary(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what ``call`` does, or ``otherwise`` when it raises."""
        try:
            return call()
        except Exception as error:  # No request fails because of the cache.
            self.faults += 1
            now = self._clock.now()
            if self._logged_s is None or now - self._logged_s >= LOG_INTERVAL_S:
                self._logged_s = now
                _log.error("cache fault %d, served without it", self.faults, exc_info=error)
            return otherwise
