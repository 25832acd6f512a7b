"""The contract of connectors against redis-server; all other tests run Valkey."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

import kvtier.registry
from kvtier.errors import ConnectorRefusedError, ConnectorUnavailableError
from kvtier.testing.connector_contract import (
    get,
    get_whole,
    payload_of,
    put,
)
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.redis.objects import INLINE_BYTES_MAX, PART_BYTES
from tests.lib.opened import Opened
from tests.lib.redis_contract import OverAUnixSocket, OverTcp
from tests.lib.redis_servers import VARIABLE, RedisServer, redis_server

PROGRAM = os.environ.get(VARIABLE) or shutil.which("redis-server")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs redis-server")
SIZES = [1, INLINE_BYTES_MAX + 1, PART_BYTES, 9 * PART_BYTES + 4097]
OBJECTS = {b"key%d" % nbytes: payload_of(b"key", nbytes) for nbytes in SIZES}
LENGTHS = {key: len(data) for key, data in OBJECTS.items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(PROGRAM))
        with redis_server(tmp_path_factory.mktemp("redis")) as made:
            yield made


@pytest.fixture(autouse=True)
def _empty(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


class TestRedisItself(OverTcp):
    """See ``OverTcp``."""


class TestRedisItselfOverAUnixSocket(OverAUnixSocket):
    """See ``OverAUnixSocket``."""


def test_it_is_no_valkey(server: RedisServer) -> None:
    with server.client() as client:
        assert "valkey_version" not in client.info("server")


async def test_objects_of_many_parts_survive_nothing_and_are_stored_again(
    server: RedisServer, opened: Opened
) -> None:
    """Flushed, full, killed: what is there is right, and what is not is a miss or an error."""
    connector = opened(kvtier.registry.connect(server.url))
    await put(connector, OBJECTS)
    assert await get_whole(connector, LENGTHS) == [*OBJECTS.values()]
    with server.client() as client:
        client.flushall()
        assert await get_whole(connector, LENGTHS) == [None] * len(SIZES)
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]))
        items = [WriteItem(key, memoryview(data)) for key, data in OBJECTS.items()]
        refused = await connector.write(items)
        assert all(isinstance(each, ConnectorRefusedError) for each in refused)
        client.config_set("maxmemory", 0)
    await put(connector, OBJECTS)
    server.kill()
    requests = [ReadRequest(key, 0, nbytes) for key, nbytes in LENGTHS.items()]
    for outcome, _ in await get(connector, requests):
        assert isinstance(outcome, ConnectorUnavailableError)
    server.start()
    assert await get_whole(connector, LENGTHS) == [None] * len(SIZES)
    await put(connector, OBJECTS)
    assert await get_whole(connector, LENGTHS) == [*OBJECTS.values()]
