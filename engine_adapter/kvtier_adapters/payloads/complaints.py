"""What went wrong, told once a minute and counted always."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from kvtier.interfaces import Clock
from kvtier_adapters.payloads.limits import COMPLAINT_INTERVAL_S

_log = logging.getLogger("kvtier.adapters")


class Complaints:
    """Counts by kind, and logs a kind at most once in ``COMPLAINT_INTERVAL_S``. Any thread."""

    def __init__(self, name: str, clock: Clock) -> None:
        """Complain in the name of a plug."""
        self._name = name
        self._clock = clock
        self._told_s: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def tell(self, kind: str, text: str) -> None:
        """Count one of a kind; log the text, if none of the kind was logged lately."""
        now = self._clock.now()
        with self._lock:
            self._counts[kind] += 1
            count = self._counts[kind]
            told_s = self._told_s.get(kind)
            if told_s is not None and now - told_s < COMPLAINT_INTERVAL_S:
                return
            self._told_s[kind] = now
        _log.warning("%s: %s (%d of this kind so far)", self._name, text, count)

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind was told of."""
        with self._lock:
            return dict(self._counts)
