"""A proxy before any TCP server that does something to the stream at the byte that a test names."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_STEP_BYTES: Final = 1 << 16
_DRIBBLE_BYTES: Final = 61


class Way(StrEnum):
    """Towards the server, or from it."""

    UP = "up"
    DOWN = "down"


class Mischief(StrEnum):
    """What can become of a stream."""

    #: Both sides see a reset.
    RESET = "reset"
    #: Both sides see an end, in the middle of what was to come.
    END = "end"
    #: Nothing more comes, and nobody says so.
    HANG = "hang"
    #: One bit of a byte is another.
    FLIP = "flip"
    #: Eight bytes are something else.
    GARBAGE = "garbage"
    #: What is there comes in crumbs.
    DRIBBLE = "dribble"


@dataclass(frozen=True)
class At:
    """Mischief once, at the byte of that number (from 0) of all that go one way."""

    mischief: Mischief
    way: Way
    position: int


class StreamProxy:
    """Passes bytes on, and plays its mischief once. Belongs to one event loop."""

    def __init__(self, target: tuple[str, int], fault: At | None) -> None:
        self.port = 0
        #: Bytes that went each way, over all connections.
        self.passed = dict.fromkeys(Way, 0)
        #: Where what came at once began: about where answers begin.
        self.starts: dict[Way, list[int]] = {way: [] for way in Way}
        self.played = False
        self._target = target
        self._fault = fault
        self._let_go = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    def calm(self) -> None:
        """Play no mischief any more."""
        self._fault = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            # A test that fails cancels what is under way.
            with suppress(OSError, asyncio.CancelledError):
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                self._writers.add(far_writer)
                await asyncio.gather(
                    self._pump(Way.UP, reader, far_writer, writer),
                    self._pump(Way.DOWN, far_reader, writer, far_writer),
                )
        finally:
            writer.close()
            self._tasks.discard(task)

    async def close(self) -> None:
        """End what is under way: a client may leave a connection to the collector of garbage."""
        self._let_go.set()
        for writer in self._writers:
            writer.transport.abort()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _pump(
        self,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamWriter,
    ) -> None:
        # Either side may go away at any time: that is what we are for.
        with suppress(OSError):
            while data := await reader.read(_STEP_BYTES):
                start = self.passed[way]
                self.passed[way] += len(data)
                self.starts[way].append(start)
                if self._is_due(way, start, len(data)):
                    await self._play(data, start, writer, back)
                else:
                    writer.write(data)
                await writer.drain()
        writer.close()

    def _is_due(self, way: Way, start: int, nbytes: int) -> bool:
        fault = self._fault
        due = (
            fault is not None
            and not self.played
            and fault.way is way
            and start <= fault.position < start + nbytes
        )
        self.played |= due
        return due

    async def _play(
        self, data: bytes, start: int, writer: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        fault = self._fault
        assert fault is not None
        cut = fault.position - start
        spoiled = bytearray(data)
        match fault.mischief:
            case Mischief.FLIP:
                spoiled[cut] ^= 1
                writer.write(spoiled)
            case Mischief.GARBAGE:
                spoiled[cut : cut + 8] = bytes(each ^ 0xFF for each in data[cut : cut + 8])
                writer.write(spoiled)
            case Mischief.DRIBBLE:
                for number in range(0, len(data), _DRIBBLE_BYTES):
                    writer.write(data[number : number + _DRIBBLE_BYTES])
                    await writer.drain()
                    await asyncio.sleep(0)
            case Mischief.HANG:
                writer.write(data[:cut])
                await self._let_go.wait()
            case Mischief.END:
                writer.write(data[:cut])
                writer.close()
                back.close()
            case Mischief.RESET:
                writer.write(data[:cut])
                _reset(writer)
                _reset(back)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of an end."""
    sock: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def stream_proxy(
    target: tuple[str, int], fault: At | None = None
) -> AsyncIterator[StreamProxy]:
    """Run a proxy in this event loop as long as the context lasts."""
    proxy = StreamProxy(target, fault)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
