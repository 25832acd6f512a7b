"""HTTP for operators within bounds: heads, bodies, connections, and patience."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from kvtier.constants import (
    CONTROL_BODY_BYTES_MAX,
    CONTROL_HEAD_BYTES_MAX,
    CONTROL_REQUESTS_MAX,
    LOG_INTERVAL_S,
    MIB,
)
from kvtier_server import http_guard as module
from kvtier_server.http_guard import GuardedProtocol, OnceAMinute
from tests.lib.plane import until

STALL_S = 0.2
CONNECTIONS = 3
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Site:
    """A server of one answer, which waits for ``go_on``."""

    port: int = 0
    answer: bytes = b"well"
    state: ServerState = field(default_factory=ServerState)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        await self.go_on.wait()
        length = [(b"content-length", str(len(self.answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": self.answer})

    def protocol(self) -> GuardedProtocol:
        config = uvicorn.Config(
            self.app, http=GuardedProtocol, interface="asgi3", lifespan="off", log_config=None
        )
        config.load()
        return GuardedProtocol(config=config, server_state=self.state, app_state={})

    async def client(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(module, "CONTROL_STALL_S_MAX", STALL_S)
    monkeypatch.setattr(module, "CONTROL_CONNECTIONS_MAX", CONNECTIONS)
    site = Site()
    site.go_on.set()
    server = await asyncio.get_running_loop().create_server(site.protocol, "127.0.0.1", 0)
    site.port = server.sockets[0].getsockname()[1]
    yield site
    server.close()
    await until(lambda: not site.state.connections)


async def left(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What comes until the server has hung up, in order or not."""
    got = b""
    try:
        while data := await reader.read(MIB):
            got += data
    except ConnectionError:
        got += b"(reset)"
    writer.close()
    return got


@pytest.mark.parametrize(
    "said", [b"", b"GET / HT", GET[:-2], GET[:-2] + b"Content-Length: 5\r\n\r\nab"]
)
async def test_whoever_does_not_say_the_whole_of_it_is_cut_off(site: Site, said: bytes) -> None:
    site.go_on.clear()
    reader, writer = await site.client()
    writer.write(said)
    assert await left(reader, writer) in {b"", b"(reset)"}
    site.go_on.set()


async def test_a_trickle_is_no_progress(site: Site) -> None:
    reader, writer = await site.client()

    async def trickle() -> None:
        while not writer.is_closing():
            writer.write(b"G")
            await asyncio.sleep(STALL_S / 10)

    writer.write(b"GET /")
    trickling = asyncio.create_task(trickle())
    assert await left(reader, writer) in {b"", b"(reset)"}
    await trickling


async def test_whoever_waits_for_an_answer_or_may_ask_again_is_not(site: Site) -> None:
    site.go_on.clear()
    reader, writer = await site.client()
    writer.write(GET)
    asyncio.get_running_loop().call_later(5 * STALL_S, site.go_on.set)
    assert (await reader.readuntil(b"well")).startswith(b"HTTP/1.1 200 ")
    assert site.state.total_requests == 1
    waiting = asyncio.Event()
    asyncio.get_running_loop().call_later(5 * STALL_S, waiting.set)
    await waiting.wait()
    writer.write(GET)
    assert (await reader.readuntil(b"well")).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_whoever_takes_no_answers_is_cut_off(site: Site) -> None:
    site.answer = bytes(64 * MIB)
    reader, writer = await site.client()
    writer.write(GET)
    await reader.readexactly(1)
    await until(lambda: not site.state.connections)
    writer.close()


class Strict(asyncio.Transport):
    """As uvloop's: what is written after the end is an error."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        assert not self.closed

    def resume_reading(self) -> None:
        assert not self.closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        raise RuntimeError("the handler is closed")


async def test_answers_that_nobody_waits_for_are_no_errors(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Of requests in one go the one that is being answered is not the last one."""
    site.go_on.clear()
    transport, protocol = Strict(), site.protocol()
    protocol.connection_made(transport)
    protocol.data_received(3 * GET)
    transport.close()
    protocol.connection_lost(None)
    site.go_on.set()
    assert site.state.tasks
    await until(lambda: not site.state.tasks)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


class Going(Strict):
    """Closed, with some of the last answer left, of which a little goes between two looks."""

    unsent_bytes = 5
    aborted = False

    def get_write_buffer_size(self) -> int:
        self.unsent_bytes = max(0, self.unsent_bytes - 1)
        return self.unsent_bytes

    def abort(self) -> None:
        self.aborted = True


async def test_an_answer_before_the_end_may_take_as_long_as_another(site: Site) -> None:
    transport, protocol = Going(), site.protocol()
    protocol.connection_made(transport)
    transport.close()
    await until(lambda: transport.aborted)
    assert transport.unsent_bytes == 0
    protocol.connection_lost(None)


@pytest.mark.parametrize(
    "more", [b"X-Long: " + b"y" * 2 * CONTROL_HEAD_BYTES_MAX, b"X-M: 1\r\n" * 9999]
)
async def test_a_head_beyond_the_bound_is_told_so(site: Site, more: bytes) -> None:
    reader, writer = await site.client()
    # No byte more: what is unread when it hangs up would undo the answer.
    writer.write((GET[:-2] + more)[: CONTROL_HEAD_BYTES_MAX + 1])
    told = await left(reader, writer)
    assert told.startswith(b"HTTP/1.1 400 ")
    assert str(CONTROL_HEAD_BYTES_MAX).encode() in told


async def test_a_body_that_nobody_wants_any_more_is_not_taken_for_ever(site: Site) -> None:
    reader, writer = await site.client()
    writer.write(GET[:-2] + b"Transfer-Encoding: chunked\r\n\r\n")
    assert (await reader.readuntil(b"well")).startswith(b"HTTP/1.1 200 ")
    sent, piece = 0, b"ffff\r\n" + bytes(65_535) + b"\r\n"
    with suppress(ConnectionError):
        while sent < 64 * CONTROL_BODY_BYTES_MAX:
            writer.write(piece)
            sent += len(piece)
            await writer.drain()
    assert sent < 8 * CONTROL_BODY_BYTES_MAX
    assert await left(reader, writer) in {b"", b"(reset)"}


async def test_connections_are_counted(site: Site) -> None:
    site.go_on.clear()
    inside = [await site.client() for _ in range(CONNECTIONS)]
    for _, writer in inside:
        writer.write(GET)
    await until(lambda: len(site.state.connections) == CONNECTIONS)
    assert await left(*await site.client()) in {b"", b"(reset)"}
    site.go_on.set()
    for reader, writer in inside:
        assert (await reader.readuntil(b"well")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_requests_that_wait_for_their_turn_are_counted(site: Site) -> None:
    """What a few bytes ask for takes a hundred times as much memory until it is answered."""
    site.go_on.clear()
    reader, writer = await site.client()
    writer.write(GET * (CONTROL_REQUESTS_MAX + 2))
    async with asyncio.timeout(10):
        assert await left(reader, writer) in {b"", b"(reset)"}
    reader, writer = await site.client()
    writer.write(GET * (CONTROL_REQUESTS_MAX + 1))
    site.go_on.set()
    for _ in range(CONTROL_REQUESTS_MAX + 1):
        assert (await reader.readuntil(b"well")).startswith(b"HTTP/1.1 200 ")
    writer.close()


def test_a_warning_is_written_once_a_minute_and_errors_all() -> None:
    once = OnceAMinute()

    def written(level: int, text: str, when_s: float) -> bool:
        record = logging.LogRecord("kvtier.http", level, "", 0, text, (), None)
        record.created = when_s
        return once.filter(record)

    assert written(logging.WARNING, "no HTTP", 1e9)
    assert not written(logging.WARNING, "no HTTP", 1e9 + 1)
    assert written(logging.WARNING, "another", 1e9 + 1)
    assert written(logging.WARNING, "no HTTP", 1e9 + LOG_INTERVAL_S)
    assert written(logging.ERROR, "a bug", 1e9 + LOG_INTERVAL_S)
    assert written(logging.ERROR, "a bug", 1e9 + LOG_INTERVAL_S)
