"""One end of a connection on the cache server's wire, for asyncio. Both ends are made of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Collection
from typing import Final, Protocol, cast

from kvtier.constants import (
    WIRE_BYTES_PER_S_MIN,
    WIRE_PIECE_BYTES,
    WIRE_SENT_BYTES_PER_S_MIN,
    WIRE_SMALL_BYTES,
    WIRE_STALL_S_MAX,
)
from kvtier.wire import (
    Kind,
    Message,
    encode,
)
from kvtier.wire_fields import WireError
from kvtier.wire_parser import Frame, Parser

#: A peer that is gone without a word is noticed after about a minute.
_TCP_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Owner(Protocol):
    """Who is told what arrives. Called in the loop's thread; nothing of it may raise."""

    def opened(self) -> None:
        """Take note that the connection is there."""
        ...

    def arrived(self, frame: Frame) -> None:
        """Take a frame; one with a payload is answered by ``place``, now or later."""
        ...

    def payload_arrived(self) -> None:
        """Take note that the payload of the last frame is whole."""
        ...

    def broken(self, error: WireError) -> None:
        """Take note that what came is no frame; nothing more will be read."""
        ...

    def closed(self, error: Exception | None) -> None:
        """Take note that the connection is gone."""
        ...


class Link(asyncio.BufferedProtocol):
    """Frames in, frames out, payloads from and into the owner's memory.

    Reads nothing between a frame with a payload and its ``place``, nor after a ``pause``. All
    methods belong to the loop's thread.
    """

    def __init__(self, accepts: Collection[Kind], owner: Owner) -> None:
        self._owner = owner
        self._parser = Parser(accepts)
        self._transport: asyncio.Transport | None = None
        self._sending = asyncio.Lock()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._pauses = 0
        self._payload = False
        self._unplaced = False
        self._stopped = False
        self._writes_ours = False
        self._taking = False
        self._gathered: list[bytes] = []  # Small frames, while arrivals are handed over.
        self._gathered_bytes = 0
        self._frame_since_s: float | None = None
        self._frame_s = WIRE_STALL_S_MAX
        self._payload_since_s: float | None = None  # That which is being sent.
        self._payload_gone_bytes = 0
        self.received_s = time.monotonic()
        self.received_bytes = 0
        self.sent_bytes = 0
        #: Frames and payloads handed over since bytes arrived last.
        self.taken = 0

    @property
    def transport(self) -> asyncio.Transport:
        """The connection, once it is there."""
        assert self._transport is not None, "not connected yet"
        return self._transport

    @property
    def gone(self) -> bool:
        """True when nothing can be sent."""
        return self._transport is None or self._transport.is_closing()

    @property
    def clear(self) -> bool:
        """True while a small frame would have to wait for nothing."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._sending.locked():
            return False
        return transport.get_write_buffer_size() + self._gathered_bytes < WIRE_SMALL_BYTES

    def stalled(self, now_s: float) -> bool:
        """Tell whether a frame has been coming for longer than an honest peer needs."""
        waits_for_peer = self._frame_since_s is not None and not self._pauses
        return waits_for_peer and now_s - (self._frame_since_s or 0.0) > self._frame_s

    def takes_little(self, now_s: float) -> bool:
        """Tell whether the payload that is sent goes more slowly than an honest peer reads."""
        since_s = self._payload_since_s
        allowed_s = WIRE_STALL_S_MAX + self._payload_gone_bytes / WIRE_SENT_BYTES_PER_S_MIN
        return since_s is not None and now_s - since_s > allowed_s

    def accept(self, kinds: Collection[Kind]) -> None:
        """Take frames of these kinds from the next one on."""
        self._parser.accept(kinds)

    def place(self, target: memoryview | None) -> None:
        """Say where the payload of the last frame belongs, and read on; None: nowhere."""
        self._parser.place(target)
        self._payload = True
        self._frame_s = WIRE_STALL_S_MAX + self._parser.payload_left / WIRE_BYTES_PER_S_MIN
        self._unplaced = False
        if not self._taking:
            self.resume()

    def discard(self) -> None:
        """Write no more to the target of the payload that is coming."""
        self._parser.discard()

    def pause(self) -> None:
        """Read nothing until there was a ``resume`` for each ``pause``."""
        self._pauses += 1
        if self._pauses == 1 and not self.gone:
            self.transport.pause_reading()

    def resume(self) -> None:
        """Undo one ``pause``."""
        self._pauses -= 1
        if not self._pauses:
            if self._frame_since_s is not None:
                self._frame_since_s = time.monotonic()
            if not self.gone:
                self.transport.resume_reading()
            self._take()

    async def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Send a frame; returns when the payload's memory is not needed any more.

        Raises ``ConnectionError`` where the connection is gone, ``TimeoutError`` where the peer
        takes nothing; a frame that is not sent whole ends the connection.
        """
        if self.send_at_once(message, payload=payload):
            return
        nbytes = 0 if payload is None else len(payload)
        head = encode(message, nbytes)
        async with self._sending:
            whole = False
            try:
                await self._write(head, urgent=not nbytes)
                if payload is not None:
                    await self._write_pieces(payload)
                whole = True
            finally:
                if not whole:
                    self.abort()
        self.sent_bytes += nbytes

    def send_at_once(self, *messages: Message, payload: memoryview | None = None) -> bool:
        """Send small frames where nothing is under way that they would have to wait for.

        The payload, of which nothing is needed afterwards, is that of the last one. False: nothing
        was sent, and ``send`` would wait, or raise.
        """
        nbytes = 0 if payload is None else len(payload)
        if nbytes > WIRE_SMALL_BYTES or not self.clear:
            return False
        self.put(*messages, payload=payload)
        return True

    def put(self, *messages: Message, payload: memoryview | None = None) -> None:
        """Send small frames while the connection is ``clear``. The payload is the last one's.

        Answers to what has arrived in one go leave in one go, once all of it is handed over.
        """
        if payload is None:
            frames = [encode(message) for message in messages]
        else:
            *first, last = messages
            frames = [*map(encode, first), encode(last, len(payload)) + payload]
            self.sent_bytes += len(payload)
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        if self._taking:
            self._gathered.append(data)
            self._gathered_bytes += len(data)
        else:
            self.transport.write(data)

    async def send_with(self, message: Message, descriptor: int) -> None:
        """Send a frame without a payload, and a descriptor with its first byte. Unix sockets only.

        The peer gets one of its own. Raises as ``send`` does.
        """
        async with self._sending:
            await asyncio.sleep(0)  # Then what the loop has gathered is on its way.
            await self._flush()
            try:
                with self.duplicate() as connection:
                    socket.send_fds(connection, [encode(message)], [descriptor])
            # It asks and asks, and takes nothing; or others do, and there are too many.
            except OSError as error:
                raise ConnectionError("a descriptor cannot be sent") from error

    def duplicate(self) -> socket.socket:
        """Return a socket of the caller's own for this connection. Raises ``ConnectionError``."""
        self._check_open()
        return socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))

    def send_now(self, message: Message) -> None:
        """Send a frame without a payload, before the connection is closed or used by others."""
        self._write_gathered()
        if not self.gone:
            self.transport.write(encode(message))

    def close(self) -> None:
        """Close once everything that was sent is gone."""
        self._stopped = True
        self._write_gathered()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; the owner's memory is not touched any more."""
        self._stopped = True
        self._gathered.clear()
        self._parser.discard()
        if self._transport is not None:
            self._hang_up()
            self._transport.abort()

    def _hang_up(self) -> None:
        """Have the system take nothing more: uvloop would go on to write until its next turn."""
        if self._writes_ours:
            self._writes_ours = False
            with contextlib.suppress(OSError):  # It may be gone already.
                twin = socket.socket(fileno=self.transport.get_extra_info("socket").fileno())
                try:
                    twin.shutdown(socket.SHUT_WR)
                finally:
                    twin.detach()  # The descriptor is the transport's.

    async def _write(self, data: bytes | memoryview, *, urgent: bool = False) -> None:
        self._check_open()
        self.transport.write(data)
        if urgent and self.transport.get_write_buffer_size() < WIRE_SMALL_BYTES:
            return
        await self._flush()

    async def _write_pieces(self, payload: memoryview) -> None:
        """Write a payload, and note how much of it has gone."""
        self._payload_since_s, self._payload_gone_bytes = time.monotonic(), 0
        try:
            for start in range(0, len(payload), WIRE_PIECE_BYTES):
                piece = payload[start : start + WIRE_PIECE_BYTES]
                await self._write(piece)
                self._payload_gone_bytes += len(piece)
        finally:
            self._payload_since_s = None

    async def _flush(self) -> None:
        if not self._flushed.is_set():
            async with asyncio.timeout(WIRE_STALL_S_MAX):
                await self._flushed.wait()
            self._check_open()

    def _check_open(self) -> None:
        if self.gone:
            raise ConnectionError("the connection is closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.BaseProtocol``."""
        # What another loop gives is no ``asyncio.Transport``, but does what that does.
        self._transport = cast(asyncio.Transport, transport)
        # Paused means that something is not with the kernel, or not encrypted, yet. Above TLS it
        # begins at the limit, elsewhere behind it.
        encrypts = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(high=int(encrypts), low=0)
        self._writes_ours = not encrypts  # What is encrypted is the transport's own.
        connection = transport.get_extra_info("socket")
        if connection.family in {socket.AF_INET, socket.AF_INET6}:
            for level, option, value in _TCP_OPTIONS:
                connection.setsockopt(level, option, value)
        self._owner.opened()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._stopped, self._writes_ours = True, False
        self._parser.discard()
        self._flushed.set()
        self._owner.closed(exc)

    def pause_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._flushed.clear()

    def resume_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._flushed.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See ``asyncio.BufferedProtocol``."""
        del sizehint
        return self._parser.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """See ``asyncio.BufferedProtocol``."""
        self.received_s = time.monotonic()
        self.received_bytes += nbytes
        self._parser.received(nbytes)
        self._take()

    def eof_received(self) -> bool:
        """See ``asyncio.BufferedProtocol``: half a connection is none."""
        return False

    def _take(self) -> None:
        """Hand over what has arrived, as far as the owner takes it; never within itself."""
        if self._taking:
            return
        self._taking = True
        self.taken = 0
        try:
            while not (self._pauses or self._unplaced or self._stopped) and self._take_one():
                self.taken += 1
        finally:
            self._taking = False
            self._write_gathered()

    def _write_gathered(self) -> None:
        gathered = self._gathered
        if gathered:
            self._gathered, self._gathered_bytes = [], 0
            if not self.gone:
                self.transport.write(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    def _take_one(self) -> bool:
        """Hand over a frame or the end of a payload; False: more has to arrive."""
        if self._payload:
            if self._parser.payload_left:
                return False
            self._payload = False
            self._frame_since_s = None
            self._owner.payload_arrived()
            return True
        try:
            frame = self._parser.next()
        except WireError as error:
            self._stopped = True
            self._owner.broken(error)
            return False
        if frame is None:
            self._note_rest()
            return False
        if frame.payload_bytes:
            self._unplaced = True
            self._frame_since_s = self._frame_since_s or time.monotonic()
        else:
            self._frame_since_s = None
        self._owner.arrived(frame)
        if self._unplaced:
            self.pause()
        return True

    def _note_rest(self) -> None:
        """Note since when a frame is coming, if the beginning of one has arrived."""
        if not self._parser.busy:
            self._frame_since_s = None
        elif self._frame_since_s is None:
            self._frame_since_s, self._frame_s = time.monotonic(), WIRE_STALL_S_MAX
