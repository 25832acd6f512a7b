"""A client of the cache server that does exactly what a test says, right or wrong."""

from __future__ import annotations

import socket
from contextlib import suppress
from urllib.parse import urlsplit

from kvtier.wire import (
    FROM_SERVER,
    Area,
    Data,
    Hello,
    Map,
    Mapped,
    Message,
    Welcome,
    encode,
)
from kvtier.wire_parser import Frame, Parser

TIMEOUT_S = 20.0


class WireClient:
    """A blocking socket; ``hello`` first, if a test wants to be welcome."""

    def __init__(self, url: str, *, receive_bytes: int | None = None) -> None:
        """``receive_bytes`` bounds what the kernel takes in for us."""
        parts = urlsplit(url)
        unix = parts.scheme == "kvtier+unix"
        self.socket = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        self.socket.settimeout(TIMEOUT_S)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            self.socket.connect(parts.path if unix else (parts.hostname, parts.port))
        except OSError:
            self.socket.close()
            raise
        self._parser = Parser(FROM_SERVER)

    def hello(self, token: bytes = b"", *, version: int = 1) -> WireClient:
        """Be welcomed to a version."""
        self.send(Hello(version, version, token))
        assert self.answer() == Welcome(version)
        return self

    def answer(self) -> Message:
        """Return the next message."""
        frame = self.take()
        assert frame is not None, "the server hung up"
        return frame.message

    def map(self, area: Area) -> tuple[Mapped, list[int]]:
        """Ask for a file; return the answer and the descriptors that came with it."""
        self.send(Map(0, area))
        data, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 4)
        self._parser.buffer()[: len(data)] = data
        self._parser.received(len(data))
        mapped = self.answer()
        assert isinstance(mapped, Mapped)
        return mapped, descriptors

    def send(self, message: Message, payload: bytes = b"", *, announced: int | None = None) -> None:
        """Send a frame whose payload may be another one than it announces."""
        nbytes = len(payload) if announced is None else announced
        self.socket.sendall(encode(message, nbytes) + payload)

    def take(self) -> Frame | None:
        """Return the next frame; None once the server has hung up."""
        while (frame := self._parser.next()) is None:
            count = self._receive(self._parser.buffer())
            if not count:
                return None
            self._parser.received(count)
        return frame

    def read_answer(self) -> tuple[Data, bytes]:
        """Return the answer to a read, with its payload."""
        frame = self.take()
        assert frame is not None, "the server hung up"
        assert isinstance(frame.message, Data), frame
        target = memoryview(bytearray(frame.payload_bytes))
        if frame.payload_bytes:
            self._parser.place(target)
            while self._parser.payload_left:
                count = self._receive(self._parser.buffer())
                assert count, "the server hung up in a payload"
                self._parser.received(count)
        return frame.message, bytes(target)

    def close(self) -> None:
        self.socket.close()

    def _receive(self, into: memoryview) -> int:
        # A peer that closes with bytes of ours unread resets the connection.
        with suppress(ConnectionError):
            return self.socket.recv_into(into)
        return 0
