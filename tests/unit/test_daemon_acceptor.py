"""Connections are let in many at a time, so that nobody waits for those that came before."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import uvloop

from kvtier.constants import DAEMON_ACCEPTS_MAX, DAEMON_HANDSHAKES_MAX
from kvtier.errors import ConfigError
from kvtier_server.acceptor import Acceptor
from tests.lib.plane import until

CLIENTS = 3 * DAEMON_ACCEPTS_MAX


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def listener(tmp_path: Path, stack: ExitStack) -> socket.socket:
    bound = stack.enter_context(socket.socket(socket.AF_UNIX))
    bound.bind(str(tmp_path / "socket"))
    return bound


class Guests(list[asyncio.BaseTransport]):
    """Who has been let in."""

    def made(self) -> asyncio.Protocol:
        return _Guest(self)

    async def leave(self) -> None:
        """Send everybody away."""
        for each in list(self):
            each.close()
        await until(lambda: not self)


class _Guest(asyncio.Protocol):
    def __init__(self, guests: Guests) -> None:
        self._guests = guests

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._guests.append(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guests.remove(self._transport)


def nobody(peer: str, why: str) -> None:
    """Nobody's handshake fails."""
    raise AssertionError(f"{peer}: {why}")


def connected(stack: ExitStack, listener: socket.socket, count: int) -> list[socket.socket]:
    """Clients whose connections wait to be let in."""
    found = [stack.enter_context(socket.socket(listener.family)) for _ in range(count)]
    for each in found:
        each.connect(listener.getsockname())
    return found


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_b55_who_connects_waits_for_few_turns_of_the_loop(
    new_loop: object, listener: socket.socket, stack: ExitStack
) -> None:
    """A loop's own server lets in one connection a turn: the last of these would wait for 192."""

    async def turns_until_all_are_in() -> int:
        guests = Guests()
        acceptor = Acceptor(listener, guests.made, None, nobody)
        connected(stack, listener, CLIENTS)
        turns = 0
        while len(guests) < CLIENTS:
            await asyncio.sleep(0)
            turns += 1
        acceptor.close()
        await acceptor.ended(10)
        await guests.leave()
        return turns

    assert callable(new_loop)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(turns_until_all_are_in()) <= 20


async def test_b108_handshakes_are_bounded(stack: ExitStack) -> None:
    """Whoever does not speak TLS holds up no more than so many; the others wait in the system."""
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    acceptor = Acceptor(listener, Guests().made, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), nobody)
    silent = connected(stack, listener, DAEMON_HANDSHAKES_MAX + 10)
    await until(lambda: acceptor.entering == DAEMON_HANDSHAKES_MAX)
    await asyncio.sleep(0)
    assert acceptor.entering == DAEMON_HANDSHAKES_MAX
    for each in silent[:DAEMON_HANDSHAKES_MAX]:
        each.close()
    await until(lambda: acceptor.entering == 10)
    acceptor.close()
    for each in silent[DAEMON_HANDSHAKES_MAX:]:
        each.close()
    await until(lambda: acceptor.entering == 0)


class _Full(socket.socket):
    """A listener that finds no descriptor left, so many times."""

    times = 1

    def accept(self) -> tuple[socket.socket, object]:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


async def test_without_descriptors_it_goes_on_when_there_are_some(
    tmp_path: Path, stack: ExitStack
) -> None:
    listener = stack.enter_context(_Full(socket.AF_UNIX))
    listener.bind(str(tmp_path / "socket"))
    guests = Guests()
    acceptor = Acceptor(listener, guests.made, None, nobody)
    connected(stack, listener, 1)
    await until(lambda: len(guests) == 1)
    assert listener.times == 0
    acceptor.close()
    await guests.leave()


async def test_who_is_not_the_first_to_listen_is_told(stack: ExitStack) -> None:
    """Two that bind before either listens both may."""
    first, second = (stack.enter_context(socket.socket()) for _ in range(2))
    for each in (first, second):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    first.bind(("127.0.0.1", 0))
    second.bind(first.getsockname())
    acceptor = Acceptor(first, Guests().made, None, nobody)
    with pytest.raises(ConfigError, match=f"listen at .*{first.getsockname()[1]}.*: Address"):
        Acceptor(second, Guests().made, None, nobody)
    acceptor.close()


async def test_who_comes_after_the_end_is_refused(
    listener: socket.socket, stack: ExitStack
) -> None:
    acceptor = Acceptor(listener, Guests().made, None, nobody)
    acceptor.close()
    acceptor.close()
    with pytest.raises(ConnectionRefusedError):
        connected(stack, listener, 1)
