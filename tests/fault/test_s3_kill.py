"""SeaweedFS is killed in the middle of many operations, and comes back with what it had stored."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier.registry
from kvtier.constants import KIB
from kvtier.errors import ConnectorError, ConnectorTimeoutError, ConnectorUnavailableError
from kvtier.interfaces import Connector
from kvtier.testing.connector_contract import get_whole, payload_of
from kvtier.types import ReadRequest, WriteItem
from tests.lib.s3_servers import Seaweed, seaweed, url_of, use_credentials

OPERATIONS = 1000
WORKERS = 8
KEYS = 60
#: An operation lasts no longer, whatever becomes of the server: tries, time-outs and pauses.
OPERATION_S_MAX = 30.0
VERSIONS = 3


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    use_credentials(monkeypatch)
    with seaweed(tmp_path) as made:
        yield made


def nbytes_of(key: bytes) -> int:
    """Each key has a size of its own, up to 64 KiB."""
    return 1 + (int.from_bytes(payload_of(key, 2), "little") % (64 * KIB))


class Traffic:
    """Reads, writes and deletes keys at random; counts what came of it, and knows every version."""

    def __init__(self, connector: Connector, rng: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self.started = 0
        self.at = dict[int, asyncio.Event]()
        self._connector = connector
        self._rng = rng
        self._keys = [b"key%d" % number for number in range(KEYS)]

    def errors(self) -> int:
        """How many operations the server was not there for."""
        return self.outcomes["error"]

    async def run(self, last: int) -> None:
        """Operate until so many operations have been started."""
        await asyncio.gather(*(self._work(last) for _ in range(WORKERS)))

    async def _work(self, last: int) -> None:
        while self.started < last:
            self.started += 1
            if self.started in self.at:
                self.at[self.started].set()
            key, draw = self._rng.choice(self._keys), self._rng.random()
            async with asyncio.timeout(OPERATION_S_MAX):
                if draw < 0.6:
                    await self._read(key)
                elif draw < 0.95:
                    await self._write(key, self._rng.randrange(VERSIONS))
                else:
                    await self._connector.delete([key])

    async def _read(self, key: bytes) -> None:
        nbytes = nbytes_of(key)
        buffer = bytearray(nbytes)
        request = ReadRequest(key, 0, nbytes)
        (outcome,) = await self._connector.read([request], [memoryview(buffer)])
        if outcome == nbytes:
            assert bytes(buffer) in [payload_of(key, nbytes, n) for n in range(VERSIONS)]
        self._count("hit" if outcome == nbytes else "miss", outcome)

    async def _write(self, key: bytes, version: int) -> None:
        data = payload_of(key, nbytes_of(key), version)
        (outcome,) = await self._connector.write([WriteItem(key, memoryview(data))])
        self._count("written", outcome)

    def _count(self, good: str, outcome: object) -> None:
        assert not isinstance(outcome, ConnectorError) or isinstance(
            outcome, ConnectorUnavailableError | ConnectorTimeoutError
        ), outcome
        self.outcomes["error" if isinstance(outcome, ConnectorError) else good] += 1


async def test_a_store_killed_in_the_middle_costs_misses_and_comes_back(
    server: Seaweed, rng: random.Random
) -> None:
    options = "&timeout_s=5&tries=2"
    connector = kvtier.registry.connect(url_of(server.endpoint, "place", options))
    data = payload_of(b"before", 1000)
    assert await connector.write([WriteItem(b"before", memoryview(data))]) == [None]
    traffic = Traffic(connector, rng)
    middle = traffic.at[OPERATIONS // 3] = asyncio.Event()
    running = asyncio.ensure_future(traffic.run(OPERATIONS))
    await middle.wait()
    assert traffic.outcomes["hit"]
    assert traffic.errors() == 0
    server.kill()
    late = traffic.at[2 * OPERATIONS // 3] = asyncio.Event()
    await late.wait()
    assert traffic.errors() > 0
    await asyncio.to_thread(server.start)
    await running
    hits, errors = traffic.outcomes["hit"], traffic.errors()
    await traffic.run(OPERATIONS + OPERATIONS // 10)
    assert traffic.errors() == errors
    assert traffic.outcomes["hit"] > hits
    assert await get_whole(connector, {b"before": 1000}) == [data]
    await connector.close()
