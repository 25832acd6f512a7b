"""The events of one cache, for one reader in whatever thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtier.cache.tenancy.epochs import Epochs
from kvtier.obs.events import Event, EventLog
from kvtier.types import Namespace


class EventFeed:
    """Takes the cache's lock for its reader. ``log`` is the cache's own, used under that lock."""

    def __init__(
        self, lock: threading.Lock, epochs: Epochs, root: Callable[[Namespace], bytes]
    ) -> None:
        """``root`` gives a namespace's digest at its present epoch."""
        self.log = EventLog()
        self._lock = lock
        self._epochs = epochs
        self._root = root
        self._version = epochs.version

    def take(self, count_max: int) -> list[Event]:
        """Return what is to be told next, some ``count_max`` events."""
        with self._lock:
            if self._version != self._epochs.version:
                self._version = self._epochs.version
                self.log.keep(self._root)
            return self.log.take(count_max)

    def begin_anew(self) -> None:
        """Tell everything once more, for a reader that knows nothing or has missed something."""
        with self._lock:
            self.log.begin_anew()
