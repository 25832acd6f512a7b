"""A cache server that is killed in the middle of mixed operations: no wrong byte, no hang."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.errors import ConnectorError
from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.testing.connector_contract import get_whole, payload_of, put
from kvtier.testing.engine_double import wait_until
from kvtier.types import ReadRequest, WriteItem
from tests.lib.daemon import PROGRAM, daemon
from tests.lib.program import free_port

OPERATIONS = 1000
KEYS = 40
WORKERS = 6
CALL_S_MAX = 60.0


def size_of(key: bytes) -> int:
    return 1 + int.from_bytes(key[-2:], "big") * 977


class Traffic:
    """Mixed operations on a few keys; a key names one payload, as a hash of it would."""

    def __init__(self, connector: Connector, rng: random.Random) -> None:
        self._connector = connector
        self._rng = rng
        self._keys = [b"key" + number.to_bytes(2, "big") for number in range(1, KEYS + 1)]
        self._left = OPERATIONS
        self.outcomes: Counter[str] = Counter()
        self.done = 0
        self.reached = asyncio.Event()

    async def run(self, *, stop_after: int) -> None:
        self._left = stop_after
        await asyncio.gather(*(self._work() for _ in range(WORKERS)))

    async def _work(self) -> None:
        while self._left > 0:
            self._left -= 1
            # Nothing hangs: each call ends by itself, well within its own time limit.
            async with asyncio.timeout(CALL_S_MAX):
                await self._one()
            self.done += 1
            if self.done >= OPERATIONS // 3:
                self.reached.set()

    async def _one(self) -> None:
        keys = self._rng.sample(self._keys, 4)
        kind = self._rng.choices(("write", "read", "contains", "delete"), (5, 9, 2, 1))[0]
        if kind == "write":
            items = [WriteItem(key, memoryview(payload_of(key, size_of(key)))) for key in keys]
            for outcome in await self._connector.write(items):
                self.outcomes["unwritten" if outcome else "written"] += 1
        elif kind == "read":
            await self._read(keys)
        elif kind == "contains":
            assert len(await self._connector.contains(keys)) == len(keys)
        else:
            await self._connector.delete(keys[:1])

    async def _read(self, keys: list[bytes]) -> None:
        buffers = [bytearray(size_of(key)) for key in keys]
        requests = [ReadRequest(key, 0, size_of(key)) for key in keys]
        outcomes = await self._connector.read(requests, [memoryview(each) for each in buffers])
        for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
            if isinstance(outcome, ConnectorError):
                self.outcomes["fault"] += 1
            elif outcome is None:
                self.outcomes["absent"] += 1
            else:
                assert outcome == size_of(key)
                assert bytes(buffer) == payload_of(key, size_of(key)), f"wrong bytes of {key!r}"
                self.outcomes["read"] += 1


WAYS = {"tcp": "", "unix": "&shared=no", "shared": "&shared_from=1"}


@pytest.mark.parametrize("way", WAYS)
async def test_b73_a_killed_server_gives_no_wrong_byte_and_is_found_again(
    tmp_path: Path, rng: random.Random, way: str
) -> None:
    where = f"127.0.0.1:{free_port()}" if way == "tcp" else f"unix:{tmp_path}/socket"
    listen, patient = (where,), f"timeout_s=20&connect_timeout_s=10&connections=3{WAYS[way]}"
    options = (f"--disk={tmp_path}/disk", "--disk-bytes=64MiB", "--dram=64MiB")
    with ExitStack() as servers:
        first = servers.enter_context(daemon(*options, listen=listen))
        connector = connect(f"{first.urls[0]}?{patient}")
        traffic = Traffic(connector, rng)
        running = asyncio.create_task(traffic.run(stop_after=OPERATIONS))
        await traffic.reached.wait()
        first.process.send_signal(signal.SIGKILL)
        await running
        before, traffic.outcomes = traffic.outcomes, Counter()
        # While it is away everything is a fault, at once.
        await traffic.run(stop_after=60)
        away, traffic.outcomes = traffic.outcomes, Counter()
        second = await asyncio.to_thread(servers.enter_context, daemon(*options, listen=listen))
        await traffic.run(stop_after=OPERATIONS // 2)
        after = traffic.outcomes
        counted = await asyncio.to_thread(second.connections)
        await connector.close()
    assert before["read"] > 0
    assert before["written"] > 0
    assert away["fault"] > 0
    assert not away["read"] + away["written"] + away["absent"]
    assert after["read"] > 0
    assert after["written"] > 0
    assert not after["fault"], after
    assert bool(counted["leases"]) == (way == "shared")


async def test_what_is_on_disk_outlives_the_server(tmp_path: Path) -> None:
    keys = [b"key" + number.to_bytes(2, "big") for number in range(1, 9)]
    options = (f"--disk={tmp_path}/disk", "--disk-bytes=64MiB")
    with daemon(*options) as first:
        connector = connect(first.urls[0])
        items = [WriteItem(key, memoryview(payload_of(key, size_of(key)))) for key in keys]
        assert await connector.write(items) == [None] * len(keys)
        await connector.close()
        assert first.stop() == 0
    with daemon(*options) as second:
        second.wait_until_ready()
        connector = connect(second.urls[0])
        assert await connector.contains(keys) == [True] * len(keys)
        buffers = [bytearray(size_of(key)) for key in keys]
        requests = [ReadRequest(key, 0, size_of(key)) for key in keys]
        outcomes = await connector.read(requests, [memoryview(each) for each in buffers])
        assert outcomes == [size_of(key) for key in keys]
        assert [bytes(each) for each in buffers] == [payload_of(k, size_of(k)) for k in keys]
        await connector.close()


#: The program with another wall clock, ``sys.argv[1]`` days ahead.
LATER = """
import sys, time
days, seconds, nanoseconds = int(sys.argv.pop(1)), time.time, time.time_ns
time.time = lambda: seconds() + days * 86400
time.time_ns = lambda: nanoseconds() + days * 86400 * 10**9
from kvtier.cli.main import run
run(sys.argv[1:])
"""


@pytest.mark.parametrize("days", [400, -400])
async def test_b68_objects_outlive_a_restart_whatever_the_clock_says(
    tmp_path: Path, days: int
) -> None:
    """Nothing of an object ends by the wall clock: not what was on disk, not what is new."""
    keys = [b"key" + number.to_bytes(2, "big") for number in range(1, 6)]
    options = (f"--disk={tmp_path}/disk", "--disk-bytes=64MiB")
    sizes = {key: size_of(key) for key in keys}
    objects = {key: payload_of(key, nbytes) for key, nbytes in sizes.items()}
    first = True
    for program in ((PROGRAM,), (sys.executable, "-c", LATER, str(days)), (PROGRAM,)):
        with daemon(*options, program=program) as running:
            running.wait_until_ready()
            connector = connect(running.urls[0])
            if not first:
                assert await get_whole(connector, sizes) == list(objects.values())
            first = False
            await put(connector, objects)
            assert await get_whole(connector, sizes) == list(objects.values())
            await connector.close()
            assert running.stop() == 0


async def test_b78_a_flipped_bit_on_disk_is_a_miss(tmp_path: Path) -> None:
    options = (f"--disk={tmp_path}/disk", "--disk-bytes=64MiB")
    with daemon(*options) as first:
        connector = connect(first.urls[0])
        data = payload_of(b"key", 100_000)
        assert await connector.write([WriteItem(b"key", memoryview(data))]) == [None]
        await connector.close()
        assert first.stop() == 0
    (shard,) = (tmp_path / "disk" / "shards").rglob("*.kvs")
    spoiled = bytearray(shard.read_bytes())
    spoiled[60_000] ^= 4
    shard.write_bytes(spoiled)
    with daemon(*options) as second:
        second.wait_until_ready()
        connector = connect(second.urls[0])
        request, buffer = ReadRequest(b"key", 0, 100_000), memoryview(bytearray(100_000))
        assert await connector.read([request], [buffer]) == [None]
        tiers = {tier["name"]: tier for tier in second.get("/v1/stats")["tiers"]}
        assert tiers["disk"]["corrupt_shards"] == 1
        # And it can be stored anew.
        assert await connector.write([WriteItem(b"key", memoryview(data))]) == [None]
        assert await connector.read([request], [buffer]) == [100_000]
        assert bytes(buffer) == data
        await connector.close()


async def test_an_object_that_many_ask_for_is_read_from_disk_once(tmp_path: Path) -> None:
    options = (f"--disk={tmp_path}/disk", "--disk-bytes=64MiB")
    nbytes = 8 << 20
    data = payload_of(b"key", nbytes)
    with daemon(*options) as first:
        connector = connect(first.urls[0])
        assert await connector.write([WriteItem(b"key", memoryview(data))]) == [None]
        await connector.close()
        assert first.stop() == 0
    with daemon(*options) as second:
        second.wait_until_ready()
        clients = [connect(second.urls[0]) for _ in range(4)]
        buffers = [bytearray(nbytes) for _ in clients]
        reads = [
            client.read([ReadRequest(b"key", 0, nbytes)], [memoryview(buffer)])
            for client, buffer in zip(clients, buffers, strict=True)
        ]
        assert await asyncio.gather(*reads) == [[nbytes]] * len(clients)
        assert all(buffer == data for buffer in buffers)

        def read_bytes() -> int:
            tiers = {tier["name"]: tier for tier in second.get("/v1/stats")["tiers"]}
            count: int = tiers["disk"]["read_bytes"]
            return count

        # A read is counted when it has ended, and its last section is sent before.
        wait_until(lambda: read_bytes() >= nbytes, "it is not counted")
        assert read_bytes() < 2 * nbytes
        for client in clients:
            await client.close()
