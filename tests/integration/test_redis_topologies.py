"""Redis behind TLS, in a cluster whose slots move, and under sentinels that fail over."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.crc import key_slot

import kvtier.registry
from kvtier.errors import ConnectorUnavailableError
from kvtier.interfaces import Connector, Listable
from kvtier.testing.connector_contract import (
    ConnectorContract,
    ListableContract,
    get,
    get_whole,
    payload_of,
    put,
)
from kvtier.types import ReadRequest
from kvtier_connectors.redis.objects import PART_BYTES, object_name
from tests.lib.certificates import Authority, make_authority
from tests.lib.opened import Opened
from tests.lib.redis_cluster import (
    RedisCluster,
    WatchedRedis,
    call,
    redis_cluster,
    redis_with_sentinel,
)
from tests.lib.redis_servers import RedisServer, redis_server

LARGE = 3 * PART_BYTES + 123
DATA = payload_of(b"key", LARGE)
SLOT = key_slot(object_name(b"kvtier:", b"key"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


class TestRedisClusterConnector(ConnectorContract, ListableContract):
    @pytest.fixture(autouse=True)
    def _url(self, cluster: RedisCluster) -> None:
        self.url = cluster.url
        for server in cluster.servers:
            call(server, "FLUSHALL")

    def make_connector(self) -> Connector:
        return kvtier.registry.connect(self.url)


async def test_a_cluster_spreads_objects_and_lists_them_all(
    cluster: RedisCluster, opened: Opened
) -> None:
    for server in cluster.servers:
        call(server, "FLUSHALL")
    connector = opened(kvtier.registry.connect(cluster.url))
    objects = {b"key%d" % number: payload_of(b"k", 100_000 + number) for number in range(30)}
    await put(connector, objects)
    assert all(call(server, "DBSIZE") > 0 for server in cluster.servers)
    assert isinstance(connector, Listable)
    assert {info.key async for info in connector.list(b"key")} == objects.keys()
    assert await get_whole(connector, {k: len(v) for k, v in objects.items()}) == [
        *objects.values()
    ]


async def test_a_slot_that_moves_is_followed_at_every_step(
    cluster: RedisCluster, opened: Opened
) -> None:
    """Before, while some of an object's values are gone (ASK), and after (MOVED)."""
    connector = opened(kvtier.registry.connect(cluster.url))
    await put(connector, {b"key": DATA})
    source = cluster.owner(SLOT)
    target = (source + 1) % len(cluster.servers)
    names = await asyncio.to_thread(cluster.begin_move, SLOT, source, target)
    assert len(names) == 5
    for moved in (names[:1], names[1:3], names[3:]):
        await asyncio.to_thread(cluster.move_keys, moved, source, target)
        assert await get_whole(connector, {b"key": LARGE}) == [DATA]
        assert await connector.contains([b"key"]) == [True]
    await put(connector, {b"key": payload_of(b"key", LARGE, 2)})
    await asyncio.to_thread(cluster.end_move, SLOT, target)
    assert await get_whole(connector, {b"key": LARGE}) == [payload_of(b"key", LARGE, 2)]
    fresh = opened(kvtier.registry.connect(cluster.url))
    await put(fresh, {b"key": DATA})
    assert await get_whole(connector, {b"key": LARGE}) == [DATA]
    assert cluster.owner(SLOT) == target


async def test_an_object_of_many_parts_is_whole_while_half_of_it_has_moved(
    cluster: RedisCluster, opened: Opened
) -> None:
    """More parts than are under way at a time; the first ones are on the other node."""
    connector = opened(kvtier.registry.connect(f"{cluster.url}?connections=1"))
    data = payload_of(b"key", 20 * PART_BYTES)
    await put(connector, {b"key": data})
    source = cluster.owner(SLOT)
    target = (source + 1) % len(cluster.servers)
    names = await asyncio.to_thread(cluster.begin_move, SLOT, source, target)
    firsts = [name for name in names if name.endswith((":0", ":1", ":2", ":3"))]
    await asyncio.to_thread(cluster.move_keys, firsts, source, target)
    assert await get_whole(connector, {b"key": len(data)}) == [data]
    await put(connector, {b"key": DATA})
    rest = await asyncio.to_thread(
        call, cluster.servers[source], "CLUSTER", "GETKEYSINSLOT", SLOT, 1000
    )
    assert rest == ["kvtier:{6b6579}"], "all but the header, which is still here, has gone"
    await asyncio.to_thread(cluster.move_keys, rest, source, target)
    await asyncio.to_thread(cluster.end_move, SLOT, target)
    assert await get_whole(connector, {b"key": LARGE}) == [DATA]


async def test_a_dead_node_costs_its_own_keys_only(tmp_path: Path, opened: Opened) -> None:
    with redis_cluster(tmp_path) as cluster:
        connector = opened(kvtier.registry.connect(cluster.url))
        objects = {b"key%d" % number: payload_of(b"k", 1000) for number in range(30)}
        await put(connector, objects)
        dead = cluster.servers[0].port
        cluster.servers[0].kill()
        found = await get(connector, [ReadRequest(key, 0, 1000) for key in objects])
        alive = [data for outcome, data in found if outcome == 1000]
        assert 0 < len(alive) < len(objects)
        assert set(alive) == {payload_of(b"k", 1000)}
        for outcome, _ in found:
            assert outcome == 1000 or isinstance(outcome, ConnectorUnavailableError)
        assert dead not in {server.port for server in cluster.servers[1:]}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRedis]:
    with redis_with_sentinel(tmp_path_factory.mktemp("sentinel")) as made:
        yield made


@asynccontextmanager
async def tls_before(server: RedisServer, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Speak TLS at a port and pass everything on to the server; give the port."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 18):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, back_writer), pump(back_reader, writer))

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield proxy.sockets[0].getsockname()[1]
    finally:
        proxy.close()
        await proxy.wait_closed()


def server_context(authority: Authority, *, asks_for_certificate: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(authority.server_cert, authority.server_key)
    if asks_for_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class TestRedisOverTls(ConnectorContract, ListableContract):
    @pytest.fixture(autouse=True)
    async def _url(self, server: RedisServer, authority: Authority) -> AsyncIterator[None]:
        call(server, "FLUSHALL")
        context = server_context(authority, asks_for_certificate=True)
        async with tls_before(server, context) as port:
            names = f"ca={authority.ca}&cert={authority.client_cert}&key={authority.client_key}"
            self.url = f"rediss://127.0.0.1:{port}?{names}"
            yield

    def make_connector(self) -> Connector:
        return kvtier.registry.connect(self.url)


class TestRedisUnderSentinel(ConnectorContract, ListableContract):
    @pytest.fixture(autouse=True)
    def _url(self, watched: WatchedRedis) -> None:
        self.url = watched.url
        call(watched.servers[0], "FLUSHALL")

    def make_connector(self) -> Connector:
        return kvtier.registry.connect(self.url)


async def test_tls_with_an_authority_of_ones_own(server: RedisServer, authority: Authority) -> None:
    context = server_context(authority, asks_for_certificate=False)
    opened = Opened()
    async with tls_before(server, context) as port:
        url = f"rediss://127.0.0.1:{port}"
        connector = opened(kvtier.registry.connect(f"{url}?ca={authority.ca}"))
        await put(connector, {b"key": DATA})
        assert await get_whole(connector, {b"key": LARGE}) == [DATA]
        stranger = opened(kvtier.registry.connect(url))
        ((outcome, _),) = await get(stranger, [ReadRequest(b"key", 0, 4)])
        assert isinstance(outcome, ConnectorUnavailableError)
        assert "certificate verify failed" in str(outcome)
        await opened.close_all()


async def test_tls_with_a_client_certificate(server: RedisServer, authority: Authority) -> None:
    context = server_context(authority, asks_for_certificate=True)
    opened = Opened()
    async with tls_before(server, context) as port:
        url = f"rediss://127.0.0.1:{port}?ca={authority.ca}"
        known = f"{url}&cert={authority.client_cert}&key={authority.client_key}"
        connector = opened(kvtier.registry.connect(known))
        await put(connector, {b"key": DATA})
        assert await get_whole(connector, {b"key": LARGE}) == [DATA]
        stranger = opened(kvtier.registry.connect(url))
        ((outcome, _),) = await get(stranger, [ReadRequest(b"key", 0, 4)])
        assert isinstance(outcome, ConnectorUnavailableError)
        await opened.close_all()


async def test_a_failover_is_followed(tmp_path: Path, opened: Opened) -> None:
    with redis_with_sentinel(tmp_path) as watched:
        connector = opened(kvtier.registry.connect(watched.url))
        await put(connector, {b"key": DATA})
        await asyncio.to_thread(watched.wait_for_replica)
        await asyncio.to_thread(watched.fail_over)
        assert await get_whole(connector, {b"key": LARGE}) == [DATA]
        await put(connector, {b"other": DATA})
        (old, new) = watched.servers
        assert call(new, "DBSIZE") == 10
        old.kill()
        assert await get_whole(connector, {b"other": LARGE}) == [DATA]


async def test_a_master_that_dies_is_an_outcome_until_its_replica_takes_over(
    tmp_path: Path, opened: Opened
) -> None:
    with redis_with_sentinel(tmp_path) as watched:
        connector = opened(kvtier.registry.connect(watched.url))
        await put(connector, {b"key": DATA})
        await asyncio.to_thread(watched.wait_for_replica)
        watched.servers[0].kill()
        ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, LARGE)])
        assert isinstance(outcome, ConnectorUnavailableError)
        await asyncio.to_thread(watched.wait_for_new_master)
        assert await get_whole(connector, {b"key": LARGE}) == [DATA]
