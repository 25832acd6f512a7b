"""How many connections the client of the cache server opens, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvtier.errors import ConnectorUnavailableError
from kvtier.registry import connect
from kvtier.types import ReadRequest
from kvtier.wire import Data, Read, Refused, Status
from tests.lib.scripted_server import Peer, scripted

NBYTES = 1000


async def test_many_callers_share_one_attempt_to_connect(tmp_path: Path) -> None:
    connector = connect(f"kvtier+unix://{tmp_path}/nobody?connections=2")
    buffers = [memoryview(bytearray(1)) for _ in range(50)]
    outcomes = await connector.read([ReadRequest(b"key", 0, 1)] * 50, buffers)
    assert all(isinstance(outcome, ConnectorUnavailableError) for outcome in outcomes)
    assert len({id(outcome) for outcome in outcomes}) == 1
    await connector.close()


async def test_a_connection_that_cannot_be_had_fails_nobody_who_has_one(tmp_path: Path) -> None:
    """Nor is a server at its limit asked for one by each who finds all others busy."""
    busy, turned_away = asyncio.Event(), asyncio.Event()
    refused = 0

    async def served(peer: Peer) -> None:
        await peer.welcome()
        first = await peer.take()
        assert isinstance(first, Read)
        busy.set()
        for _ in range(3):
            asked = await peer.take()
            assert isinstance(asked, Read)
            peer.send(Data(asked.request, Status.OK, ""), b"1" * NBYTES)
        peer.send(Data(first.request, Status.OK, ""), b"1" * NBYTES)
        await peer.take()

    async def full(peer: Peer) -> None:
        nonlocal refused
        refused += 1
        await peer.take()
        peer.send(Refused(Status.UNAVAILABLE, "all connections are taken"))
        peer.close()
        turned_away.set()

    async with scripted(tmp_path, served, full) as url:
        connector = connect(url.replace("connections=1", "connections=2"))
        request, buffer = ReadRequest(b"key", 0, NBYTES), memoryview(bytearray(NBYTES))
        first = asyncio.create_task(connector.read([request], [buffer]))
        await busy.wait()
        for _ in range(3):
            other = memoryview(bytearray(NBYTES))
            assert await connector.read([request], [other]) == [NBYTES]
            await turned_away.wait()
        assert await first == [NBYTES]
        await connector.close()
    assert refused == 1


async def test_a_server_that_is_back_is_asked_for_all_connections_at_once(tmp_path: Path) -> None:
    busy, both = asyncio.Event(), asyncio.Event()

    async def away(peer: Peer) -> None:
        peer.close()

    async def served(peer: Peer) -> None:
        await peer.welcome()
        asked = await peer.take()
        assert isinstance(asked, Read)
        (both if busy.is_set() else busy).set()
        await both.wait()
        peer.send(Data(asked.request, Status.OK, ""), b"1" * NBYTES)
        await peer.take()

    async with scripted(tmp_path, away, served, timeout_s=5.0) as url:
        connector = connect(url.replace("connections=1", "connections=2"))
        request, buffers = ReadRequest(b"key", 0, NBYTES), [bytearray(NBYTES) for _ in range(2)]
        (fault,) = await connector.read([request], [memoryview(buffers[0])])
        assert isinstance(fault, ConnectorUnavailableError)
        first = asyncio.create_task(connector.read([request], [memoryview(buffers[0])]))
        await busy.wait()
        assert await connector.read([request], [memoryview(buffers[1])]) == [NBYTES]
        assert await first == [NBYTES]
        await connector.close()
