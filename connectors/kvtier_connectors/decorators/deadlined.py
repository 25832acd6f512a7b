"""``Deadlined``: no call lasts longer than it may."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from kvtier.clock import SystemClock
from kvtier.errors import ConfigError, ConnectorError, ConnectorTimeoutError
from kvtier.interfaces import Clock, Connector, ReadOutcome
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.decorators.base import Decorator, pause

_T = TypeVar("_T")


class Deadlined(Decorator):
    """Gives up a call that has not ended ``deadline_s`` after it began.

    A late lookup finds nothing, late reads and writes are ``ConnectorTimeoutError`` for every key
    of the batch, a late delete may or may not have happened. The inner call is cancelled, and we
    return when it has let go: a buffer that may still be written to is never handed back. So a
    connector has to end soon after it was cancelled, or it is late all the same. ``deadline_s`` may
    be set between calls. A listing has no deadline.
    """

    def __init__(self, inner: Connector, deadline_s: float, *, clock: Clock | None = None) -> None:
        """Wrap ``inner``. Raises ``ConfigError`` for a deadline that is not above 0."""
        super().__init__(inner)
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s is {deadline_s}; it must be above 0")
        self.deadline_s = deadline_s
        self._clock = clock or SystemClock()

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask; a late answer is no."""
        found = await self._in_time(super().contains(keys))
        return [False for _ in keys] if found is None else found

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Read; what comes late is an error for all requests."""
        outcomes = await self._in_time(super().read(requests, into))
        return [self._late() for _ in requests] if outcomes is None else outcomes

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Write; what is late may or may not have been stored, and is an error."""
        outcomes = await self._in_time(super().write(items))
        return [self._late() for _ in items] if outcomes is None else outcomes

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete as long as the time lasts."""
        await self._in_time(super().delete(keys))

    async def _in_time(self, call: Coroutine[Any, Any, _T]) -> _T | None:
        """Return what the call returns, or None when it was cancelled for being late."""
        work = asyncio.ensure_future(call)
        alarm = asyncio.ensure_future(pause(self._clock, self.deadline_s))
        cancelled = False
        try:
            await asyncio.wait((work, alarm), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            cancelled = True
        alarm.cancel()
        # However often we are cancelled: until it has ended the buffers are in use.
        while not work.done():
            work.cancel()
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return None if work.cancelled() else work.result()

    def _late(self) -> ConnectorTimeoutError:
        return ConnectorTimeoutError(f"no answer within {self.deadline_s:g} s")
