"""What Redis may answer that is not ours: other values, other protocols, every error."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from redis import exceptions as redis_errors

import kvtier.registry
from kvtier.errors import ConnectorDataError, ConnectorError, ConnectorRefusedError
from kvtier.interfaces import Listable
from kvtier.testing.connector_contract import get_whole, put
from kvtier_connectors.redis.errors import ERRORS, REPLIES, reply_error, translated
from kvtier_connectors.redis.objects import (
    INLINE_BYTES_MAX,
    PART_BYTES,
    Header,
    encode_header,
    object_name,
    part_names,
)
from kvtier_connectors.redis.operations import PENDING_S
from tests.lib.opened import Opened, read_one, write_one
from tests.lib.redis_servers import RedisServer, redis_server

LARGE = 3 * PART_BYTES + 123
NAME = object_name(b"kvtier:", b"key")


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest.mark.parametrize(
    "value",
    [b"", b"short", b"x" * 100, b"KVTR\x02" + bytes(31), b"\x80\x04cos\nsystem\n(S'id'\ntR." * 4],
)
async def test_b98_what_others_wrote_under_our_name_is_an_error_or_a_miss(
    server: RedisServer, opened: Opened, value: bytes
) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    with server.client() as client:
        client.set(NAME, value)
        found = await read_one(connector, b"key", 100)
        assert isinstance(found, ConnectorDataError) if value else found is None
        await put(connector, {b"key": b"data"})
    assert await get_whole(connector, {b"key": 4}) == [b"data"]


async def test_a_value_of_another_type_is_an_error(server: RedisServer, opened: Opened) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    with server.client() as client:
        client.lpush(NAME, b"data")
    assert isinstance(await read_one(connector, b"key", 4), ConnectorDataError)
    assert isinstance(await write_one(connector, b"key", b"data"), ConnectorDataError)


@pytest.mark.parametrize("delta", [-1, 1, 5000])
async def test_b78_a_part_of_another_size_is_an_error(
    server: RedisServer, opened: Opened, delta: int
) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    header = Header(LARGE, PART_BYTES, b"g" * 16)
    with server.client() as client:
        client.set(NAME, encode_header(header))
        for number, name in enumerate(part_names(NAME, header)):
            size = PART_BYTES if number < 3 else LARGE - 3 * PART_BYTES
            client.set(name, bytes(size + (delta if number == 1 else 0)))
    assert isinstance(await read_one(connector, b"key", LARGE), ConnectorDataError)


@pytest.mark.parametrize("value", [Header(10, 0, bytes(16)), Header(INLINE_BYTES_MAX + 1, 0, b"")])
async def test_b78_a_small_object_cut_short_is_an_error(
    server: RedisServer, opened: Opened, value: Header
) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    with server.client() as client:
        client.set(NAME, encode_header(value) + b"nine ....")
    assert isinstance(await read_one(connector, b"key", 10), ConnectorDataError)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"*1000\r\n", b"$9", b""])
async def test_b118_a_server_of_another_protocol_is_an_outcome(
    opened: Opened, answer: bytes
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    other = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    connector = opened(kvtier.registry.connect(f"redis://127.0.0.1:{port}?timeout_s=5"))
    assert isinstance(await read_one(connector, b"key", 4), ConnectorError)
    assert await connector.contains([b"key"]) == [False]
    other.close()
    await other.wait_closed()


@pytest.mark.parametrize(
    ("scheme", "rest"), [("redis", ""), ("redis+cluster", ""), ("redis+sentinel", "?service=m")]
)
async def test_b118_a_server_that_says_yes_to_everything_is_an_outcome(
    scheme: str, rest: str
) -> None:
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        while asked := await reader.read(4096):
            writer.write(b"+OK\r\n" * len(re.findall(rb"\*\d+\r\n", asked)))
        writer.close()

    other = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    connector = kvtier.registry.connect(f"{scheme}://127.0.0.1:{port}{rest}")
    assert isinstance(connector, Listable)
    assert isinstance(await read_one(connector, b"key", 4), ConnectorDataError)
    assert await connector.contains([b"key"]) == [False]
    with pytest.raises(ConnectorDataError):
        _ = [info async for info in connector.list(b"")]
    await connector.close()
    _, left_open = await asyncio.wait([task for task in served if task], timeout=30)
    assert not left_open
    other.close()


@pytest.mark.parametrize("text", ["MOVED", "ASK 1", "MOVED 1 host", "ASK 1 host:x", "ASK x host:1"])
def test_a_redirection_to_nowhere_is_a_refusal(text: str) -> None:
    error = reply_error(text)
    assert text in str(error)
    assert type(translated(error)) is ConnectorRefusedError


def driver_errors() -> list[type[Exception]]:
    """Every error class of redis-py that is not a mistake of its caller."""
    kinds = [kind for _, kind in inspect.getmembers(redis_errors, inspect.isclass)]
    bases = (redis_errors.RedisError, redis_errors.RedisClusterException)
    return [kind for kind in kinds if issubclass(kind, bases)]


@pytest.mark.parametrize("kind", driver_errors())
def test_every_error_of_the_driver_has_an_outcome(kind: type[Exception]) -> None:
    error = kind.__new__(kind)
    outcome = translated(error)
    assert isinstance(outcome, ConnectorError)
    assert outcome.__cause__ is error


def test_the_tables_name_connector_errors_and_drivers_errors() -> None:
    assert all(issubclass(kind, ConnectorError) for kind in ERRORS.values())
    assert all(issubclass(kind, redis_errors.RedisError) for kind in REPLIES.values())
    moved = reply_error("MOVED 3999 127.0.0.1:6381")
    assert isinstance(moved, redis_errors.MovedError)
    assert (moved.host, moved.port) == ("127.0.0.1", 6381)
    assert type(reply_error("ERR unknown")) is redis_errors.ResponseError
    assert isinstance(translated(reply_error("OOM command not allowed")), ConnectorRefusedError)


async def test_parts_whose_writer_died_before_the_header_go_by_themselves(
    server: RedisServer, opened: Opened
) -> None:
    """A user who may write parts, and neither headers nor deletes, leaves what a crash leaves."""
    operator: Any
    with server.client() as operator:
        words = ("reset", "on", ">word", "~kvtier:*:?", "+set")
        operator.execute_command("ACL SETUSER", "dying", *words)
        url = f"redis://dying:word@127.0.0.1:{server.port}"
        connector = opened(kvtier.registry.connect(url))
        assert isinstance(await write_one(connector, b"key", bytes(LARGE)), ConnectorRefusedError)
        lives = [operator.ttl(name) for name in operator.scan_iter()]
    assert len(lives) == 4
    assert all(0 < life <= PENDING_S for life in lives)
