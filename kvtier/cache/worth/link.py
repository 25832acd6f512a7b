"""What one tier's link has shown so far: how long it takes to answer, how many bytes a second.

Transfers run side by side, so no single one of them tells the rate. The link is measured as a
whole: bytes that came, over the time in which something was on its way::

    reads     |──── 0 ────|─── 2 ───|
                |────── 1 ──────|
    window    [      until all is silent     ]     one measurement
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.cache.worth.lines import FAR, Line, Points

#: A link that has been silent for so many times as long as all that is out should take has
#: become slower than anything that is known of it.
_SILENCE = 2.0
#: Silence that says nothing: threads are scheduled in such times.
_SILENCE_S_MIN = 0.02
#: A window that never falls silent is closed after so many transfers. What is about to come of
#: those beside the last one is not counted then, which is little of so many.
_WINDOW_TRANSFERS = 16
_MANY_TRANSFERS = 8


class Link:
    """One tier's transfers into DRAM. Pure bookkeeping; ``now`` in seconds never goes back.

    Every ``started`` is followed by one ``ended``.
    """

    def __init__(self) -> None:
        self._points = Points()
        self._inflight = 0
        self._queued_bytes = 0
        self._window_bytes = 0
        self._window_start = 0.0
        self._window_from_idle = True
        self._arrived_s = 0.0

    @property
    def line(self) -> Line | None:
        """Seconds by bytes of a transfer on a link that is idle; None before the first one."""
        return self._points.line

    @property
    def idle(self) -> bool:
        """True while nothing is on its way."""
        return not self._inflight

    def started(self, now: float, nbytes: int) -> None:
        """Note that so many bytes were asked for."""
        if self._inflight == 0:
            self._queued_bytes = 0
            self._open_window(now, from_idle=True)
        self._inflight += 1
        self._queued_bytes += nbytes

    def arrived(self, now: float, nbytes: int) -> None:
        """Note that so many of them have come."""
        self._window_bytes += nbytes
        self._queued_bytes = max(self._queued_bytes - nbytes, 0)
        self._arrived_s = now

    def ended(self, now: float, nbytes: int, missing_bytes: int = 0) -> None:
        """Note the end of a transfer of ``nbytes``, of which some may never have come."""
        self._inflight -= 1
        self._queued_bytes = max(self._queued_bytes - missing_bytes, 0)
        enough = self.idle or self._window_bytes >= _WINDOW_TRANSFERS * nbytes
        if enough and self._window_bytes and now > self._window_start:
            seconds = now - self._window_start
            if not self._window_from_idle and self.line is not None:
                seconds += self.line.intercept
            # Many transfers are no outlier: two such points make what was before them void.
            for _ in range(2 if self._window_bytes >= _MANY_TRANSFERS * nbytes else 1):
                self._points.observe(self._window_bytes, seconds)
            self._open_window(now, from_idle=False)

    def seconds(self, nbytes: int) -> float | None:
        """Return how long so many bytes take behind what is on its way; None when unknown."""
        line = self.line
        total_bytes = self._queued_bytes + nbytes
        if self.idle or not self._window_bytes:
            return None if line is None else line.at(total_bytes)
        taken = self._arrived_s - self._window_start
        # What comes right now may be far from what came before.
        if line is None or not 1 / FAR < taken / line.at(self._window_bytes) < FAR:
            return taken / self._window_bytes * total_bytes
        return line.at(total_bytes)

    def silent(self, now: float, patience_s: float) -> bool:
        """Tell whether the link owes an answer for longer than all that is out should take.

        Of a link of which nothing is known, ``patience_s`` is what it should take.
        """
        if self.idle:
            return False
        expected = patience_s if self.line is None else self.line.at(self._queued_bytes)
        return now - self._arrived_s > max(_SILENCE * expected, _SILENCE_S_MIN)

    def adopt(self, points: Iterable[tuple[float, float]]) -> None:
        """Go on from what another process has measured, unless something was measured here."""
        if self.line is None:
            self._points = Points(points)

    def kept(self) -> list[tuple[float, float]]:
        """Return the measurements, for another process to go on from."""
        return self._points.kept()

    def _open_window(self, now: float, *, from_idle: bool) -> None:
        self._window_start = self._arrived_s = now
        self._window_bytes = 0
        self._window_from_idle = from_idle
