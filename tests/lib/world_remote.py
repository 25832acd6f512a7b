"""A remote of the simulated world: slow, failing, lying or hung, as a seed draws it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from enum import StrEnum
from typing import Any, Final

from kvtier.constants import STORED_FORMAT_VERSION
from kvtier.errors import (
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.interfaces import ReadOutcome
from kvtier.types import KeyInfo, ReadRequest, WriteItem

#: No call hangs for longer.
HANG_S: Final = 40.0


class Mood(StrEnum):
    """How a remote does."""

    WELL = "well"
    SLOW = "slow"
    FAILING = "failing"
    FULL = "full"
    LYING = "lying"
    HUNG = "hung"
    AWAY = "away"


def telling_byte(draws: random.Random, nbytes: int) -> int:
    """Draw a byte of a shard near the start of a page, where what matters lies."""
    place = draws.randrange(-(-nbytes // 4096)) * 4096 + draws.randrange(32)
    return min(place, nbytes - 1)


def twisted(draws: random.Random, right: list[Any], wrong: list[Any]) -> list[Any]:
    """Answer otherwise, too much, too little, or with what is no answer."""
    return draws.choice((wrong, right[1:], [*right, *right], [object()] * len(right)))


class WorldRemote:
    """A connector over a dict, shared by the processes that come and go.

    ``fail`` is asked before each call for an error that it comes to.
    """

    def __init__(self, draws: random.Random) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.mood = Mood.WELL
        self.lies: Counter[str] = Counter()
        self.fail: Callable[[str], ConnectorError | None] = lambda _: None
        self._draws = draws

    @property
    def encoded_count(self) -> int:
        """Shards that lie there as a byte codec has encoded them."""
        version = STORED_FORMAT_VERSION.to_bytes(4, "little")
        return sum(data[4:8] == version for data in self.objects.values())

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        await self._arrive("contains")
        found = [key in self.objects for key in keys]
        if self._lies("contains"):
            return twisted(self._draws, found, [self._draws.random() < 0.5 for _ in keys])
        return found

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        await self._arrive("read")
        outcomes = [self._read(*pair) for pair in zip(requests, into, strict=True)]
        if self._lies("counts"):
            return twisted(self._draws, outcomes, [request.nbytes for request in requests])
        return outcomes

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        kept = [bytes(item.data) for item in items]
        await self._arrive("write")
        if self.mood is Mood.FULL:
            return [ConnectorRefusedError("full") for _ in items]
        for item, data in zip(items, kept, strict=True):
            whole = not self._lies("write")
            self.objects[item.key] = data if whole else data[: self._draws.randrange(len(data))]
        return [None for _ in items]

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self._arrive("delete")
        for key in keys:
            if not self._lies("delete"):
                self.objects.pop(key, None)

    async def list(self, prefix: bytes) -> AsyncIterator[KeyInfo]:
        await self._arrive("list")
        for key, data in [*self.objects.items()]:
            if key.startswith(prefix):
                yield KeyInfo(key, len(data))

    async def close(self) -> None:
        """Nothing is open."""

    def _read(self, request: ReadRequest, buffer: memoryview) -> ReadOutcome:
        data = self.objects.get(request.key)
        if data is None:
            return None
        if self.objects and self._lies("another's bytes"):
            data = self._draws.choice(list(self.objects.values()))
        part = bytearray(data[request.offset : request.offset + request.nbytes])
        if part and self._lies("flip"):
            part[telling_byte(self._draws, len(part))] ^= 1 << self._draws.randrange(8)
        buffer[: len(part)] = part
        return len(part)

    async def _arrive(self, operation: str) -> None:
        """Take a while; raise what the call comes to."""
        error = self.fail(operation)
        draws, mood = self._draws, self.mood
        if mood is Mood.HUNG and draws.random() < 0.5:
            await asyncio.sleep(draws.uniform(0.0, HANG_S))
        else:
            slow = mood in (Mood.SLOW, Mood.HUNG)
            await asyncio.sleep(draws.expovariate(2.0 if slow else 200.0))
        if mood is Mood.AWAY or (mood is Mood.FAILING and draws.random() < 0.5):
            kinds = (ConnectorUnavailableError, ConnectorTimeoutError, ConnectionError, KeyError)
            raise draws.choice(kinds)("on purpose")
        if error is not None:
            raise error

    def _lies(self, kind: str) -> bool:
        lies = self.mood is Mood.LYING and self._draws.random() < 0.3
        self.lies[kind] += lies
        return lies
