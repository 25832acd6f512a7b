"""Headers that were met last: what a reader may ask for before it has read a header anew."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from kvtier_connectors.redis.objects import Header

#: Some 300 bytes each.
KNOWN_MAX: Final = 4096


class Known:
    """Headers of large objects by key, the last that were met. Safe from any thread.

    They are guesses: anybody may have replaced or deleted the object since.
    """

    def __init__(self) -> None:
        """Know none."""
        self._headers: OrderedDict[bytes, Header] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: bytes) -> Header | None:
        """Return the header that this object had."""
        with self._lock:
            return self._headers.get(key)

    def learn(self, key: bytes, header: Header) -> None:
        """Keep a header that has parts; of too many the one that was learned first goes."""
        with self._lock:
            self._headers[key] = header
            self._headers.move_to_end(key)
            if len(self._headers) > KNOWN_MAX:
                self._headers.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Guess nothing of this object any more."""
        with self._lock:
            self._headers.pop(key, None)
