"""What is logged of a tier: how it does, and what was damaged, at most once a minute. Pure."""

from __future__ import annotations

import math

from kvtier.constants import LOG_INTERVAL_S


class StateLog:
    """Decides what is logged of one tier. Owned by its cache, used under the cache's lock."""

    def __init__(self, path: str, tier: str = "disk") -> None:
        self._name = f"{tier} tier {path}"
        self._told = "ok"
        self._told_s = -math.inf

    def line(self, state: str, detail: str, now: float) -> str | None:
        """Return the line for a state that is news, or None. ``now`` in seconds never goes back.

        A state that comes and goes within the minute is left out; one that stays is told then.
        """
        if state in {"opening", self._told} or now - self._told_s < LOG_INTERVAL_S:
            return None
        self._told, self._told_s = state, now
        if state == "ok":
            return f"{self._name}: ok again"
        return f"{self._name}: {state} ({detail}); requests are answered all the same"


class DamageLog:
    """Decides what is logged of damaged files of one tier, of which there may be thousands."""

    def __init__(self, path: str, tier: str = "disk") -> None:
        self._name = f"{tier} tier {path}"
        self._told = 0
        self._told_s = -math.inf

    def line(self, count: int, latest: str, now: float) -> str | None:
        """Return the line for what is news of ``count`` files, which never falls, or None.

        The first is told at once, with ``latest``; how many came after it, once a minute.
        """
        news = count - self._told
        if not news or now - self._told_s < LOG_INTERVAL_S:
            return None
        self._told, self._told_s = count, now
        what = "a damaged shard" if news == 1 else f"{news} damaged shards"
        return f"{self._name}: {what} went to quarantine, the latest is {latest}"
