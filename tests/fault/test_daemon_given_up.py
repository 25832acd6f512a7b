"""Whatever a client gives up, and wherever: nothing is held for it, and bytes are right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvtier.constants import MIB
from kvtier.registry import connect
from kvtier.types import ReadRequest, Tier, WriteItem
from kvtier_connectors.server import ServerConnector
from kvtier_connectors.server.shared import LeasedLoan
from kvtier_server.credentials import DEFAULT
from tests.lib.cache_setup import tier_stats
from tests.lib.plane import Plane, data_plane, until

NBYTES = 3 * MIB // 2
KEYS = [b"one", b"two", b"three"]
OLD, NEW = 0x11, 0x22
#: Turns of the loop after which a call is given up: more than any call takes.
TURNS = 60


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with data_plane(tmp_path, exported_to=DEFAULT) as made:
        yield made


def opened(plane: Plane) -> ServerConnector:
    made = connect(f"kvtier+unix://{plane.path}?shared_from=1")
    assert isinstance(made, ServerConnector)
    return made


def items(fill: int) -> list[WriteItem]:
    return [WriteItem(key, memoryview(bytes([fill]) * NBYTES)) for key in KEYS]


def pinned(plane: Plane) -> int:
    stats = plane.cache.stats()
    return tier_stats(plane.cache, Tier.DRAM).pinned_chunks + stats.loads_inflight


async def given_up(call: Coroutine[Any, Any, Any], turns: int) -> Any:
    """Cancel a call after so many turns; return what it gave, if it was quicker."""
    task = asyncio.get_running_loop().create_task(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        return await task
    return None


async def test_loans_that_are_given_up_are_given_back(plane: Plane) -> None:
    connector = opened(plane)
    assert await connector.write(items(OLD)) == [None] * 3
    cancelled = 0
    for turns in range(TURNS):
        lent = await given_up(connector.lend(KEYS), turns)
        cancelled += lent is None
        for loan in lent or []:
            assert isinstance(loan, LeasedLoan)
            assert loan.view == bytes([OLD]) * NBYTES
            loan.release()
        await until(lambda: pinned(plane) == 0)
    assert 3 < cancelled < TURNS
    await connector.close()


async def test_reads_that_are_given_up_touch_no_buffer_later(plane: Plane) -> None:
    connector = opened(plane)
    assert await connector.write(items(OLD)) == [None] * 3
    for turns in range(TURNS):
        buffers = [bytearray(NBYTES) for _ in KEYS]
        requests = [ReadRequest(key, 0, NBYTES) for key in KEYS]
        outcome = await given_up(connector.read(requests, [memoryview(b) for b in buffers]), turns)
        if outcome is not None:
            assert outcome == [NBYTES] * 3
        before = [bytes(buffer) for buffer in buffers]
        await until(lambda: pinned(plane) == 0)
        assert await connector.contains(KEYS) == [True] * 3
        assert buffers == before
    await connector.close()


async def test_writes_that_are_given_up_leave_whole_objects(plane: Plane) -> None:
    connector, reader = opened(plane), opened(plane)
    whole = [bytes([fill]) * NBYTES for fill in (OLD, NEW)]
    assert await connector.write(items(OLD)) == [None] * 3
    for turns in range(TURNS):
        await given_up(connector.write(items(NEW if turns % 2 else OLD)), turns)
        await until(lambda: pinned(plane) == 0)
        for key in KEYS:
            into = bytearray(NBYTES)
            (count,) = await reader.read([ReadRequest(key, 0, NBYTES)], [memoryview(into)])
            assert count in {None, NBYTES}
            assert count is None or into in whole
    await connector.close()
    await reader.close()


@pytest.mark.parametrize("way", ["shared_from=1", "shared=no"])
async def test_a_client_that_dies_in_any_turn_leaves_nothing(plane: Plane, way: str) -> None:
    def calls(connector: ServerConnector) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
        requests = [ReadRequest(key, 0, NBYTES) for key in KEYS]
        buffers = [memoryview(bytearray(NBYTES)) for _ in KEYS]
        lend = [lambda: connector.lend(KEYS)] if way == "shared_from=1" else []
        return [
            lambda: connector.read(requests, buffers),
            lambda: connector.write(items(NEW)),
            *lend,
        ]

    first = opened(plane)
    assert await first.write(items(OLD)) == [None] * 3
    await first.close()
    for turns in range(TURNS):
        connector = connect(f"kvtier+unix://{plane.path}?{way}")
        assert isinstance(connector, ServerConnector)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(call()) for call in calls(connector)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await connector.close()
        await asyncio.wait(tasks)
        await until(lambda: pinned(plane) == 0 and plane.plane.connections == 0)
        assert plane.plane.budget.used_bytes == 0
