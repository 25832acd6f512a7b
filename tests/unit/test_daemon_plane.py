"""The cache server's data plane in this process: limits, time limits, back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from kvtier.clock import SystemClock
from kvtier.constants import (
    DAEMON_BYTES_MAX,
    DAEMON_CONNECTION_BYTES_MAX,
    DAEMON_IDLE_S_MAX,
    DAEMON_REQUEST_S_MAX,
    DAEMON_REQUESTS_MAX,
    DAEMON_SHARE_BYTES,
    MIB,
    WIRE_BYTES_PER_S_MIN,
    WIRE_STALL_S_MAX,
)
from kvtier.wire import (
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
    Write,
    encode,
)
from kvtier_server.budget import Budget, Waiting
from kvtier_server.objects import Fault, Filling, Held, Objects, namespace_of
from tests.lib.plane import Plane, data_plane, until

SECOND = 1.0


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with data_plane(tmp_path) as made:
        yield made


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
    budget, much = Budget(DAEMON_BYTES_MAX, DAEMON_SHARE_BYTES), DAEMON_SHARE_BYTES + 1
    one, two, gone = _Who(), _Who(), _Who()
    a, b, c = (cast(Waiting, each) for each in (one, two, gone))
    budget.take(a, DAEMON_BYTES_MAX)
    assert one.link.pauses == 0
    budget.take(b, much)
    budget.take(b, 1)
    budget.take(c, much)
    assert (one.link.pauses, two.link.pauses, gone.link.pauses) == (0, 1, 1)
    budget.forget(c)
    budget.give(c, much)
    budget.give(b, much)
    budget.give(b, 1)
    assert two.link.pauses == 1
    budget.give(a, DAEMON_BYTES_MAX // 2)
    assert (two.link.pauses, gone.link.pauses) == (0, 1)
    assert budget.stopped_count == 0
    budget.give(a, DAEMON_BYTES_MAX // 2)
    assert budget.used_bytes == 0


def test_b58_who_asks_for_little_never_waits_for_who_asks_for_much() -> None:
    budget = Budget(DAEMON_BYTES_MAX, DAEMON_SHARE_BYTES)
    greedy, modest = _Who(), _Who()
    a, b = (cast(Waiting, each) for each in (greedy, modest))
    for _ in range(3):
        budget.take(a, DAEMON_BYTES_MAX // 2)
    for _ in range(3):
        budget.take(b, DAEMON_SHARE_BYTES // 3)
    assert (greedy.link.pauses, modest.link.pauses) == (1, 0)
    budget.take(b, DAEMON_SHARE_BYTES // 3)
    assert modest.link.pauses == 1


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
