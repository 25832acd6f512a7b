"""The cache server's data plane in this process: limits, time limits, back-pressure."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from kvtier.cache.cache import Cache
from kvtier.clock import SystemClock
from kvtier.config import CacheConfig
from kvtier.constants import (
    DAEMON_BYTES_MAX,
    DAEMON_CONNECTION_BYTES_MAX,
    DAEMON_CONNECTIONS_MAX,
    DAEMON_IDLE_S_MAX,
    DAEMON_REQUEST_S_MAX,
    DAEMON_REQUESTS_MAX,
    MIB,
    WIRE_BYTES_PER_S_MIN,
    WIRE_STALL_S_MAX,
)
from kvtier.wire import (
    FROM_SERVER,
    Area,
    Contains,
    Data,
    Delete,
    Done,
    Found,
    Hello,
    Lease,
    Map,
    Message,
    Read,
    Refused,
    Release,
    Status,
    Take,
    Welcome,
    Write,
    encode,
)
from kvtier.wire_parser import Frame, Parser
from kvtier_server.budget import Budget, Waiting
from kvtier_server.credentials import Door
from kvtier_server.data_plane import DataPlane
from kvtier_server.objects import Fault, Filling, Held, Objects, namespace_of

SECOND = 1.0


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

    async def client(self, *, hello: bool = True) -> Client:
        client = Client(*await asyncio.open_unix_connection(self.path))
        if hello:
            await client.send(Hello(1, 1, b""))
            assert await client.message() == Welcome(1)
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


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    cache = Cache(CacheConfig(64 * MIB, slab_bytes=4 * MIB))
    clock = ShiftedClock()
    made = DataPlane(
        cache, Door(None), clock, connections_max=DAEMON_CONNECTIONS_MAX, idle_s=DAEMON_IDLE_S_MAX
    )
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        await made.listen(bound, None)
        yield Plane(made, cache, clock, str(tmp_path / "socket"))
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


async def test_a_stranger_that_says_nothing_is_cut_off(plane: Plane) -> None:
    client = await plane.client(hello=False)
    await until(lambda: plane.plane.connections == 1)
    plane.look(WIRE_STALL_S_MAX - SECOND)
    assert plane.plane.counters.stalled == 0
    plane.look(WIRE_STALL_S_MAX + SECOND)
    assert await client.frame() is None
    assert plane.plane.counters.stalled == 1
    await client.close()


@pytest.mark.parametrize("sent", [1, 19, 24])
async def test_a_frame_that_does_not_come_is_not_waited_for(plane: Plane, sent: int) -> None:
    client = await plane.client()
    whole = encode(Contains(1, (b"some key",)))
    assert sent < len(whole)
    client.writer.write(whole[:sent])
    await client.writer.drain()
    came = len(encode(Hello(1, 1, b""))) + sent
    await until(lambda: any(s.link.received_bytes == came for s in plane.plane.sessions))
    plane.look(WIRE_STALL_S_MAX - SECOND)
    assert plane.plane.connections == 1
    plane.look(WIRE_STALL_S_MAX + SECOND)
    assert await client.frame() is None
    await client.close()


async def test_a_large_payload_may_take_its_time_and_no_longer(plane: Plane) -> None:
    client = await plane.client()
    nbytes = 16 * MIB
    await client.send(Write(1, b"key"), b"x", announced=nbytes)
    await until(lambda: plane.cache.stats().stores_inflight == 1)
    plane.look(WIRE_STALL_S_MAX + nbytes / WIRE_BYTES_PER_S_MIN - 2 * SECOND)
    assert plane.plane.connections == 1
    plane.look(WIRE_STALL_S_MAX + nbytes / WIRE_BYTES_PER_S_MIN + SECOND)
    assert await client.frame() is None
    # The slot is free again.
    await until(lambda: plane.cache.stats().stores_inflight == 0)
    await client.close()


async def test_an_idle_connection_is_sent_away(plane: Plane) -> None:
    client = await plane.client()
    plane.look(DAEMON_IDLE_S_MAX - SECOND)
    assert plane.plane.connections == 1
    plane.look(DAEMON_IDLE_S_MAX + SECOND)
    assert isinstance(await client.message(), Refused)
    assert await client.frame() is None
    await client.close()


async def test_a_client_that_does_not_take_its_answers_is_read_no_further(plane: Plane) -> None:
    """Far more is asked for than may be under way; it all comes once the client reads."""
    client = await plane.client()
    await client.send(Write(1, b"key"), bytes(MIB))
    assert await client.message() == Done(1, Status.OK, "")
    asked = 3 * DAEMON_CONNECTION_BYTES_MAX // MIB
    for number in range(asked):
        await client.send(Read(number, b"key", 0, MIB))
    used: list[int] = []
    for _ in range(500):
        await asyncio.sleep(0)
        used.append(plane.plane.budget.used_bytes)
    assert DAEMON_CONNECTION_BYTES_MAX < max(used) <= DAEMON_CONNECTION_BYTES_MAX + MIB
    answers = [await client.message() for _ in range(asked)]
    assert {answer.request for answer in answers if isinstance(answer, Data)} == set(range(asked))
    await until(lambda: plane.plane.budget.used_bytes == 0)
    await client.close()


async def test_requests_of_one_connection_are_bounded(plane: Plane) -> None:
    client = await plane.client()
    await client.send(Write(1, b"key"), bytes(4096))
    assert await client.message() == Done(1, Status.OK, "")
    asked = 4 * DAEMON_REQUESTS_MAX
    frames = b"".join(encode(Read(number, b"key", 0, 4096)) for number in range(asked))
    client.writer.write(frames)
    most = 0
    for _ in range(2000):
        await asyncio.sleep(0)
        most = max(most, plane.plane.budget.used_bytes // 4096)
    assert most <= DAEMON_REQUESTS_MAX
    for _ in range(asked):
        await client.message()
    await client.close()


class _Link:
    def __init__(self) -> None:
        self.pauses = 0

    def pause(self) -> None:
        self.pauses += 1

    def resume(self) -> None:
        self.pauses -= 1


class _Who:
    def __init__(self) -> None:
        self.link = _Link()


def test_all_together_wait_above_the_limit_until_half_is_done() -> None:
    budget = Budget(DAEMON_BYTES_MAX)
    one, two, gone = _Who(), _Who(), _Who()
    a, b, c = (cast(Waiting, each) for each in (one, two, gone))
    budget.take(a, DAEMON_BYTES_MAX)
    assert one.link.pauses == 0
    budget.take(b, 1)
    budget.take(b, 1)
    budget.take(c, 1)
    assert (one.link.pauses, two.link.pauses, gone.link.pauses) == (0, 1, 1)
    budget.forget(c)
    budget.give(c, 1)
    budget.give(b, 2)
    assert two.link.pauses == 1
    budget.give(a, DAEMON_BYTES_MAX // 2)
    assert (two.link.pauses, gone.link.pauses) == (0, 1)
    assert budget.stopped_count == 0
    budget.give(a, DAEMON_BYTES_MAX // 2)
    assert budget.used_bytes == 0


async def test_requests_of_all_kinds_in_one_go_are_all_answered(plane: Plane) -> None:
    client = await plane.client()
    writes = [encode(Write(number, b"k%d" % number), 3) + b"abc" for number in range(50)]
    empties = [encode(Write(50 + number, b"e%d" % number)) for number in range(50)]
    client.writer.write(b"".join([*writes, *empties]))
    done = [await client.message() for _ in range(100)]
    assert sorted(each.request for each in done if isinstance(each, Done)) == list(range(100))
    assert all(isinstance(each, Done) and each.status is Status.OK for each in done)
    await client.send(Contains(1, (b"k0", b"k49", b"e0", b"e49", b"e50")))
    assert await client.message() == Found(1, (True, True, True, True, False))
    await client.send(Delete(2, (b"k0", b"e0", b"none")))
    assert await client.message() == Done(2, Status.OK, "")
    await client.send(Contains(3, (b"k0", b"e0", b"k1")))
    assert await client.message() == Found(3, (False, False, True))
    await client.close()


async def test_b60_awriter_waits_for_another_one_of_the_same_key(plane: Plane) -> None:
    clock = SystemClock()
    objects = Objects(plane.cache, namespace_of("somebody"), clock)
    first = await objects.reserve(b"key", 100, deadline=clock.now() + DAEMON_REQUEST_S_MAX)
    assert isinstance(first, Filling)
    late = await objects.reserve(b"key", 100, deadline=clock.now())
    assert isinstance(late, Fault)
    assert late.status is Status.LATE
    assert not await objects.delete([b"key"], deadline=clock.now())
    second = asyncio.create_task(
        objects.reserve(b"key", 200, deadline=clock.now() + DAEMON_REQUEST_S_MAX)
    )
    await asyncio.sleep(0)
    first.data[:] = b"1" * 100
    first.commit()
    first.abort()
    filling = await second
    assert isinstance(filling, Filling)
    assert await objects.contains([b"key"], deadline=clock.now()) == [False]
    filling.abort()
    filling.commit()
    assert await objects.contains([b"key"], deadline=clock.now()) == [False]


async def test_b88_an_object_that_is_being_sent_stays_as_it_is(plane: Plane) -> None:
    """Deleted and replaced meanwhile, and memory is wanted: the reader's bytes do not change."""
    clock = SystemClock()
    objects = Objects(plane.cache, namespace_of("somebody"), clock)
    deadline = clock.now() + DAEMON_REQUEST_S_MAX
    first = await objects.reserve(b"key", MIB, deadline=deadline)
    assert isinstance(first, Filling)
    first.data[:] = b"1" * MIB
    first.commit()
    held, again = [await objects.read(b"key", deadline=deadline) for _ in range(2)]
    assert isinstance(held, Held)
    assert isinstance(again, Held)
    again.release()
    again.release()
    assert await objects.delete([b"key"], deadline=deadline)
    for number in range(100):
        filling = await objects.reserve(b"other %d" % number, MIB, deadline=deadline)
        assert isinstance(filling, Filling)
        filling.data[:] = b"2" * MIB
        filling.commit()
    assert bytes(held.data) == b"1" * MIB
    held.release()
    held.release()


@pytest.mark.parametrize(
    "message",
    [Lease(1, b"key"), Release((1,)), Map(1, Area.STAGING), Take(1, b"key", 1, 0, 1)],
    ids=lambda message: message.kind.name,
)
async def test_what_another_version_brought_is_not_served(plane: Plane, message: Message) -> None:
    client = await plane.client()
    await client.send(message)
    refused = await client.message()
    assert isinstance(refused, Refused)
    assert "version 1" in refused.text
    assert await client.frame() is None
    await client.close()
