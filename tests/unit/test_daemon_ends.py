"""A connection that ends at any moment gives back all that its requests have taken."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvtier.constants import DAEMON_BYTES_MAX, DAEMON_SHARE_BYTES, MIB, WIRE_STALL_S_MAX
from kvtier.wire import Area, Contains, Data, Done, Map, Read, Status, Write, encode
from kvtier_server.credentials import DEFAULT
from kvtier_server.session import Session
from tests.lib.plane import Plane, data_plane, until

SECOND = 1.0


class Taker:
    """Somebody who has taken as much as there is, and who reads nothing."""

    def __init__(self) -> None:
        self.link = self

    def pause(self) -> None:
        """See ``Brake``."""

    def resume(self) -> None:
        """See ``Brake``."""


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with data_plane(tmp_path, exported_to=DEFAULT) as made:
        yield made


def lose(session: Session) -> None:
    """Have the connection fail, as it does when the other end has reset it."""
    session.link.transport.abort()


def go_on(plane: Plane, taker: Taker) -> None:
    """Let whoever was stopped read on."""
    plane.plane.budget.give(taker, DAEMON_BYTES_MAX)


LATE = {
    "a read": encode(Read(2, b"key", 0, MIB)),
    "an upload": encode(Write(2, b"key"), 300) + b"x" * 300,
    "a lookup": encode(Contains(2, (b"key",))),
}


@pytest.mark.parametrize("lost_first", [True, False], ids=["lost, then read", "read, then lost"])
@pytest.mark.parametrize("name", LATE)
async def test_b92_a_request_that_ends_before_it_begins_gives_back_what_it_took(
    plane: Plane, name: str, *, lost_first: bool
) -> None:
    """A connection that is stopped fails; what it has sent is looked at in that very moment."""
    taker = Taker()
    plane.plane.budget.take(taker, DAEMON_BYTES_MAX)
    client = await plane.client()
    client.writer.write(encode(Read(1, b"none", 0, DAEMON_SHARE_BYTES + 1)) + LATE[name])
    assert await client.message() == Data(1, Status.ABSENT, "")
    assert plane.plane.budget.stopped_count == 1
    (session,) = plane.plane.sessions
    steps: list[Callable[[], None]] = [lambda: lose(session), lambda: go_on(plane, taker)]
    for step in steps if lost_first else reversed(steps):
        step()
    await until(lambda: plane.plane.connections == 0)
    await until(lambda: plane.plane.budget.used_bytes == 0)
    assert plane.cache.stats().stores_inflight == 0
    # Nor is its key kept from others.
    other = await plane.client()
    await other.send(Write(3, b"key"), b"another one's")
    assert await other.message() == Done(3, Status.OK, "")
    await other.close()
    await client.close()


async def test_who_is_sent_away_and_takes_nothing_more_is_cut_off(plane: Plane) -> None:
    """What nobody reads keeps no connection open for ever."""
    client = await plane.client()
    (session,) = plane.plane.sessions
    session.link.transport.write(bytes(4 * MIB))
    session.refuse("go away")
    plane.look(WIRE_STALL_S_MAX - SECOND)
    await asyncio.sleep(0)
    assert plane.plane.connections == 1
    plane.look(WIRE_STALL_S_MAX + SECOND)
    await until(lambda: plane.plane.connections == 0)
    await client.close()


async def test_a_descriptor_that_cannot_be_sent_ends_one_connection(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that others ask for and never take count for all: the system may take no more."""
    other = await plane.client(version=2)
    client = await plane.client(version=2)

    def too_many(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, "too many references")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", too_many)
        await client.send(Map(1, Area.STAGING))
        assert await client.frame() is None
    await other.send(Write(2, b"key"), b"sound")
    assert await other.message() == Done(2, Status.OK, "")
    assert not caplog.records, "it is no bug"
    await client.close()
    await other.close()
