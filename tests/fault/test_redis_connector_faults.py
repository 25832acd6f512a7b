"""A Redis server that fails in every way that can be made: outcomes, never a mixed object."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import kvtier.registry
from kvtier.errors import (
    ConnectorError,
    ConnectorRefusedError,
    ConnectorUnavailableError,
)
from kvtier.interfaces import Connector, Listable
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.redis.objects import (
    PART_BYTES,
    Header,
    encode_header,
    object_name,
)
from tests.lib.opened import Opened, read_one, write_one
from tests.lib.program import free_port
from tests.lib.redis_cluster import wait_until
from tests.lib.redis_servers import RedisServer, redis_server

MIB = 1 << 20
LARGE = 3 * PART_BYTES + 123
NAME = object_name(b"kvtier:", b"key")


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """A server that is empty and has its settings of the beginning."""
    with shared_server.client() as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
    return shared_server


def names_in(client: redis.Redis) -> list[bytes]:
    return sorted(client.scan_iter())


def sets_of(client: redis.Redis) -> int:
    """Return how many SETs have come, refused ones too, since the counts were reset."""
    figures = client.info("commandstats")["cmdstat_set"]
    return int(figures["calls"]) + int(figures["rejected_calls"])


async def test_a_killed_server_is_an_outcome_and_its_successor_is_used(
    tmp_path: Path, opened: Opened
) -> None:
    with redis_server(tmp_path / "redis") as server:
        connector = opened(kvtier.registry.connect(server.url))
        await put(connector, {b"key": payload_of(b"key", LARGE)})
        server.kill()
        assert isinstance(await read_one(connector, b"key", LARGE), ConnectorUnavailableError)
        assert isinstance(await write_one(connector, b"key", b"data"), ConnectorUnavailableError)
        assert await connector.contains([b"key"]) == [False]
        await connector.delete([b"key"])
        server.start()
        assert await read_one(connector, b"key", LARGE) is None
        await put(connector, {b"key": payload_of(b"key", LARGE)})
        assert await read_one(connector, b"key", LARGE) == payload_of(b"key", LARGE)


async def test_a_server_killed_in_the_middle_gives_whole_objects_misses_or_errors(
    tmp_path: Path, opened: Opened
) -> None:
    keys = [b"key%d" % number for number in range(16)]
    objects = {key: payload_of(key, LARGE) for key in keys}
    with redis_server(tmp_path / "redis") as server:
        connector = opened(kvtier.registry.connect(server.url))
        await put(connector, objects)
        reads = [asyncio.ensure_future(read_one(connector, key, LARGE)) for key in keys]
        items = [WriteItem(key, memoryview(data)) for key, data in objects.items()]
        writes = asyncio.ensure_future(connector.write(items))
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        server.kill()
        for key, found in zip(keys, await asyncio.gather(*reads), strict=True):
            assert found is None or isinstance(found, ConnectorError) or found == objects[key]
        for outcome in await writes:
            assert outcome is None or isinstance(outcome, ConnectorUnavailableError)


async def test_b110_a_full_server_refuses_once_and_serves_what_it_has(
    server: RedisServer, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    await put(connector, {b"old": payload_of(b"old", LARGE)})
    with server.client() as client:
        before = names_in(client)
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 5 * MIB)
        client.config_resetstat()
        for number in range(10):
            outcome = await write_one(connector, b"new%d" % number, bytes(12 * MIB))
            assert isinstance(outcome, ConnectorRefusedError)
        assert sets_of(client) <= 10 * Header(12 * MIB, PART_BYTES, bytes(16)).parts
        assert names_in(client) == before, "nothing is left of what was refused"
    assert await get_whole(connector, {b"old": LARGE}) == [payload_of(b"old", LARGE)]


async def test_a_refused_large_object_stops_early(server: RedisServer, opened: Opened) -> None:
    connector = opened(kvtier.registry.connect(f"{server.url}?connections=1"))
    with server.client() as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 2 * MIB)
        client.config_resetstat()
        assert isinstance(
            await write_one(connector, b"key", bytes(64 * MIB)), ConnectorRefusedError
        )
        assert sets_of(client) < 20


async def test_a_server_that_evicts_never_gives_a_mixed_object(
    server: RedisServer, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 24 * MIB)
    keys = [b"key%d" % number for number in range(16)]
    for version in range(3):
        for key in keys:
            outcome = await write_one(connector, key, payload_of(key, LARGE, version))
            assert outcome is None or isinstance(outcome, ConnectorRefusedError)
    found = [await read_one(connector, key, LARGE) for key in keys]
    wholes = [data for data in found if data is not None]
    assert 1 <= len(wholes) < len(keys), "some were evicted and some were not"
    for key, data in zip(keys, found, strict=True):
        assert data is None or data in [payload_of(key, LARGE, version) for version in range(3)]
    there = await connector.contains(keys)
    assert there == [data is not None for data in found], "what is known to be torn is gone"


@pytest.mark.parametrize("lost", range(5))
async def test_b75_an_object_that_lost_one_of_its_values_is_a_miss(
    server: RedisServer, opened: Opened, lost: int
) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    await put(connector, {b"key": payload_of(b"key", LARGE)})
    with server.client() as client:
        names = names_in(client)
        assert len(names) == 5
        client.delete(names[lost])
        assert await read_one(connector, b"key", LARGE) is None
        assert await connector.contains([b"key"]) == [False]
        if names[lost] != NAME:
            assert names_in(client) == [], "the rest of it is cleared up"
    await put(connector, {b"key": payload_of(b"key", LARGE, 2)})
    assert await read_one(connector, b"key", LARGE) == payload_of(b"key", LARGE, 2)


async def test_clearing_up_spares_what_somebody_has_written_meanwhile(
    server: RedisServer, opened: Opened
) -> None:
    """A header is deleted for its lost parts only where it is still the same."""
    connector = opened(kvtier.registry.connect(server.url))
    with server.client() as client:
        client.set(NAME, encode_header(Header(LARGE, PART_BYTES, b"g" * 16)))
        # Both are held up in this order: the writer's command, then the reader's clearing up.
        client.client_pause(60_000, all=False)
        writing = asyncio.ensure_future(write_one(connector, b"key", b"data"))
        await asyncio.to_thread(wait_until, lambda: held_up(client) == 1)
        reading = asyncio.ensure_future(read_one(connector, b"key", LARGE))
        await asyncio.to_thread(wait_until, lambda: held_up(client) >= 2)
        client.client_unpause()
        assert await writing is None
        assert await reading is None
    assert await read_one(connector, b"key", 4) == b"data"


def held_up(client: redis.Redis) -> int:
    """Return how many clients wait for the end of a pause."""
    return sum("b" in each["flags"] for each in client.client_list())


async def test_large_objects_written_at_once_are_never_mixed(
    server: RedisServer, opened: Opened
) -> None:
    connectors = [opened(kvtier.registry.connect(server.url)) for _ in range(3)]
    versions = [payload_of(b"key", LARGE, version) for version in range(8)]
    found: list[object] = []

    async def read_often(connector: Connector) -> None:
        found.extend([await read_one(connector, b"key", LARGE) for _ in range(12)])

    async def write_all(connector: Connector) -> None:
        for data in versions:
            assert await write_one(connector, b"key", data) is None

    await asyncio.gather(
        *(write_all(connector) for connector in connectors),
        *(read_often(connector) for connector in connectors),
    )
    assert all(data in [None, *versions] for data in found)
    with server.client() as client:
        assert len(names_in(client)) == 5, "one object is left, and no part of another"


async def test_connections_that_are_killed_are_made_anew(
    server: RedisServer, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(server.url))
    objects = {b"key%d" % number: payload_of(b"key", LARGE) for number in range(4)}
    await put(connector, objects)
    with server.client() as client:
        for _ in range(5):
            client.client_kill_filter(_type="normal", skipme=True)
            found = await get_whole(connector, dict.fromkeys(objects, LARGE))
            assert found == list(objects.values())
            client.client_kill_filter(_type="normal", skipme=True)
            await put(connector, objects)


async def test_connections_killed_in_the_middle_are_survived(
    server: RedisServer, opened: Opened
) -> None:
    connector = opened(kvtier.registry.connect(f"{server.url}?connections=2"))
    objects = {b"key%d" % number: payload_of(b"key", LARGE) for number in range(8)}
    await put(connector, objects)
    with server.client() as client:
        for _ in range(5):
            reading = asyncio.ensure_future(
                get(connector, [ReadRequest(key, 0, LARGE) for key in objects])
            )
            await asyncio.to_thread(client.client_kill_filter, _type="normal", skipme=True)
            for (outcome, data), whole in zip(await reading, objects.values(), strict=True):
                assert isinstance(outcome, ConnectorUnavailableError) or data == whole


async def test_a_wrong_password_is_a_refusal_that_does_not_tell_it(
    tmp_path: Path, opened: Opened
) -> None:
    secret = tmp_path / "password"
    secret.write_text("right-secret\n")
    with redis_server(tmp_path / "redis", "--requirepass", "right-secret") as server:
        address = f"127.0.0.1:{server.port}"
        right = opened(kvtier.registry.connect(f"redis://:right-secret@{address}"))
        by_file = opened(kvtier.registry.connect(f"redis://{address}?password_file={secret}"))
        wrong = opened(kvtier.registry.connect(f"redis://user:wrong-secret@{address}"))
        none = opened(kvtier.registry.connect(f"redis://{address}"))
        await put(right, {b"key": b"data"})
        assert await get_whole(by_file, {b"key": 4}) == [b"data"]
        for connector in (wrong, none):
            outcome = await read_one(connector, b"key", 4)
            assert isinstance(outcome, ConnectorRefusedError)
            assert "secret" not in f"{outcome} {outcome!r} {outcome.__cause__!r} {connector!r}"
            assert isinstance(await write_one(connector, b"key", b""), ConnectorRefusedError)
            assert await connector.contains([b"key"]) == [False]


async def test_a_user_who_may_do_what_the_guide_says_can_do_all(
    server: RedisServer, opened: Opened
) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "connectors.md").read_text()
    rights = " ".join(re.findall(r"`((?:\+[a-z|]+ ?)+)`", guide)).split()
    assert "+getdel" in rights
    operator: Any
    with server.client() as operator:
        words = ("kv", "reset", "on", ">word", "~kvtier:*", *rights)
        operator.execute_command("ACL SETUSER", *words)
    url = f"redis://kv:word@127.0.0.1:{server.port}"
    connector = opened(kvtier.registry.connect(url))
    for nbytes in (10, LARGE, LARGE + 1):
        await put(connector, {b"key": payload_of(b"key", nbytes)})
        assert await read_one(connector, b"key", nbytes) == payload_of(b"key", nbytes)
    assert await connector.contains([b"key"]) == [True]
    assert isinstance(connector, Listable)
    assert [info.key async for info in connector.list(b"")] == [b"key"]
    with server.client() as client:
        client.delete(names_in(client)[1])
    assert await read_one(connector, b"key", LARGE) is None
    assert await connector.contains([b"key"]) == [False]
    await put(connector, {b"key": payload_of(b"key", LARGE)})
    await connector.delete([b"key"])
    stranger = opened(kvtier.registry.connect(f"{url}?prefix=other:"))
    assert isinstance(await read_one(stranger, b"key", 4), ConnectorRefusedError)
    with server.client() as client:
        assert names_in(client) == []


async def test_nobody_at_the_address_is_unavailable(opened: Opened) -> None:
    for scheme, rest in (("redis", ""), ("redis+cluster", ""), ("redis+sentinel", "?service=m")):
        url = f"{scheme}://127.0.0.1:{free_port()}{rest}"
        connector = opened(kvtier.registry.connect(url))
        outcome = await read_one(connector, b"key", 4)
        assert isinstance(outcome, ConnectorUnavailableError), url
        with pytest.raises(ConnectorUnavailableError):
            async for _ in connector.list(b""):  # type: ignore[attr-defined]
                pass


async def test_a_sentinel_that_is_away_is_told_of_by_its_address_alone(
    tmp_path: Path, opened: Opened
) -> None:
    secret, address = tmp_path / "password", f"127.0.0.1:{free_port()}"
    secret.write_text("secret")
    url = f"redis+sentinel://{address}?service=m&sentinel_password_file={secret}"
    outcome = await read_one(opened(kvtier.registry.connect(url)), b"key", 4)
    assert isinstance(outcome, ConnectorUnavailableError)
    assert address in str(outcome)
    assert "password" not in str(outcome)


async def test_after_close_outcomes_are_errors(server: RedisServer) -> None:
    connector = kvtier.registry.connect(server.url)
    await put(connector, {b"key": b"data"})
    await connector.close()
    assert isinstance(await read_one(connector, b"key", 4), ConnectorUnavailableError)
    assert isinstance(await write_one(connector, b"key", b""), ConnectorUnavailableError)
    assert await connector.contains([b"key"]) == [False]
