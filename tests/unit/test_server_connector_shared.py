"""The connector of the cache server where memory is shared: what it leases, stages and gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtier.constants import DAEMON_STAGINGS_MAX, MIB, SHARED_BYTES_MIN
from kvtier.errors import ConnectorRefusedError, ConnectorUnavailableError
from kvtier.interfaces import Lending, LendOutcome, Loan, ReadOutcome
from kvtier.registry import connect
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import Done, Status, Write
from kvtier.wire_shared import copied
from kvtier_server.credentials import DEFAULT
from tests.lib.plane import Plane, data_plane, leased, pinned, stored, until

DATA = bytes(range(256)) * 512


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with data_plane(tmp_path, exported_to=DEFAULT) as made:
        yield made


def url_of(plane: Plane, options: str = "") -> str:
    return f"kvtier+unix://{plane.path}?{options}"


async def read(plane: Plane, options: str = "") -> tuple[ReadOutcome, bytes]:
    connector = connect(url_of(plane, options))
    buffer = memoryview(bytearray(len(DATA)))
    (outcome,) = await connector.read([ReadRequest(b"key", 0, len(DATA))], [buffer])
    await connector.close()
    return outcome, bytes(buffer)


async def test_a_connector_reads_what_it_leased_and_lets_go(plane: Plane) -> None:
    client = await stored(plane, b"key", data=DATA)
    assert await read(plane) == (len(DATA), DATA)
    counters = plane.plane.counters
    assert (counters.reads, counters.leases, counters.read_bytes) == (1, 1, 0)
    await until(lambda: pinned(plane) == 0)
    assert await read(plane, "shared=no") == (len(DATA), DATA)
    assert (counters.reads, counters.leases, counters.read_bytes) == (2, 1, len(DATA))
    await client.close()


async def test_a_connector_whose_server_lets_go_while_it_reads_has_read_nothing(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes may be another object's by then: they do not count."""
    client = await stored(plane, b"key", data=DATA)

    async def copied_late(source: memoryview, target: memoryview) -> None:
        for session in list(plane.plane.sessions):
            session.link.abort()
        await until(lambda: pinned(plane) == 0)
        await copied(source, target)

    monkeypatch.setattr("kvtier_connectors.server.shared.copied", copied_late)
    outcome, _ = await read(plane)
    assert isinstance(outcome, ConnectorUnavailableError)
    await client.close()


async def test_a_connector_that_may_lease_no_more_reads_by_the_socket(plane: Plane) -> None:
    greedy = await stored(plane, b"key", *(b"k%d" % n for n in range(8)), data=DATA)
    for number in range(8):
        large = b"x" * (4 * MIB - 8192)
        await greedy.send(Write(number, b"k%d" % number), large)
        assert await greedy.message() == Done(number, Status.OK, "")
        assert (await leased(greedy, number, b"k%d" % number)).status is Status.OK
    assert await read(plane) == (len(DATA), DATA)
    counters = plane.plane.counters
    assert counters.unleased == 1
    assert counters.reads == counters.leases + 1
    assert counters.read_bytes == len(DATA)
    await greedy.close()


async def test_a_cancelled_read_keeps_no_lease(plane: Plane) -> None:
    client = await stored(plane, b"key", data=DATA)
    connector = connect(url_of(plane))
    buffer = memoryview(bytearray(len(DATA)))
    for turns in range(12):
        reading = asyncio.create_task(connector.read([ReadRequest(b"key", 0, len(DATA))], [buffer]))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
    await until(lambda: pinned(plane) == 0)
    # And the connector goes on.
    assert await connector.read([ReadRequest(b"key", 0, len(DATA))], [buffer]) == [len(DATA)]
    await connector.close()
    await client.close()


async def test_an_upload_that_was_given_up_keeps_what_it_staged(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may be reading it still: the next upload is staged elsewhere."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def copied_late(source: memoryview, target: memoryview) -> None:
        begun.set()
        await go_on.wait()
        await copied(source, target)

    monkeypatch.setattr("kvtier_server.shared.copied", copied_late)
    connector = connect(url_of(plane))
    first, second = (memoryview(each * len(DATA)) for each in (b"1", b"2"))
    given_up = asyncio.create_task(connector.write([WriteItem(b"first", first)]))
    await begun.wait()
    given_up.cancel()
    await asyncio.wait({given_up})
    writing = asyncio.create_task(connector.write([WriteItem(b"second", second)]))
    await until(lambda: plane.cache.stats().stores_inflight == 2)
    go_on.set()
    assert await writing == [None]
    await until(lambda: plane.plane.counters.taken == 2)
    buffer = memoryview(bytearray(len(DATA)))
    for key, data in ((b"first", first), (b"second", second)):
        assert await connector.read([ReadRequest(key, 0, len(data))], [buffer]) == [len(data)]
        assert buffer == data
    await connector.close()


async def test_a_server_that_shares_nothing_is_used_by_the_socket(tmp_path: Path) -> None:
    async with data_plane(tmp_path) as plain:
        connector = connect(url_of(plain, "shared_from=0"))
        assert await connector.write([WriteItem(b"key", memoryview(DATA))]) == [None]
        await connector.close()
        assert await read(plain, "shared_from=0") == (len(DATA), DATA)
        assert plain.plane.counters.leases + plain.plane.counters.taken == 0


async def test_more_files_than_there_may_be_are_done_without(plane: Plane) -> None:
    connectors = [connect(url_of(plane)) for _ in range(DAEMON_STAGINGS_MAX + 2)]
    for number, connector in enumerate(connectors):
        item = WriteItem(b"key %d" % number, memoryview(DATA))
        assert await connector.write([item]) == [None]
    counters = plane.plane.counters
    assert (counters.writes, counters.taken) == (DAEMON_STAGINGS_MAX + 2, DAEMON_STAGINGS_MAX)
    for connector in connectors:
        await connector.close()


async def test_what_is_small_goes_by_the_socket(plane: Plane) -> None:
    connector = connect(url_of(plane))
    for nbytes, shared in ((SHARED_BYTES_MIN - 1, 0), (SHARED_BYTES_MIN, 1)):
        data, buffer = memoryview(b"x" * nbytes), memoryview(bytearray(nbytes))
        assert await connector.write([WriteItem(b"key", data)]) == [None]
        assert await connector.read([ReadRequest(b"key", 0, nbytes)], [buffer]) == [nbytes]
        assert buffer == data
        counters = plane.plane.counters
        assert (counters.taken, counters.leases) == (shared, shared)
    await connector.close()


# Loans


async def lent(plane: Plane, *keys: bytes, options: str = "") -> tuple[Lending, list[LendOutcome]]:
    """A connector, and what it says to a wish for loans."""
    connector = connect(url_of(plane, options))
    assert isinstance(connector, Lending)
    return connector, await connector.lend(keys)


async def test_what_is_lent_is_the_servers_memory_until_it_is_given_back(plane: Plane) -> None:
    client = await stored(plane, b"key", b"other", data=DATA)
    connector, outcomes = await lent(plane, b"key", b"none", b"other")
    first, absent, second = outcomes
    assert absent is None
    assert isinstance(first, Loan)
    assert isinstance(second, Loan)
    for loan in (first, second):
        assert bytes(loan.view) == DATA
        assert loan.view.readonly
        assert loan.holds
    assert pinned(plane) == 2
    assert plane.plane.counters.read_bytes == 0
    first.release()
    await until(lambda: pinned(plane) == 1)
    await asyncio.to_thread(second.release)
    await until(lambda: pinned(plane) == 0)
    await connector.close()  # type: ignore[attr-defined]
    await client.close()


async def test_what_is_replaced_while_it_is_lent_keeps_its_bytes(plane: Plane) -> None:
    client = await stored(plane, b"key", data=DATA)
    connector, (loan,) = await lent(plane, b"key")
    assert isinstance(loan, Loan)
    await client.send(Write(1, b"key"), bytes(len(DATA)))
    assert await client.message() == Done(1, Status.OK, "")
    assert loan.holds
    assert bytes(loan.view) == DATA
    loan.release()
    await connector.close()  # type: ignore[attr-defined]
    await client.close()


async def test_a_loan_of_a_server_that_hung_up_does_not_hold(plane: Plane) -> None:
    client = await stored(plane, b"key", data=DATA)
    connector, (loan,) = await lent(plane, b"key")
    assert isinstance(loan, Loan)
    for session in list(plane.plane.sessions):
        session.link.abort()
    await until(lambda: pinned(plane) == 0)
    assert not loan.holds
    assert len(loan.view) == len(DATA), "it may be looked at all the same"
    loan.release()
    await connector.close()  # type: ignore[attr-defined]
    await client.close()


async def test_a_loan_does_not_hold_once_its_connector_is_closed(plane: Plane) -> None:
    client = await stored(plane, b"key", data=DATA)
    connector, (loan,) = await lent(plane, b"key")
    assert isinstance(loan, Loan)
    await connector.close()  # type: ignore[attr-defined]
    assert not loan.holds
    loan.release()
    await until(lambda: pinned(plane) == 0)
    await client.close()


async def test_a_server_that_shares_nothing_lends_nothing(plane: Plane) -> None:
    client = await stored(plane, b"key", data=DATA)
    connector, (outcome,) = await lent(plane, b"key", options="shared=no")
    assert isinstance(outcome, ConnectorRefusedError)
    await connector.close()  # type: ignore[attr-defined]
    await client.close()
