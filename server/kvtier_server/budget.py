"""Bytes that are under way for all clients together: above the limit nobody's requests are read."""

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
    """Counts bytes and stops whoever takes more; all go on once it has fallen to half."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._stopped: list[Waiting] = []
        self.used_bytes = 0

    @property
    def stopped_count(self) -> int:
        """How many are made to wait."""
        return len(self._stopped)

    def take(self, who: Waiting, nbytes: int) -> None:
        """Count bytes; whoever takes some beyond the limit reads no more for now."""
        self.used_bytes += nbytes
        if nbytes and self.used_bytes > self._bytes_max and who not in self._stopped:
            self._stopped.append(who)
            who.link.pause()

    def give(self, who: Waiting, nbytes: int) -> None:
        """Count bytes that are done with."""
        del who
        self.used_bytes -= nbytes
        if self._stopped and self.used_bytes <= self._bytes_max // 2:
            stopped, self._stopped = self._stopped, []
            for each in stopped:
                each.link.resume()

    def forget(self, who: Waiting) -> None:
        """Take note that somebody has left."""
        if who in self._stopped:
            self._stopped.remove(who)
