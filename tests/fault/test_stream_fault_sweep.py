"""Redis and the cache server behind a proxy that does mischief at one byte after the other.

A connector believes the bytes that come: what lies in a shard is found by the shard's checksums. So
where bytes are changed under way, we look through ``Encrypted``, which finds it too.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.testing.connector_sweep import BRIEF_S, StreamSweep, in_turns
from kvtier.testing.engine_double import wait_until
from kvtier.testing.stream_proxy import At, Mischief
from kvtier_connectors.decorators.encrypted import Encrypted
from tests.lib.daemon import Daemon, daemon
from tests.lib.one_key import OneKey
from tests.lib.redis_servers import RedisServer, redis_server


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Daemon]:
    with daemon("--dram=256MiB") as running:
        yield running
        wait_until(lambda: not running.connections()["inflight_bytes"], "something is held")
        assert running.stop() == 0


def encrypted(connector: Connector) -> Connector:
    return Encrypted(connector, OneKey(), "tenant")


def options(timeout_s: float) -> str:
    return f"connections=1&timeout_s={timeout_s}&connect_timeout_s={2 * timeout_s}"


class Sweep(StreamSweep):
    """With bytes that are changed under way, and as many places as the scale says."""

    @pytest.fixture(autouse=True)
    def _more(self, scale: int) -> None:
        self.positions = StreamSweep.positions * scale

    @pytest.mark.parametrize("mischief", [Mischief.FLIP, Mischief.GARBAGE])
    async def test_b78_wherever_a_byte_is_changed_nothing_wrong_is_believed(
        self, mischief: Mischief
    ) -> None:
        async def one(fault: At) -> None:
            await self.act(fault, timeout_s=BRIEF_S, wrap=encrypted)

        await in_turns(one, await self.faults(mischief))


class TestRedisStream(Sweep):
    heals = True

    @pytest.fixture(autouse=True)
    def _server(self, redis: RedisServer) -> None:
        self.port = redis.port

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def make_connector(self, port: int, timeout_s: float) -> Connector:
        prefix = f"prefix={uuid.uuid4().hex}:"
        return connect(f"redis://127.0.0.1:{port}?{options(timeout_s)}&{prefix}")


class TestServerStream(Sweep):
    @pytest.fixture(autouse=True)
    def _server(self, server: Daemon) -> None:
        self.port = int(server.urls[0].rpartition(":")[2])

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def make_connector(self, port: int, timeout_s: float) -> Connector:
        return connect(f"kvtier://127.0.0.1:{port}?{options(timeout_s)}")
