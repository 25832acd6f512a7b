"""Redis calls that wait for a server, are given up, or come in numbers: no hang, nothing torn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import kvtier.registry
from kvtier.clock import SystemClock
from kvtier.errors import ConnectorTimeoutError
from kvtier.testing.connector_contract import payload_of, put
from kvtier.types import ReadRequest
from kvtier_connectors.decorators import Deadlined
from kvtier_connectors.redis.lanes import LANE_BYTES, Lanes
from kvtier_connectors.redis.objects import PART_BYTES
from kvtier_connectors.redis.replies import Command
from kvtier_connectors.redis.settings import parse_url
from kvtier_connectors.redis.topology import open_topology
from kvtier_connectors.threads import Halt, Threads
from tests.lib.opened import Opened, read_one, write_one
from tests.lib.redis_servers import RedisServer, redis_server

LARGE = 3 * PART_BYTES + 123


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as made:
        yield made


async def test_a_server_that_does_not_answer_is_a_timeout(
    server: RedisServer, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(f"{server.url}?timeout_s=0.5"))
    await put(connector, {b"key": payload_of(b"key", LARGE)})
    clock, start = SystemClock(), SystemClock().now()
    server.freeze()
    try:
        assert isinstance(await read_one(connector, b"key", LARGE), ConnectorTimeoutError)
        outcome = await write_one(connector, b"key", bytes(LARGE))
        assert isinstance(outcome, ConnectorTimeoutError)
        assert await connector.contains([b"key"]) == [False]
        assert clock.now() - start < 20
    finally:
        server.thaw()
    assert await read_one(connector, b"key", LARGE) == payload_of(b"key", LARGE)


async def test_a_cancelled_read_ends_although_the_server_does_not_answer(
    server: RedisServer, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(f"{server.url}?timeout_s=3000"))
    await put(connector, {b"key": payload_of(b"key", LARGE)})
    buffer = bytearray(LARGE)
    server.freeze()
    try:
        reading = asyncio.ensure_future(
            connector.read([ReadRequest(b"key", 0, LARGE)], [memoryview(buffer)])
        )
        await asyncio.wait([reading], timeout=0.05)
        assert not reading.done()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reading, 30)
        buffer[:] = b"\xee" * LARGE
    finally:
        server.thaw()
    assert await read_one(connector, b"key", LARGE) == payload_of(b"key", LARGE)
    assert set(buffer) == {0xEE}, "the buffer is the caller's again"


async def test_a_write_that_was_given_up_leaves_the_old_object(
    server: RedisServer, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(f"{server.url}?timeout_s=3000"))
    await put(connector, {b"key": payload_of(b"key", LARGE)})
    server.freeze()
    try:
        writing = asyncio.ensure_future(write_one(connector, b"key", bytes(LARGE)))
        await asyncio.wait([writing], timeout=0.05)
        assert not writing.done()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(writing, 30)
    finally:
        server.thaw()
    assert await read_one(connector, b"key", LARGE) == payload_of(b"key", LARGE)


@pytest.mark.parametrize("connections", [1, 2])
async def test_more_large_calls_than_threads_do_not_wait_for_each_other(
    server: RedisServer, opened: Opened, connections: int
) -> None:
    """Each of them asks for more threads than there are left."""
    connector = opened(kvtier.registry.connect(f"{server.url}?connections={connections}"))
    objects = {b"key%d" % n: payload_of(b"key%d" % n, 2 * LARGE + n) for n in range(8)}
    await asyncio.wait_for(
        asyncio.gather(*(put(connector, {key: data}) for key, data in objects.items())), 60
    )
    reads = [read_one(connector, key, len(data)) for key, data in objects.items()]
    assert await asyncio.wait_for(asyncio.gather(*reads), 60) == list(objects.values())


async def test_a_connection_that_fails_oddly_is_told_of_when_all_others_have_ended(
    server: RedisServer,
) -> None:
    """They fill the caller's buffers."""
    settings, threads = parse_url(f"{server.url}?connections=3"), Threads(3, "kvtier-test")
    lanes = Lanes(settings, open_topology(settings), threads.executor)
    memory = memoryview(bytearray(4))
    commands = [
        Command((b"EXISTS", b"key"), 0),
        Command((b"GET", b"key"), 0, memory, head_bytes=0),
        Command((b"BLPOP", b"nothing", b"0.5"), 0),
    ]
    memory.release()
    for command in commands:
        command.payload_bytes = LANE_BYTES
    with server.client() as client:
        client.set(b"key", b"data")
        with pytest.raises(ValueError, match="released"):
            await asyncio.to_thread(lanes.run, commands, Halt())
        assert not any("b" in each["flags"] for each in client.client_list())
    lanes.close()
    threads.close()


async def test_a_deadline_holds_although_the_server_does_not_answer(
    server: RedisServer, opened: Opened
) -> None:
    inner = kvtier.registry.connect(f"{server.url}?timeout_s=3000&connect_timeout_s=1")
    connector = opened(Deadlined(inner, 0.2))
    await put(inner, {b"key": payload_of(b"key", LARGE)})
    server.freeze()
    try:
        assert isinstance(await read_one(connector, b"key", LARGE), ConnectorTimeoutError)
        outcome = await write_one(connector, b"key", bytes(LARGE))
        assert isinstance(outcome, ConnectorTimeoutError)
    finally:
        server.thaw()
    assert await read_one(inner, b"key", LARGE) == payload_of(b"key", LARGE)
