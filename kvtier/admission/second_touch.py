"""Write on the second access: what is asked for once is never written.

Cheap for flash where most chunks are used once or often. Where most reuse is the first and only
one, it comes too late: see the guide on admission for figures.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvtier.admission.everything import require_capacity
from kvtier.types import ChunkKey, Entry, Features

#: First offers remembered, however many chunks the tier below could hold.
FIRST_OFFERS_MAX: Final = 1_000_000


class SecondTouch:
    """An ``AdmissionPolicy``. Owned by its tier and called under the tier's lock.

    Remembers first offers up to the bytes that the tier below holds, and at most
    ``FIRST_OFFERS_MAX``; the oldest are forgotten. A child waits for its parent: it is refused as
    long as the parent is.
    """

    def __init__(self, capacity_bytes: int) -> None:
        require_capacity(capacity_bytes)
        self._capacity_bytes = capacity_bytes
        self._offered: OrderedDict[ChunkKey, int] = OrderedDict()  # bytes, oldest first
        self._offered_bytes = 0

    @property
    def remembered_count(self) -> int:
        """Chunks that were offered and refused, and are remembered."""
        return len(self._offered)

    def offer(self, entry: Entry, now: float) -> bool:  # noqa: ARG002
        """See ``AdmissionPolicy.offer``."""
        again = self._forget(entry.key)
        if again and entry.parent not in self._offered:
            return True
        self._offered[entry.key] = entry.nbytes
        self._offered_bytes += entry.nbytes
        while self._offered_bytes > self._capacity_bytes or len(self._offered) > FIRST_OFFERS_MAX:
            _, nbytes = self._offered.popitem(last=False)
            self._offered_bytes -= nbytes
        return False

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:  # noqa: ARG002
        """See ``AdmissionPolicy.touch``."""
        self._forget(key)

    def left(self, key: ChunkKey, now: float) -> None:  # noqa: ARG002
        """See ``AdmissionPolicy.left``. What left needs two offers again."""
        self._forget(key)

    def _forget(self, key: ChunkKey) -> bool:
        nbytes = self._offered.pop(key, None)
        if nbytes is None:
            return False
        self._offered_bytes -= nbytes
        return True
