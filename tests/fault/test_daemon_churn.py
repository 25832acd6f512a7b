"""A cache server whose clients die at random in the middle of load: nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from pathlib import Path

import pytest

from kvtier.registry import connect
from kvtier.testing.connector_contract import payload_of
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import Area, Contains, Lease, Read, Take, Write
from tests.lib.daemon import Daemon, daemon
from tests.lib.wire_client import WireClient

HONEST = 6
DYING = 4
DEATHS = 30
NBYTES = 300_000
KEYS = [b"key %d" % number for number in range(60)]
GROWTH_BYTES_MAX = 48 << 20


def resident_bytes(server: Daemon) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * 4096


def die(url: str, draws: random.Random) -> None:
    """Ask for something, take as much of the answer as it happens, and be gone without a word."""
    shares = url.startswith("kvtier+unix")
    client = WireClient(url, receive_bytes=16_384).hello(version=2 if shares else 1)
    kind = draws.randrange(5 if shares else 3)
    key = draws.choice(KEYS)
    if kind == 0:
        sent = draws.randrange(NBYTES)
        client.send(Write(1, key), payload_of(key, NBYTES)[:sent], announced=NBYTES)
    elif kind == 1:
        for number in range(draws.randrange(1, 20)):
            client.send(Read(number, key, 0, NBYTES))
    elif kind == 2:
        client.send(Contains(1, tuple(KEYS)))
    elif kind == 3:
        for number in range(draws.randrange(1, 20)):
            client.send(Lease(number, key))
    else:
        mapped, descriptors = client.map(Area.STAGING)
        client.send(Take(1, b"staged", mapped.region, 0, NBYTES))
        for descriptor in descriptors:
            os.close(descriptor)
    # A reset, as when a process is killed with bytes unread.
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


async def be_honest(url: str, draws: random.Random, until: asyncio.Event) -> int:
    connector = connect(f"{url}?timeout_s=30&connect_timeout_s=30&connections=2")
    buffer, right = bytearray(NBYTES), 0
    while not until.is_set():
        key = draws.choice(KEYS)
        data = payload_of(key, NBYTES)
        assert await connector.write([WriteItem(key, memoryview(data))]) == [None]
        (outcome,) = await connector.read([ReadRequest(key, 0, NBYTES)], [memoryview(buffer)])
        # Somebody may be replacing it; then it is a miss.
        assert outcome in {None, NBYTES}, outcome
        if outcome is not None:
            assert buffer == data
            right += 1
    await connector.close()
    return right


@pytest.mark.parametrize("way", ["socket", "shared"])
async def test_b95_clients_that_die_under_load_leave_nothing(
    tmp_path: Path, rng: random.Random, scale: int, way: str
) -> None:
    options = (f"--disk={tmp_path}/disk", "--disk-bytes=64MiB", "--dram=64MiB")
    where = f"unix:{tmp_path}/socket" if way == "shared" else "127.0.0.1:0"
    with daemon(*options, listen=(where,)) as server:
        (url,) = server.urls
        over = asyncio.Event()
        honest = [
            asyncio.create_task(be_honest(url, random.Random(rng.random()), over))
            for _ in range(HONEST)
        ]

        async def deaths(draws: random.Random, count: int) -> None:
            for _ in range(count):
                await asyncio.to_thread(die, url, draws)

        async def all_die(count: int) -> None:
            await asyncio.gather(
                *(deaths(random.Random(rng.random()), count) for _ in range(DYING))
            )

        await all_die(DEATHS // 3)
        before = resident_bytes(server)
        await all_die(DEATHS * scale)
        grown = resident_bytes(server) - before
        over.set()
        right = await asyncio.gather(*honest)
        assert all(right)
        server.wait_until_nothing_is_held()
        figures = server.connections()
        assert (figures["leases"] > 0) == (way == "shared")
        assert figures["malformed"] == 0
        assert figures["accepted"] >= DYING * DEATHS * scale
        assert grown < GROWTH_BYTES_MAX
        assert server.stop() == 0
