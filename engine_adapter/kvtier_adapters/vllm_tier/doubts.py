"""Which chunks are not to be relied on for now, and how long a lookup has been waited for. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvtier_adapters.vllm_tier.limits import DOUBT_S, DOUBTS_MAX


class Doubts:
    """Keeps vLLM from asking again and again for what does not come.

    vLLM promotes whatever a tier says to hold, and asks anew when that fails. A tier whose disk
    hangs would cost a deadline each time, and a request would never begin. So a chunk that failed
    to load is a miss for ``DOUBT_S``, and a lookup that nobody answers is one after ``patience_s``.
    Not safe from several threads: whoever owns it has a lock.
    """

    def __init__(self, patience_s: float) -> None:
        """Wait for lookups for ``patience_s``."""
        self._patience_s = patience_s
        self._until_s: OrderedDict[bytes, float] = OrderedDict()
        self._since_s: OrderedDict[bytes, float] = OrderedDict()

    def failed(self, keys: Iterable[bytes], now: float) -> None:
        """Doubt chunks that did not load."""
        for key in keys:
            self._until_s[key] = now + DOUBT_S
            self._until_s.move_to_end(key)
        _trim(self._until_s)

    def stored(self, keys: Iterable[bytes]) -> None:
        """Believe chunks that were stored anew."""
        for key in keys:
            self._until_s.pop(key, None)

    def doubted(self, key: bytes, now: float) -> bool:
        """Tell whether a chunk failed lately."""
        until_s = self._until_s.get(key)
        if until_s is None:
            return False
        if now < until_s:
            return True
        del self._until_s[key]
        return False

    def answer(self, key: bytes, held: bool | None, now: float) -> bool | None:  # noqa: FBT001
        """Return a lookup's answer; one that is not known for too long is that it is not held."""
        if held is not None:
            self._since_s.pop(key, None)
            return held
        since_s = self._since_s.setdefault(key, now)
        _trim(self._since_s)
        if now - since_s < self._patience_s:
            return None
        self._since_s.pop(key, None)
        return False

    def __len__(self) -> int:
        return len(self._until_s) + len(self._since_s)


def _trim(times: OrderedDict[bytes, float]) -> None:
    while len(times) > DOUBTS_MAX:
        times.popitem(last=False)
