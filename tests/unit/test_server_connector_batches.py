"""What the cache server's connector asks for in one go: answers as they come, outcomes in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from kvtier.constants import (
    DAEMON_AT_ONCE_MAX,
    SHARED_BYTES_MIN,
    SHARED_PIECE_BYTES,
    WIRE_KEY_BYTES_MAX,
)
from kvtier.errors import ConnectorRefusedError, ConnectorTimeoutError, ConnectorUnavailableError
from kvtier.interfaces import Lending, Loan
from kvtier.registry import connect
from kvtier.types import ReadRequest
from kvtier.wire import Contains, Delete, Found
from kvtier_connectors.server.line import Line
from kvtier_connectors.server.settings import parse_url
from kvtier_server.credentials import DEFAULT
from tests.lib.plane import Plane, data_plane, pinned, stored, until
from tests.lib.scripted_server import Peer, scripted

DATA = bytes(range(256)) * (2 * SHARED_BYTES_MIN // 256)
KEYS = [b"key %d" % number for number in range(DAEMON_AT_ONCE_MAX + 4)]


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with data_plane(tmp_path, exported_to=DEFAULT) as made:
        yield made


async def test_a_batch_is_leased_on_one_connection(plane: Plane) -> None:
    client = await stored(plane, *KEYS, data=DATA)
    counters = plane.plane.counters
    before = counters.accepted
    connector = connect(f"kvtier+unix://{plane.path}")
    batch = KEYS[:DAEMON_AT_ONCE_MAX]
    into = [memoryview(bytearray(len(DATA))) for _ in batch]
    outcomes = await connector.read([ReadRequest(key, 0, len(DATA)) for key in batch], into)
    assert outcomes == [len(DATA)] * len(batch)
    assert all(each == DATA for each in into)
    assert counters.accepted == before + 2  # One to ask on, and one that the file came by.
    assert counters.leases == len(batch)
    await until(lambda: pinned(plane) == 0)
    await connector.close()
    await client.close()


async def test_outcomes_are_in_order_whatever_way_each_is_read(plane: Plane) -> None:
    client = await stored(plane, *KEYS, data=DATA)
    connector = connect(f"kvtier+unix://{plane.path}")
    requests = [ReadRequest(key, 0, len(DATA)) for key in KEYS]
    requests[1] = ReadRequest(KEYS[1], 7, 100)
    requests[3] = ReadRequest(b"nothing there", 0, len(DATA))
    requests[5] = ReadRequest(b"x" * (WIRE_KEY_BYTES_MAX + 1), 0, len(DATA))
    requests[8] = ReadRequest(KEYS[8], len(DATA) - 9, len(DATA))
    into = [memoryview(bytearray(each.nbytes)) for each in requests]
    outcomes = await connector.read(requests, into)
    assert isinstance(outcomes.pop(5), ConnectorRefusedError)
    assert outcomes.pop(3) is None
    expected = [len(DATA)] * len(outcomes)
    expected[1], expected[6] = 100, 9
    assert outcomes == expected
    assert into[1] == DATA[7:107]
    assert into[8][:9] == DATA[-9:]
    assert all(into[index] == DATA for index in range(9, len(KEYS)))
    await until(lambda: pinned(plane) == 0)
    await connector.close()
    await client.close()


async def test_loans_are_in_order_and_each_is_given_back_alone(plane: Plane) -> None:
    client = await stored(plane, *KEYS[1:], data=DATA)
    connector = connect(f"kvtier+unix://{plane.path}")
    assert isinstance(connector, Lending)
    nothing, *loans = await connector.lend(KEYS)
    assert nothing is None
    assert pinned(plane) == len(loans) == len(KEYS) - 1
    for left, loan in reversed([*enumerate(loans)]):
        assert isinstance(loan, Loan)
        assert loan.view == DATA
        loan.release()
        await until(lambda left=left: pinned(plane) == left)  # type: ignore[misc]
    await connector.close()
    await client.close()


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("count", [1, 3])
async def test_what_is_given_up_keeps_no_lease(plane: Plane, count: int, *, lends: bool) -> None:
    """At whatever turn of the loop: some is asked for then, some answered, some half copied."""
    batch, data = KEYS[:count], DATA * (3 * SHARED_PIECE_BYTES // len(DATA))
    client = await stored(plane, *batch, data=data)
    connector = connect(f"kvtier+unix://{plane.path}")
    requests = [ReadRequest(key, 0, len(data)) for key in batch]
    into = [memoryview(bytearray(len(data))) for _ in batch]
    assert isinstance(connector, Lending)
    assert await connector.read(requests, into) == [len(data)] * len(batch)
    await until(lambda: pinned(plane) == 0)
    accepted, leased = plane.plane.counters.accepted, 0
    for turns in range(24):
        work: Coroutine[Any, Any, Sequence[object]] = (
            connector.lend(batch) if lends else connector.read(requests, into)
        )
        call = asyncio.create_task(work)
        for _ in range(turns):
            await asyncio.sleep(0)
        leased += pinned(plane) > 0 and not call.done()
        call.cancel()
        await asyncio.wait({call})
        for loan in [] if call.cancelled() else call.result():
            if isinstance(loan, Loan):
                loan.release()
        await until(lambda: pinned(plane) == 0)
    assert leased
    assert plane.plane.counters.accepted == accepted  # None was released twice.
    await connector.close()
    await client.close()


async def test_answers_are_given_as_they_come(tmp_path: Path) -> None:
    taken = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.welcome()
        assert [await peer.take(), await peer.take()] == [
            Contains(1, (b"a",)),
            Contains(2, (b"b",)),
        ]
        peer.send(Found(2, (True,)))
        await taken.wait()
        peer.send(Found(1, (False,)))
        await peer.take()

    async with scripted(tmp_path, script) as url:
        line = Line(parse_url(url))
        await line.open()
        messages = {1: Contains(1, (b"a",)), 2: Contains(2, (b"b",))}
        async with aclosing(line.ask_each(messages)) as answers:
            assert await anext(answers) == (2, Found(2, (True,)))
            taken.set()
            assert await anext(answers) == (1, Found(1, (False,)))
            assert await anext(answers, None) is None
        assert not line.load
        line.close()


async def test_what_has_no_answer_is_a_fault_of_its_own(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        await peer.take()
        await peer.take()
        peer.send(Found(1, (True,)))
        peer.close()

    async with scripted(tmp_path, script) as url:
        line = Line(parse_url(url))
        await line.open()
        messages = {1: Contains(1, (b"a",)), 2: Contains(2, (b"b",))}
        async with aclosing(line.ask_each(messages)) as answers:
            found = {number: answer async for number, answer in answers}
        assert found[1] == Found(1, (True,))
        assert isinstance(found[2], ConnectorUnavailableError)
        assert not line.load


async def test_each_request_has_its_own_deadline_though_there_is_one_timer(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome()
        while isinstance(asked := await peer.take(), Contains):
            peer.send(Found(asked.request, (True,)))
        await peer.take()  # Something else is not answered, nor is anything then.

    async with scripted(tmp_path, script, timeout_s=0.3) as url:
        line, now = Line(parse_url(url)), asyncio.get_running_loop().time
        await line.open()
        began_s, number = now(), 0
        while now() - began_s < 0.1:  # The timer stands for the first of these.
            assert (await line.ask(Contains(number, (b"a",)), number))[0] == Found(number, (True,))
            number += 1
        asked_s = now()
        with pytest.raises(ConnectorTimeoutError):
            await line.ask(Delete(number, (b"b",)), number)
        assert now() - asked_s > 0.29
        assert not line.usable  # It has said nothing for so long.
