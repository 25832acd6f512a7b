"""Whoever waits for the same thing gets it in the order of arrival, within its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtier.constants import STORE_CHUNKS_INFLIGHT_MAX
from kvtier.wire import Status
from kvtier_server.objects import Fault, Filling, Objects, namespace_of
from kvtier_server.turns import Turns
from tests.lib.plane import Plane, data_plane

SOON_S = 60.0


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with data_plane(tmp_path) as made:
        yield made


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_turns_come_in_the_order_of_arrival() -> None:
    turns, order = Turns(), list[int]()

    async def wait(number: int) -> None:
        assert await turns.take("it", SOON_S)
        order.append(number)

    assert await turns.take("it", 0)
    assert await turns.take("another thing", 0)
    tasks = [asyncio.create_task(wait(number)) for number in range(5)]
    await settle()
    assert order == []
    for number in range(5):
        turns.give("it")
        await settle()
        assert order == list(range(number + 1))
    turns.give("it")
    turns.give("another thing")
    await asyncio.gather(*tasks)
    assert len(turns) == 0


async def test_b92_who_gives_up_keeps_nobody_waiting() -> None:
    turns = Turns()
    assert await turns.take("it", 0)
    assert not await turns.take("it", 0)
    given_up, told, last = (asyncio.create_task(turns.take("it", SOON_S)) for _ in range(3))
    await settle()
    given_up.cancel()
    await settle()
    turns.give("it")
    told.cancel()  # Its turn has come, and it does not know yet.
    await settle()
    assert last.done()
    assert await last
    turns.give("it")
    assert len(turns) == 0


async def test_b92_who_is_gone_as_the_turn_comes_is_passed_over() -> None:
    """It was cancelled, and has not been told so yet."""
    turns = Turns()
    assert await turns.take("it", 0)
    gone = asyncio.create_task(turns.take("it", SOON_S))
    await settle()
    gone.cancel()
    turns.give("it")
    await settle()
    assert gone.cancelled()
    assert len(turns) == 0


async def test_b58_writers_of_one_key_go_on_in_the_order_in_which_they_came(plane: Plane) -> None:
    objects = Objects(plane.cache, namespace_of("somebody"), plane.clock)
    deadline = plane.clock.now() + SOON_S
    first = await objects.reserve(b"key", 10, deadline=deadline)
    order: list[int] = []

    async def write(number: int) -> None:
        filling = await objects.reserve(b"key", 10, deadline=deadline)
        assert isinstance(filling, Filling)
        order.append(number)
        await asyncio.sleep(0)
        filling.commit()

    tasks = [asyncio.create_task(write(number)) for number in range(20)]
    await settle()
    assert order == []
    assert isinstance(first, Filling)
    first.abort()
    # The key is free, and the first one still sleeps: whoever comes now waits behind all of them.
    tasks.append(asyncio.create_task(write(20)))
    await asyncio.gather(*tasks)
    assert order == list(range(21))


async def test_b58_who_waits_for_room_is_not_overtaken_by_another_credential(plane: Plane) -> None:
    turns = Turns()
    ann, ben = (Objects(plane.cache, namespace_of(n), plane.clock, turns) for n in ("ann", "ben"))
    deadline = plane.clock.now() + SOON_S
    held = [
        await ann.reserve(b"%d" % number, 10, deadline=deadline)
        for number in range(STORE_CHUNKS_INFLIGHT_MAX)
    ]
    full = await ben.reserve(b"late", 10, deadline=plane.clock.now())
    assert full == Fault(Status.LATE, "too much was being written for too long")
    order: list[str] = []

    async def write(objects: Objects, name: str) -> None:
        filling = await objects.reserve(name.encode(), 10, deadline=deadline)
        assert isinstance(filling, Filling)
        order.append(name)
        filling.abort()

    tasks = []
    for objects, name in ((ann, "first"), (ben, "second"), (ann, "third")):
        tasks.append(asyncio.create_task(write(objects, name)))
        await settle()
    assert order == []
    for each in held:
        assert isinstance(each, Filling)
        each.abort()
    # Room is there, and the first one still sleeps: whoever comes now waits behind it.
    tasks.append(asyncio.create_task(write(ben, "fourth")))
    await asyncio.gather(*tasks)
    assert order == ["first", "second", "third", "fourth"]
    assert len(turns) == 0
