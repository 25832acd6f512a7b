"""Bytes that are under way for all clients together: above the limit, who has many waits."""

from __future__ import annotations

from typing import Protocol


class Waiting(Protocol):
    """Who can be made to wait."""

    @property
    def link(self) -> Brake:
        """What reads for it."""
        ...


class Brake(Protocol):
    """What reads, or does not."""

    def pause(self) -> None:
        """Read nothing until there was a ``resume`` for each ``pause``."""
        ...

    def resume(self) -> None:
        """Undo one ``pause``."""
        ...


class Budget:
    """Counts bytes; above the limit, whoever has more than a share of it and takes more waits.

    All go on once it has fallen to half. So it passes the limit by a share for each at most, and by
    one request; and nobody who asks for little waits for those who ask for much.
    """

    def __init__(self, bytes_max: int, share_bytes: int) -> None:
        self._bytes_max = bytes_max
        self._share_bytes = share_bytes
        self._held: dict[Waiting, int] = {}
        self._stopped: list[Waiting] = []
        self.used_bytes = 0

    @property
    def stopped_count(self) -> int:
        """How many are made to wait."""
        return len(self._stopped)

    def take(self, who: Waiting, nbytes: int) -> None:
        """Count bytes; who takes some beyond the limit, and its share, reads no more for now."""
        if not nbytes:
            return
        self.used_bytes += nbytes
        held = self._held[who] = self._held.get(who, 0) + nbytes
        full = self.used_bytes > self._bytes_max and held > self._share_bytes
        if full and who not in self._stopped:
            self._stopped.append(who)
            who.link.pause()

    def give(self, who: Waiting, nbytes: int) -> None:
        """Count bytes that are done with."""
        if not nbytes:
            return
        self.used_bytes -= nbytes
        self._held[who] -= nbytes
        if not self._held[who]:
            del self._held[who]
        if self._stopped and self.used_bytes <= self._bytes_max // 2:
            stopped, self._stopped = self._stopped, []
            for each in stopped:
                each.link.resume()

    def forget(self, who: Waiting) -> None:
        """Take note that somebody has left; what it has taken it still gives back."""
        if who in self._stopped:
            self._stopped.remove(who)
