"""Bytes of an answer that come late, twice or unasked are never taken for another object's."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import kvtier.registry
from kvtier.errors import ConnectorTimeoutError
from kvtier.interfaces import ReadOutcome
from kvtier.types import ReadRequest
from kvtier_connectors.redis.objects import Header, encode_header
from tests.lib.opened import Opened, read_one

#: Two answers come in one piece.
NBYTES = 3_000
OURS, OTHERS = b"\x11" * NBYTES, b"\x22" * NBYTES

#: Told the connection, which one it is, and the answer that is due; sends what it likes.
Answer = Callable[[socket.socket, int, bytes], None]


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def object_reply(data: bytes) -> bytes:
    return bulk(encode_header(Header(len(data), 0, bytes(16))) + data)


def plainly(connection: socket.socket, number: int, reply: bytes) -> None:
    del number
    connection.sendall(reply)


@dataclass
class ScriptedRedis:
    """A server of two objects. ``answer`` sends the reply to each read of one."""

    listener: socket.socket
    answer: Answer = plainly
    connections: list[socket.socket] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"redis+unix://{self.listener.getsockname()}"

    def run(self) -> None:
        threads = []
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                break
            self.connections.append(connection)
            threads.append(threading.Thread(target=self._serve, args=(len(self.connections),)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, number: int) -> None:
        connection = self.connections[number - 1]
        try:
            with connection.makefile("rb") as lines:
                while words := self._command(lines):
                    if words[0] != b"GETRANGE":
                        connection.sendall(b"+OK\r\n")
                        continue
                    data = OURS if words[1] == b"kvtier:{%b}" % b"ours".hex().encode() else OTHERS
                    self.answer(connection, number, object_reply(data))
                    self.asked.set()
        except OSError:
            return

    @staticmethod
    def _command(lines: io.BufferedReader) -> list[bytes]:
        count = int(lines.readline()[1:] or 0)
        words = []
        for _ in range(count):
            nbytes = int(lines.readline()[1:])
            words.append(lines.read(nbytes + 2)[:-2])
        return words

    def close(self) -> None:
        for end in (self.listener, *self.connections):
            with socket.socket(fileno=end.detach()) as last, contextlib.suppress(OSError):
                last.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedRedis]:
    # What is sent over a Unix socket is there at once.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "redis"))
    listener.listen()
    made = ScriptedRedis(listener)
    running = threading.Thread(target=made.run)
    running.start()
    yield made
    made.close()
    running.join()


@pytest.mark.parametrize("at", [1, 5, 20, 41, 60, NBYTES // 2, NBYTES + 40])
async def test_an_answer_that_is_cut_and_comes_late_goes_nowhere(
    server: ScriptedRedis, opened: Opened, at: int
) -> None:
    connector = opened(kvtier.registry.connect(f"{server.url}?timeout_s=0.3"))

    def cut(connection: socket.socket, number: int, reply: bytes) -> None:
        del number
        connection.sendall(reply[:at])

    server.answer = cut
    assert isinstance(await read_one(connector, b"ours", NBYTES), ConnectorTimeoutError)
    server.answer = plainly
    with contextlib.suppress(OSError):
        server.connections[0].sendall(object_reply(OURS)[at:])
    assert await read_one(connector, b"others", NBYTES) == OTHERS


@pytest.mark.parametrize("at", [0, 20, 60, NBYTES // 2])
async def test_what_comes_for_a_cancelled_read_goes_nowhere(
    server: ScriptedRedis, opened: Opened, at: int
) -> None:
    connector = opened(kvtier.registry.connect(f"{server.url}?timeout_s=3000"))

    def cut(connection: socket.socket, number: int, reply: bytes) -> None:
        del number
        connection.sendall(reply[:at])

    server.answer = cut
    into = bytearray(NBYTES)
    reading: asyncio.Task[list[ReadOutcome]] = asyncio.get_running_loop().create_task(
        connector.read([ReadRequest(b"ours", 0, NBYTES)], [memoryview(into)])
    )
    await asyncio.to_thread(server.asked.wait, 20)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    server.answer = plainly
    with contextlib.suppress(OSError):
        server.connections[0].sendall(object_reply(OURS)[at:])
    before = bytes(into)
    assert await read_one(connector, b"others", NBYTES) == OTHERS
    assert bytes(into) == before, "a buffer is written to that was given back"


@pytest.mark.parametrize("later", [False, True], ids=["with-it", "after-it"])
async def test_an_answer_that_nobody_asked_for_ends_its_connection(
    server: ScriptedRedis, opened: Opened, later: bool
) -> None:
    connector = opened(kvtier.registry.connect(server.url))

    def twice(connection: socket.socket, number: int, reply: bytes) -> None:
        connection.sendall(reply + (b"" if later or number > 1 else object_reply(OURS)))

    server.answer = twice
    assert await read_one(connector, b"ours", NBYTES) == OURS
    if later:
        server.connections[0].sendall(object_reply(OURS))
    assert await read_one(connector, b"others", NBYTES) == OTHERS
    assert len(server.connections) == 2
