"""What the decorators have in common: they pass on what they do not change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvtier.clock import SystemClock
from kvtier.errors import ConnectorError
from kvtier.interfaces import Clock, Connector, Listable, ReadOutcome
from kvtier.types import ReadRequest, WriteItem


class Decorator:
    """A ``Connector`` that hands every call to the one it was made around.

    It has the method ``list`` if, and only if, the inner connector is ``Listable``. It owns the
    inner connector: closing the one closes the other.
    """

    def __init__(self, inner: Connector) -> None:
        """Wrap ``inner``."""
        self._inner = inner
        if isinstance(inner, Listable):
            # Set on the object, not on the class: a type tells what it can do by its methods.
            vars(self)["list"] = inner.list

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask the inner connector."""
        return await self._inner.contains(keys)

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Let the inner connector fill the buffers."""
        return await self._inner.read(requests, into)

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Let the inner connector store the objects."""
        return await self._inner.write(items)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Let the inner connector delete."""
        await self._inner.delete(keys)

    async def close(self) -> None:
        """Close the inner connector."""
        await self._inner.close()


async def pause(clock: Clock, seconds: float) -> None:
    """Wait by ``clock`` without holding up the loop; nothing to wait for is no wait.

    The system's clock costs a timer. Any other is waited for in a thread, which a cancelled pause
    leaves behind until that clock has moved.
    """
    if seconds <= 0:
        return
    if isinstance(clock, SystemClock):
        await asyncio.sleep(seconds)
    else:
        await asyncio.to_thread(clock.sleep, seconds)
