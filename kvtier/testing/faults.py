"""Connectors that go wrong on purpose: decorators with the ``Connector`` protocol.

Every fault is ordered by number or by key and drawn from a seed, so a failing test replays.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvtier.errors import ConnectorError, ConnectorUnavailableError
from kvtier.interfaces import Clock, Connector, ReadOutcome
from kvtier.types import ReadRequest, WriteItem


class Operation(StrEnum):
    """The methods of a connector that can go wrong."""

    CONTAINS = "contains"
    READ = "read"
    WRITE = "write"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class FailCall:
    """The ``nth`` call of an operation (from 1; a batch is one call) fails as a whole.

    ``last`` fails the following calls too, up to that one; 0 fails every call from ``nth`` on.
    A failing ``contains`` finds nothing and a failing ``delete`` removes nothing.
    """

    operation: Operation
    nth: int
    last: int | None = None

    def hits(self, call: int) -> bool:
        """Tell whether the call of that number fails."""
        last = self.nth if self.last is None else self.last
        return self.nth <= call and (last == 0 or call <= last)


@dataclass(frozen=True, slots=True)
class CutRead:
    """Reads of ``key`` place at most ``nbytes`` bytes."""

    key: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class DropKey:
    """``key`` is never found, whatever lies there."""

    key: bytes


@dataclass(frozen=True, slots=True)
class FlipBit:
    """Every read of ``key`` has one bit flipped that the seed chooses; no error tells of it."""

    key: bytes


Fault = FailCall | CutRead | DropKey | FlipBit


class Faulty:
    """A ``Connector`` around another one, with faults. Without faults it changes nothing.

    ``faults`` may be replaced at any time between calls. For one event loop.
    """

    def __init__(
        self,
        inner: Connector,
        faults: Sequence[Fault] = (),
        *,
        seed: int = 0,
        error: Callable[[str], ConnectorError] = ConnectorUnavailableError,
    ) -> None:
        """``error`` makes the outcome of a failing call from its message."""
        self.faults: Sequence[Fault] = faults
        self.calls: Final[Counter[Operation]] = Counter()
        self._inner = inner
        self._random = random.Random(seed)
        self._error = error

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell for each key whether it is there and not dropped."""
        if self._failure(Operation.CONTAINS):
            return [False for _ in keys]
        found = await self._inner.contains(keys)
        return [there and not self._drops(key) for key, there in zip(keys, found, strict=True)]

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Read, then spoil what the faults name."""
        failure = self._failure(Operation.READ)
        if failure:
            return [failure for _ in requests]
        outcomes = await self._inner.read(requests, into)
        return [
            self._spoil(request.key, buffer, outcome)
            for request, buffer, outcome in zip(requests, into, outcomes, strict=True)
        ]

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Write, or fail the whole batch."""
        failure = self._failure(Operation.WRITE)
        return [failure for _ in items] if failure else await self._inner.write(items)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete, or silently do nothing."""
        if not self._failure(Operation.DELETE):
            await self._inner.delete(keys)

    async def close(self) -> None:
        """Close the inner connector."""
        await self._inner.close()

    def _failure(self, operation: Operation) -> ConnectorError | None:
        """Count the call; return its error if a fault hits it."""
        self.calls[operation] += 1
        call = self.calls[operation]
        for fault in self.faults:
            if isinstance(fault, FailCall) and fault.operation is operation and fault.hits(call):
                return self._error(f"{operation} call {call} fails on purpose")
        return None

    def _drops(self, key: bytes) -> bool:
        return any(isinstance(fault, DropKey) and fault.key == key for fault in self.faults)

    def _spoil(self, key: bytes, buffer: memoryview, outcome: ReadOutcome) -> ReadOutcome:
        for fault in self.faults:
            if isinstance(fault, FailCall) or fault.key != key or not isinstance(outcome, int):
                continue
            if isinstance(fault, DropKey):
                return None
            if isinstance(fault, CutRead):
                outcome = min(outcome, fault.nbytes)
            elif outcome:
                bit = self._random.randrange(outcome * 8)
                buffer[bit // 8] ^= 1 << bit % 8
        return outcome


class Slow:
    """A ``Connector`` whose reads, writes and lookups take ``delay_s`` longer, by a ``Clock``.

    The call waits in a thread, so with a fake clock it answers when the test moves the clock:
    late, or for a test that never does, not at all. ``delay_s`` may be changed between calls.
    """

    def __init__(self, inner: Connector, delay_s: float, clock: Clock) -> None:
        """Wrap ``inner``; ``delay_s == 0`` waits for nothing."""
        self.delay_s = delay_s
        self._inner = inner
        self._clock = clock

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Wait, then ask."""
        await self._wait()
        return await self._inner.contains(keys)

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Wait, then read."""
        await self._wait()
        return await self._inner.read(requests, into)

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Wait, then write."""
        await self._wait()
        return await self._inner.write(items)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Wait, then delete."""
        await self._wait()
        await self._inner.delete(keys)

    async def close(self) -> None:
        """Close the inner connector at once."""
        await self._inner.close()

    async def _wait(self) -> None:
        if self.delay_s > 0:
            await asyncio.to_thread(self._clock.sleep, self.delay_s)
