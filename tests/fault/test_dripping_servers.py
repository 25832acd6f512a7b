"""Servers that are never silent and never done: every call of a connector ends all the same."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

import kvtier.registry
from kvtier.constants import MIB, WIRE_BYTES_PER_S_MIN
from kvtier.errors import ConnectorError
from kvtier.interfaces import Connector, Listable
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import WIRE_VERSION_SOCKET, Data, Status, Welcome, encode
from kvtier_connectors import threads
from tests.lib.opened import Opened

#: How often a byte goes, and how long silence may last: never so long.
PACE_S: Final = 0.01
SILENCE_S: Final = 0.08
NBYTES: Final = 4 * MIB
KEY: Final = b"k" * 32

Talk = Callable[["Dripping", socket.socket], None]


@dataclass
class Dripping:
    """A server that talks to each connection as it is told, and until it is closed."""

    listener: socket.socket
    talk: Talk
    over: threading.Event = field(default_factory=threading.Event)
    talks: list[threading.Thread] = field(default_factory=list)

    def run(self) -> None:
        while not self.over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = self.listener.accept()
                self.talks.append(threading.Thread(target=self._talk, args=(connection,)))
                self.talks[-1].start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self.talk(self, connection)

    def drip(self, connection: socket.socket, data: bytes) -> None:
        """Send a byte at a time, the last one again and again."""
        for byte in data:
            connection.send(bytes([byte]))
            self.over.wait(PACE_S)
        while not self.over.wait(PACE_S):
            connection.send(data[-1:])

    def sip(self, connection: socket.socket) -> None:
        """Take a byte at a time."""
        while not self.over.wait(PACE_S):
            connection.recv(1)


@pytest.fixture
def dripping(tmp_path: Path) -> Iterator[Callable[[Talk], str]]:
    """Start a server; returns the path of its socket."""
    running: list[tuple[Dripping, threading.Thread]] = []

    def start(talk: Talk) -> str:
        listener = socket.socket(socket.AF_UNIX)
        path = str(tmp_path / f"server{len(running)}")
        listener.bind(path)
        listener.listen()
        made = Dripping(listener, talk)
        thread = threading.Thread(target=made.run)
        thread.start()
        running.append((made, thread))
        return path

    yield start
    for made, thread in running:
        made.over.set()
        with contextlib.suppress(OSError):
            made.listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        made.listener.close()
        for talk in made.talks:
            talk.join()


@pytest.fixture(autouse=True)
def _few_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SILENCES_MAX", 1)


async def reading(connector: Connector) -> bool:
    """Each tells whether the call has come to nothing."""
    (outcome,) = await connector.read([ReadRequest(KEY, 0, 1000)], [memoryview(bytearray(1000))])
    return isinstance(outcome, ConnectorError)


async def writing(connector: Connector) -> bool:
    (outcome,) = await connector.write([WriteItem(KEY, memoryview(bytes(1000)))])
    return isinstance(outcome, ConnectorError)


async def looking(connector: Connector) -> bool:
    return await connector.contains([KEY]) == [False]


async def deleting(connector: Connector) -> bool:
    await connector.delete([KEY])
    return True


async def listing(connector: Connector) -> bool:
    assert isinstance(connector, Listable)
    infos: AsyncIterator[object] = connector.list(b"")
    with pytest.raises(ConnectorError):
        await anext(infos)
    return True


CALLS = [reading, writing, looking, deleting]


async def ends(connector: Connector, call: Callable[[Connector], object]) -> None:
    """The call ends, and so does the next one: no thread is lost to the server."""
    for _ in range(6):  # More than a connector has threads.
        async with asyncio.timeout(20):
            assert await call(connector)  # type: ignore[misc]


def value(server: Dripping, connection: socket.socket) -> None:
    connection.recv(1 << 16)
    server.drip(connection, b"$400000000\r\nKV")


def line(server: Dripping, connection: socket.socket) -> None:
    connection.recv(1 << 16)
    server.drip(connection, b"-ERR and so on")


def thirsty(server: Dripping, connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    server.sip(connection)


@pytest.mark.parametrize("call", [*CALLS, listing])
@pytest.mark.parametrize("talk", [value, line])
async def test_a_redis_that_sends_a_byte_now_and_then(
    dripping: Callable[[Talk], str], opened: Opened, talk: Talk, call: Callable[[Connector], object]
) -> None:
    options = f"timeout_s={SILENCE_S}&connect_timeout_s={SILENCE_S}"
    await ends(opened(kvtier.registry.connect(f"redis+unix://{dripping(talk)}?{options}")), call)


@pytest.mark.parametrize("call", [reading, listing])
async def test_a_redis_that_never_ends_to_let_us_in(
    dripping: Callable[[Talk], str], opened: Opened, call: Callable[[Connector], object]
) -> None:
    options = f"timeout_s={SILENCE_S}&connect_timeout_s={SILENCE_S}"
    url = f"redis+unix://:password@/{dripping(line)}?{options}".replace("@//", "@/")
    await ends(opened(kvtier.registry.connect(url)), call)


async def test_a_redis_that_takes_a_byte_now_and_then(
    dripping: Callable[[Talk], str], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "WIRE_BYTES_PER_S_MIN", 100 * NBYTES)
    options = f"timeout_s={SILENCE_S}&connect_timeout_s={SILENCE_S}"
    connector = opened(kvtier.registry.connect(f"redis+unix://{dripping(thirsty)}?{options}"))
    async with asyncio.timeout(20):
        (outcome,) = await connector.write([WriteItem(KEY, memoryview(bytes(NBYTES)))])
    assert isinstance(outcome, ConnectorError)


def welcoming(server: Dripping, connection: socket.socket) -> None:
    """A cache server that lets us in, and then answers the first request byte by byte."""
    connection.recv(1 << 16)
    connection.sendall(encode(Welcome(WIRE_VERSION_SOCKET)))
    connection.recv(1 << 16)
    server.drip(connection, encode(Data(0, Status.OK, ""), 1000)[:20] + b"x")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("talk", [welcoming, line, thirsty])
async def test_a_cache_server_that_sends_or_takes_a_byte_now_and_then(
    dripping: Callable[[Talk], str], opened: Opened, talk: Talk, call: Callable[[Connector], object]
) -> None:
    options = f"timeout_s={SILENCE_S}&connect_timeout_s={SILENCE_S}"
    await ends(opened(kvtier.registry.connect(f"kvtier+unix://{dripping(talk)}?{options}")), call)


def test_how_long_a_call_may_take_depends_on_its_bytes() -> None:
    rate = WIRE_BYTES_PER_S_MIN
    assert threads.call_s_max(2.0, 0) == 2.0 * threads.SILENCES_MAX
    assert threads.call_s_max(0.0, 10 * rate) == 10.0
