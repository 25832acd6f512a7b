"""Who may come in: a bound on accepted sequences, and the door that closes when the server stops.

Counted here and not in the engine, so that a refusal costs nothing and no two calls squeeze
through one place: all of it runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtier_engine.api.errors import queue_full, unavailable


class Admission:
    """Counts sequences from acceptance to their end. One event loop's thread only."""

    def __init__(self, sequences_max: int) -> None:
        self._sequences_max = sequences_max
        self._sequences = 0
        self._draining = False

    @property
    def sequences(self) -> int:
        """Sequences accepted and not yet ended."""
        return self._sequences

    @property
    def draining(self) -> bool:
        """True once the server takes no further request."""
        return self._draining

    def drain(self) -> None:
        """Refuse every request from now on; those accepted go on."""
        self._draining = True

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Hold ``count`` places while the block runs, or raise ``ApiError`` and hold none."""
        if self._draining:
            raise unavailable("The server is shutting down.", code="shutting_down")
        if self._sequences + count > self._sequences_max:
            raise queue_full()
        self._sequences += count
        try:
            yield
        finally:
            self._sequences -= count
