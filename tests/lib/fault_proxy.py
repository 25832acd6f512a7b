"""A proxy before an HTTP server that lets the n-th request go wrong."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

_HEAD_BYTES_MAX: Final = 1 << 16
_BODY_BYTES_MAX: Final = 1 << 26
_STEP_BYTES: Final = 1 << 16
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_EXPECT: Final = re.compile(rb"\r\nexpect: *100-continue", re.IGNORECASE)
#: Not signed, so it may change: a connection serves one request, whose answer ends with it.
_CONNECTION: Final = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)


class Trouble(StrEnum):
    """What can become of a request."""

    ERROR = "500"
    SLOW_DOWN = "503"
    #: The server never hears of it.
    RESET = "reset"
    #: The server has done it, and nobody learns.
    LOST = "lost"
    #: Half of the answer's body, then the end.
    CUT = "cut"
    HANG = "hang"


_CODES: Final = {
    Trouble.ERROR: ("500 Internal Server Error", "InternalError"),
    Trouble.SLOW_DOWN: ("503 Slow Down", "SlowDown"),
}

#: Tells what becomes of the request of that number, from 1; None: it goes well.
Plan = Callable[[int], Trouble | None]


class FaultProxy:
    """Passes requests on to a server, each over a connection of its own, as ``plan`` says."""

    def __init__(self, target: str) -> None:
        """``target`` is the server's ``http://host:port``."""
        self.plan: Plan = lambda number: None
        self.requests = 0
        self.endpoint = ""
        self._target = urlsplit(target)
        self._let_go = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, and so one request."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Either side may go away at any time: that is what we are for.
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._pass_on(reader, writer)
        finally:
            writer.close()
            self._tasks.discard(task)

    async def close(self) -> None:
        """Let go of what hangs, and wait until nothing is under way."""
        self._let_go.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await _request(reader, writer)
        self.requests += 1
        trouble = self.plan(self.requests)
        if trouble is Trouble.HANG:
            await self._let_go.wait()
        elif trouble is Trouble.RESET:
            _reset(writer)
        elif trouble in _CODES:
            writer.write(_answer(*_CODES[trouble]))
        else:
            answer = await self._asked(request)
            if trouble is Trouble.LOST:
                _reset(writer)
            elif trouble is Trouble.CUT:
                head, gap, body = answer.partition(b"\r\n\r\n")
                writer.write(head + gap + body[: len(body) // 2])
            else:
                writer.write(answer)
        if not writer.is_closing():
            await writer.drain()

    async def _asked(self, request: bytes) -> bytes:
        """Return the server's whole answer."""
        reader, writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        try:
            writer.write(request)
            answer = b""
            while step := await reader.read(_STEP_BYTES):
                answer += step
            return answer
        finally:
            writer.close()


@asynccontextmanager
async def fault_proxy(target: str) -> AsyncIterator[FaultProxy]:
    """Run a proxy in this event loop as long as the context lasts."""
    proxy = FaultProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=_HEAD_BYTES_MAX)
    host, port = server.sockets[0].getsockname()
    proxy.endpoint = f"http://{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if _EXPECT.search(head):
        head = _EXPECT.sub(b"", head)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    head = _CONNECTION.sub(b"", head)[:-2] + b"Connection: close\r\n\r\n"
    length = _LENGTH.search(head)
    nbytes = int(length[1]) if length else 0
    assert nbytes <= _BODY_BYTES_MAX
    return head + await reader.readexactly(nbytes)


def _answer(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>on purpose</Message></Error>"
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return (head + body).encode()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of an end."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
