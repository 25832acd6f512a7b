"""The Redis connector keeps the connector contract, over TCP and a Unix socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvtier.registry
from kvtier.interfaces import Listable
from kvtier.testing.connector_contract import (
    get,
    get_whole,
    payload_of,
    put,
)
from kvtier.types import KeyInfo, ReadRequest
from kvtier_connectors.redis.lanes import LANE_BYTES
from kvtier_connectors.redis.objects import (
    INLINE_BYTES_MAX,
    PART_BYTES,
    Header,
    encode_header,
    object_name,
)
from tests.lib.opened import Opened
from tests.lib.redis_contract import OverAUnixSocket, OverTcp
from tests.lib.redis_servers import RedisServer, redis_server

SIZES = [
    INLINE_BYTES_MAX,
    INLINE_BYTES_MAX + 1,
    PART_BYTES - 1,
    PART_BYTES,
    PART_BYTES + 1,
    3 * PART_BYTES,
    9 * PART_BYTES + 4097,
    2 * LANE_BYTES + 4097,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture(autouse=True)
def _empty(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


class TestRedisConnector(OverTcp):
    """See ``OverTcp``."""


class TestRedisConnectorOverAUnixSocket(OverAUnixSocket):
    """See ``OverAUnixSocket``."""


@pytest.mark.parametrize("nbytes", SIZES)
async def test_b81_large_objects_are_byte_exact(
    server: RedisServer, opened: Opened, nbytes: int
) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    data = payload_of(b"key", nbytes)
    await put(connector, {b"key": data})
    assert await connector.contains([b"key"]) == [True]
    assert await get_whole(connector, {b"key": nbytes}) == [data]
    ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, nbytes + 1)])
    assert outcome == nbytes


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 1),
        (PART_BYTES - 1, 2),
        (PART_BYTES, PART_BYTES),
        (1, 3 * PART_BYTES),
        (3 * PART_BYTES + 5, 100),
        (4 * PART_BYTES - 1, 1),
        (PART_BYTES // 2, 0),
    ],
)
async def test_ranges_cross_parts(
    server: RedisServer, opened: Opened, offset: int, nbytes: int
) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    data = payload_of(b"key", 4 * PART_BYTES)
    await put(connector, {b"key": data})
    found = await get(connector, [ReadRequest(b"key", offset, nbytes)])
    assert found == [(nbytes, data[offset : offset + nbytes])]


async def test_many_large_objects_in_one_batch(server: RedisServer, opened: Opened) -> None:
    connector = opened(kvtier.registry.connect(f"{server.url}?connections=3"))
    objects = {b"key%d" % n: payload_of(b"key%d" % n, n * PART_BYTES // 2 + n) for n in range(12)}
    await put(connector, objects)
    assert await get_whole(connector, {k: len(v) for k, v in objects.items()}) == [
        *objects.values()
    ]


async def test_replaced_and_deleted_objects_leave_nothing_behind(
    server: RedisServer, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    for nbytes in (3 * PART_BYTES, 100, 2 * PART_BYTES, INLINE_BYTES_MAX + 1):
        await put(connector, {b"key": payload_of(b"key", nbytes)})
    with server.client() as client:
        assert client.dbsize() == 2
        assert all(client.ttl(name) == -1 for name in client.scan_iter())
        await connector.delete([b"key"])
        assert client.dbsize() == 0


async def test_a_time_to_live_is_given_to_all_of_an_object(
    server: RedisServer, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(f"{server.url}?ttl_s=50"))
    await put(connector, {b"small": b"data", b"large": bytes(2 * PART_BYTES)})
    with server.client() as client:
        lives = sorted(client.ttl(name) for name in client.scan_iter())
    assert len(lives) == 4
    assert 0 < lives[0] <= lives[1] <= 50 < lives[2], "parts outlive the header that names them"


async def test_prefixes_keep_stores_apart(server: RedisServer, opened: Opened) -> None:
    first, second, third = (
        opened(kvtier.registry.connect(f"{server.url}{rest}"))
        for rest in ("?prefix=a:", "?prefix=b:", "/1?prefix=a:")
    )
    await put(first, {b"key": b"data"})
    assert await second.contains([b"key"]) == [False]
    assert await third.contains([b"key"]) == [False]


async def test_list_by_prefix_tells_objects_and_not_their_parts(
    server: RedisServer, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(f"{server.url}?prefix=p*["))
    other = opened(kvtier.registry.connect(f"{server.url}?prefix=pp["))
    assert isinstance(connector, Listable)
    sizes = {b"a1": 5, b"a2": 3 * PART_BYTES, b"b": 0, b"": 7}
    await put(connector, {key: bytes(nbytes) for key, nbytes in sizes.items()})
    await put(other, {b"a3": b"data"})
    with server.client() as client:
        for name in (b"p*[{zz}", b"p*[{6134}"):
            client.set(name, b"not ours")
        client.lpush(b"p*[{6135}", b"not ours")
    found = [info async for info in connector.list(b"a")]
    assert sorted(found, key=lambda info: info.key) == [
        KeyInfo(b"a1", 5),
        KeyInfo(b"a2", 3 * PART_BYTES),
    ]
    assert {info.key: info.nbytes async for info in connector.list(b"")} == sizes


async def test_the_hot_path_asks_for_no_keys(server: RedisServer, opened: Opened) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    with server.client() as client:
        client.config_resetstat()
        await put(connector, {b"key": bytes(2 * PART_BYTES)})
        await connector.contains([b"key"])
        await get_whole(connector, {b"key": 2 * PART_BYTES})
        await connector.delete([b"key"])
        used = set(client.info("commandstats"))
    assert not used & {"cmdstat_keys", "cmdstat_scan", "cmdstat_eval"}


@pytest.mark.parametrize("nbytes", [None, 100, 2 * PART_BYTES, 4 * PART_BYTES])
async def test_a_reader_that_has_met_an_object_sees_what_another_has_made_of_it(
    server: RedisServer, opened: Opened, nbytes: int | None
) -> None:
    reader, writer = (opened(kvtier.registry.connect(server.url)) for _ in range(2))
    old, new = payload_of(b"old", 3 * PART_BYTES), payload_of(b"new", nbytes or 0)
    await put(writer, {b"key": old, b"other": old})
    for _ in range(2):
        assert await get_whole(reader, {b"key": len(old), b"other": len(old)}) == [old, old]
    if nbytes is None:
        await writer.delete([b"key"])
    else:
        await put(writer, {b"key": new})
    expected = [new if nbytes else None, old]
    for _ in range(2):
        assert await get_whole(reader, {b"key": 4 * PART_BYTES, b"other": len(old)}) == expected


async def test_old_parts_that_are_still_there_are_not_taken_for_the_object(
    server: RedisServer, opened: Opened
) -> None:
    connector, name = opened(kvtier.registry.connect(server.url)), object_name(b"kvtier:", b"key")
    await put(connector, {b"key": payload_of(b"old", 3 * PART_BYTES)})
    with server.client() as client:
        client.set(name, encode_header(Header(4, 0, bytes(16))) + b"data")
    assert await get_whole(connector, {b"key": 3 * PART_BYTES}) == [b"data"]
    with server.client() as client:
        client.delete(name)
    assert await get_whole(connector, {b"key": 3 * PART_BYTES}) == [None]
