"""What the cache server answers at once, and that others have their turn between."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtier.constants import DAEMON_AT_ONCE_MAX, WIRE_SMALL_BYTES
from kvtier.types import Tier
from kvtier.wire import (
    FROM_SERVER,
    Data,
    Delete,
    Done,
    Hello,
    Lease,
    Leased,
    Message,
    Read,
    Refused,
    Release,
    Status,
    encode,
)
from kvtier.wire_parser import Parser
from kvtier_server.credentials import DEFAULT
from kvtier_server.session import Session
from tests.lib.plane import Plane, data_plane, pinned, stored, until

DATA = bytes(range(250)) * 20


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with data_plane(tmp_path, exported_to=DEFAULT) as made:
        yield made


class Kernel(asyncio.Transport):
    """A connection to a peer that takes everything, or nothing; the test sees what was written."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__({"socket": connection})
        self.taken = bytearray()
        self.writes = 0
        self.stuck = 0
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        self.taken += data
        self.writes += 1

    def get_write_buffer_size(self) -> int:
        return self.stuck

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    abort = close


class Wired:
    """A session of the plane without a loop's hand in it: bytes go in, answers come out."""

    def __init__(self, plane: Plane, connection: socket.socket) -> None:
        self.kernel = Kernel(connection)
        self.link = Session(plane.plane, unix=True).link
        self._parser = Parser(FROM_SERVER)
        self._read = 0
        self.link.connection_made(self.kernel)

    def send(self, *messages: Message) -> None:
        """Have messages arrive together."""
        data = b"".join(map(encode, messages))
        self.link.get_buffer(-1)[: len(data)] = data
        self.link.buffer_updated(len(data))

    def answers(self) -> list[Message]:
        """What was answered since the last time."""
        data = self.kernel.taken[self._read :]
        self._read += len(data)
        found = []
        while data:
            space = self._parser.buffer()
            some = min(len(space), len(data))
            space[:some] = data[:some]
            del data[:some]
            self._parser.received(some)
            while (frame := self._parser.next()) is not None:
                found.append(frame.message)
                if frame.payload_bytes:
                    self._parser.place(None)
        return found

    def close(self) -> None:
        self.link.connection_lost(None)


@pytest.fixture
async def wired(plane: Plane) -> AsyncIterator[Wired]:
    await (await stored(plane, b"key", data=DATA)).close()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = Wired(plane, theirs)
        made.send(Hello(1, 2, b""))
        assert len(made.answers()) == 1
        yield made
        made.close()


async def test_what_lies_in_memory_is_answered_before_anything_else(
    plane: Plane, wired: Wired
) -> None:
    wired.send(Lease(1, b"key"))
    (leased,) = wired.answers()
    assert isinstance(leased, Leased)
    assert plane.cache.arena[leased.offset : leased.offset + leased.nbytes] == DATA
    wired.send(Release((1,)), Read(2, b"key", 10, 100))
    assert wired.answers() == [Data(2, Status.OK, "")]
    assert wired.kernel.taken.endswith(DATA[10:110])
    assert pinned(plane) == 0
    counters = plane.plane.counters
    assert (counters.leases, counters.reads, counters.read_bytes) == (1, 2, 100)
    dram = plane.cache.stats().tiers[0]
    assert (dram.tier, dram.counters.hit_tokens) == (Tier.DRAM, 2)


@pytest.mark.parametrize("ask", [Lease(1, b"none"), Read(1, b"none", 0, 10)])
async def test_what_does_not_is_looked_for(plane: Plane, wired: Wired, ask: Lease | Read) -> None:
    wired.send(ask)
    assert not wired.answers()
    await until(lambda: plane.plane.counters.absent == 1)
    (answer,) = wired.answers()
    assert isinstance(answer, Leased | Data)
    assert answer.status is Status.ABSENT


async def test_what_is_asked_in_one_go_is_answered_in_one_go(plane: Plane, wired: Wired) -> None:
    before = wired.kernel.writes
    wired.send(Lease(1, b"key"), Read(2, b"key", 0, 9), Lease(3, b"key"))
    first, second, third = wired.answers()
    assert wired.kernel.writes == before + 1
    assert isinstance(first, Leased)
    assert isinstance(third, Leased)
    assert (first.request, second, third.request) == (1, Data(2, Status.OK, ""), 3)
    wired.send(Lease(4, b"key"), Release((9,)), Lease(5, b"key"))  # There is no lease 9.
    last, refused = wired.answers()
    assert isinstance(last, Leased)
    assert isinstance(refused, Refused)
    assert wired.kernel.closed


async def test_b55_who_asks_for_much_in_one_go_gives_way_to_others(wired: Wired) -> None:
    count = 3 * DAEMON_AT_ONCE_MAX
    wired.send(*(Lease(number, b"key") for number in range(count)))
    first = wired.answers()
    assert 0 < len(first) <= DAEMON_AT_ONCE_MAX
    rest: list[Message] = []

    def all_answered() -> bool:
        rest.extend(wired.answers())
        return len(first) + len(rest) == count

    await until(all_answered)
    numbers = [each.request for each in (*first, *rest) if isinstance(each, Leased)]
    assert sorted(numbers) == list(range(count))
    wired.send(Release(tuple(numbers)))


async def test_who_takes_no_answers_is_not_answered_at_once(plane: Plane, wired: Wired) -> None:
    """Else what waits for it would grow with what it asks for."""
    wired.kernel.stuck = WIRE_SMALL_BYTES
    wired.send(*(Lease(number, b"key") for number in range(3)))
    assert not wired.answers()
    wired.kernel.stuck = 0
    await until(lambda: pinned(plane) == 1)


async def test_what_is_long_waits_its_turn(plane: Plane, wired: Wired) -> None:
    client = await stored(plane, b"long", data=b"x" * (2 * WIRE_SMALL_BYTES))
    wired.send(Read(1, b"long", 0, 2 * WIRE_SMALL_BYTES))
    assert not wired.answers()
    await until(lambda: plane.plane.counters.reads == 1)
    assert wired.answers() == [Data(1, Status.OK, "")]
    await client.send(Delete(9, (b"long",)))
    assert await client.message() == Done(9, Status.OK, "")
    await client.close()
