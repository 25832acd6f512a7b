"""The cache server's data plane in this process, and a client that does what a test says."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig
from kvtier.constants import DAEMON_CONNECTIONS_MAX, DAEMON_IDLE_S_MAX, MIB
from kvtier.wire import (
    FROM_SERVER,
    Done,
    Hello,
    Lease,
    Leased,
    Message,
    Status,
    Welcome,
    Write,
    encode,
)
from kvtier.wire_parser import Frame, Parser
from kvtier_server.credentials import Door
from kvtier_server.data_plane import DataPlane


class ShiftedClock:
    """The system's clock, ahead by as much as a test says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return time.monotonic() + self.ahead_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing of this sleeps")


@dataclass
class Plane:
    """A plane on a Unix socket, its cache and its clock."""

    plane: DataPlane
    cache: Cache
    clock: ShiftedClock
    path: str

    async def client(self, *, hello: bool = True, version: int = 1) -> Client:
        client = Client(*await asyncio.open_unix_connection(self.path))
        if hello:
            await client.send(Hello(version, version, b""))
            assert await client.message() == Welcome(version)
        return client

    def look(self, ahead_s: float) -> None:
        """Have the plane look after its connections so much later."""
        self.clock.ahead_s = ahead_s
        self.plane.look()


class Client:
    """A client that reads only when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._parser = Parser(FROM_SERVER)

    async def send(self, message: Message, payload: bytes = b"", *, announced: int = 0) -> None:
        self.writer.write(encode(message, announced or len(payload)) + payload)
        await self.writer.drain()

    async def frame(self) -> Frame | None:
        """The next frame, whose payload goes nowhere; None once the server has hung up."""
        while (frame := self._parser.next()) is None:
            if not await self._receive():
                return None
        if frame.payload_bytes:
            self._parser.place(None)
        while self._parser.payload_left and await self._receive():
            pass
        return frame

    async def skip(self, nbytes: int) -> None:
        """Take so many bytes of whatever is sent. There are no frames behind it."""
        await self._reader.readexactly(nbytes)

    async def _receive(self) -> int:
        space = self._parser.buffer()
        data = b""
        with suppress(ConnectionError):
            data = await self._reader.read(len(space))
        space[: len(data)] = data
        if data:
            self._parser.received(len(data))
        return len(data)

    async def message(self) -> Message:
        frame = await self.frame()
        assert frame is not None, "the server hung up"
        return frame.message

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def data_plane(folder: Path, *, exported_to: str = "") -> AsyncIterator[Plane]:
    """A plane of 64 MiB. In the end nothing may be held for anybody."""
    cache = Cache(CacheConfig(64 * MIB, slab_bytes=4 * MIB, exported_to=exported_to))
    clock = ShiftedClock()
    made = DataPlane(
        cache, Door(None), clock, connections_max=DAEMON_CONNECTIONS_MAX, idle_s=DAEMON_IDLE_S_MAX
    )
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
        made.listen(bound, None)
        yield Plane(made, cache, clock, str(folder / "socket"))
        clock.ahead_s = 0.0
        await made.drain(5)
    stats = cache.stats()
    assert not any(tier.pinned_chunks for tier in stats.tiers)
    assert not stats.stores_inflight + stats.loads_inflight
    cache.close()


async def until(reached: Callable[[], bool]) -> None:
    """Let the loop run until something has happened."""
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0)


async def stored(plane: Plane, *keys: bytes, data: bytes) -> Client:
    """A client of version 2 that has stored some data under each of the keys."""
    client = await plane.client(version=2)
    for number, key in enumerate(keys):
        await client.send(Write(number, key), data)
        assert await client.message() == Done(number, Status.OK, "")
    return client


async def leased(client: Client, number: int, key: bytes) -> Leased:
    """What the server says to a lease."""
    await client.send(Lease(number, key))
    answer = await client.message()
    assert isinstance(answer, Leased)
    assert answer.request == number
    return answer


def pinned(plane: Plane) -> int:
    """How many objects are held for somebody."""
    return plane.cache.stats().tiers[0].pinned_chunks
