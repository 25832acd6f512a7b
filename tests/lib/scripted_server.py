"""A server of the wire whose connections do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kvtier.wire import FROM_CLIENT, Message, Welcome, encode
from kvtier.wire_parser import Parser


class Peer:
    """One connection of a scripted server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = Parser(FROM_CLIENT)

    async def take(self) -> Message:
        """The next request; what it carries goes nowhere."""
        while (frame := self._parser.next()) is None:
            space = self._parser.buffer()
            data = await self._reader.read(len(space))
            if not data:
                raise ConnectionError("the client hung up")
            space[: len(data)] = data
            self._parser.received(len(data))
        if frame.payload_bytes:
            self._parser.place(None)
        return frame.message

    async def welcome(self) -> None:
        await self.take()
        self.send(Welcome(1))

    def send(self, message: Message, payload: bytes = b"", *, announced: int | None = None) -> None:
        self._writer.write(encode(message, len(payload) if announced is None else announced))
        self._writer.write(payload)

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)

    def close(self) -> None:
        self._writer.close()


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def scripted(folder: Path, *scripts: Script, timeout_s: float = 30.0) -> AsyncIterator[str]:
    """A server whose connections follow the scripts, one after the other, the last one for all."""
    left = list(scripts)
    peers: list[Peer] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        peers.append(peer)
        script = left.pop(0) if len(left) > 1 else left[0]
        try:
            await script(peer)
        except ConnectionError:
            peer.close()

    path = str(folder / "socket")
    server = await asyncio.start_unix_server(serve, path)
    yield f"kvtier+unix://{path}?connections=1&timeout_s={timeout_s}&connect_timeout_s=30"
    for peer in peers:
        peer.close()
    server.close()
    await server.wait_closed()
