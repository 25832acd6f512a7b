"""Threads that wait for a medium, and calls that end only when no thread holds their buffers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from kvtier.errors import ConnectorUnavailableError

_T = TypeVar("_T")

#: Shares of calls that may run or wait for a thread; what comes on top fails rather than waits.
SHARES_MAX: Final = 256


class Halt:
    """Tells threads that nobody wants their answer any more. Set once; safe from any thread."""

    def __init__(self) -> None:
        """Start as not set."""
        self._lock = threading.Lock()
        self._is_set = False
        self._actions: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        """Tell whether to stop at the next good point."""
        with self._lock:
            return self._is_set

    def when_set(self, action: Callable[[], None]) -> None:
        """Have ``action`` called, by whoever sets this, or at once if that has happened."""
        with self._lock:
            if not self._is_set:
                self._actions.append(action)
                return
        action()

    def forget(self, action: Callable[[], None]) -> None:
        """Undo ``when_set``."""
        with self._lock:
            if action in self._actions:
                self._actions.remove(action)

    def set(self) -> None:
        """Set it and call what was asked for."""
        with self._lock:
            self._is_set = True
            # Under the lock, so that none is called any more once it was forgotten.
            while self._actions:
                self._actions.pop()()


class Threads:
    """A connector's own threads. Its methods belong to one event loop."""

    def __init__(self, count: int, name: str) -> None:
        """Start threads as they are needed, at most ``count``."""
        self.executor: Final = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._shares = 0
        self._closed = False

    def refusal(self, count: int) -> ConnectorUnavailableError | None:
        """Return why so many shares cannot be taken on now, or None."""
        if self._closed:
            return ConnectorUnavailableError("the connector is closed")
        if self._shares + count > SHARES_MAX:
            return ConnectorUnavailableError("too many calls wait for the store")
        return None

    async def gather(self, shares: Sequence[Awaitable[_T]], halt: Halt) -> list[_T]:
        """Return what the shares return; they run in ``executor`` and raise nothing.

        When we are cancelled ``halt`` is set, and we return once every share has ended.
        """
        futures = [asyncio.ensure_future(share) for share in shares]
        self._shares += len(futures)
        cancelled = False
        while futures and not all(future.done() for future in futures):
            try:
                await asyncio.wait(futures)
            except asyncio.CancelledError:
                cancelled = True
                halt.set()
        self._shares -= len(futures)
        if cancelled:
            raise asyncio.CancelledError
        return [future.result() for future in futures]

    def close(self) -> None:
        """Take no more shares; those that run are finished."""
        self._closed = True
        self.executor.shutdown(wait=False)
