"""What has to hold of any bytes on the cache server's wire, however they are cut and taken.

A peer's stream goes through a ``Parser`` in one piece, and through a ``Link`` in pieces, whose
owner takes payloads now, later or not at all. Both have to find the same, and to find it typed.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvtier.constants import MIB, WIRE_HEADER_BYTES_MAX
from kvtier.wire import FROM_CLIENT, FROM_SERVER, PREFIX_BYTES, Kind, Message
from kvtier.wire_fields import WireError
from kvtier.wire_link import Link
from kvtier.wire_parser import Frame, Parser

ALL_KINDS = FROM_CLIENT | FROM_SERVER
#: Payloads up to this are kept and compared; beyond it nobody takes them.
KEPT_BYTES_MAX = 4096
#: How often a stream is cut, at least about so: beyond it a search is slow and finds nothing.
PIECES_MAX = 100
TEXT_BYTES_MAX = 200


@dataclass
class Told:
    """What came of a stream: whole frames with their payloads, and whether it broke."""

    frames: list[tuple[Message, bytes | int]] = field(default_factory=list)
    broken: bool = False


def parsed(data: bytes, accepts: Collection[Kind] = ALL_KINDS) -> Told:
    """What a parser finds that gets as much at once as it takes. Only ``WireError`` may come."""
    told, parser = Told(), Parser(accepts)
    frame: Frame | None = None
    target: bytearray | None = None
    try:
        while True:
            while parser.payload_left == 0:
                if frame is not None:
                    kept = frame.payload_bytes if target is None else bytes(target)
                    told.frames.append((frame.message, kept))
                if (frame := parser.next()) is None:
                    break
                target = None
                if frame.payload_bytes:
                    target = _kept(frame)
                    parser.place(None if target is None else memoryview(target))
                else:
                    target = bytearray()
            if not data:
                return told
            space = parser.buffer()
            assert 0 < len(space) <= PREFIX_BYTES + WIRE_HEADER_BYTES_MAX
            count = min(len(space), len(data))
            space[:count] = data[:count]
            parser.received(count)
            data = data[count:]
    except WireError as error:
        told.broken = _short(error)
        return told


def _short(error: WireError) -> bool:
    """True: it broke. What is said of it is short, whatever came."""
    assert len(str(error)) < TEXT_BYTES_MAX
    return True


def _kept(frame: Frame) -> bytearray | None:
    return bytearray(frame.payload_bytes) if frame.payload_bytes <= KEPT_BYTES_MAX else None


class _Transport(asyncio.Transport):
    """A connection that goes nowhere, and says whether it would read."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.closing = False
        self._socket = SimpleNamespace(family=socket.AF_UNIX)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        del high, low

    def pause_reading(self) -> None:
        assert self.reading, "paused twice"
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading, "resumed twice"
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True


class Taker:
    """The owner of a link, as unhurried as its draws have it."""

    def __init__(self, draws: random.Random, accepts: Collection[Kind]) -> None:
        self.told = Told()
        self.link = Link(accepts, self)
        self._draws = draws
        self._frame: Frame | None = None
        self._target: bytearray | None = None
        self._unplaced = False
        self._pauses = 0
        self._over = False

    def opened(self) -> None:
        """See ``Owner``."""

    def arrived(self, frame: Frame) -> None:
        """See ``Owner``."""
        busy = self._over or self._pauses or self._unplaced or self._frame is not None
        assert not busy, "not now"
        if not frame.payload_bytes:
            self.told.frames.append((frame.message, b""))
            if self._draws.random() < 0.1:
                self._pauses += 1
                self.link.pause()
            return
        self._frame, self._target, self._unplaced = frame, _kept(frame), True
        if self._draws.random() < 0.5:
            self._place()

    def payload_arrived(self) -> None:
        """See ``Owner``."""
        assert self._frame is not None
        kept = self._frame.payload_bytes if self._target is None else bytes(self._target)
        self.told.frames.append((self._frame.message, kept))
        self._frame = None

    def broken(self, error: WireError) -> None:
        """See ``Owner``."""
        assert not self._over, "broken twice"
        self.told.broken = self._over = _short(error)
        self.link.close()

    def closed(self, error: Exception | None) -> None:
        """See ``Owner``."""
        self._over = True

    def go_on(self) -> None:
        """Do what holds up the link."""
        if self._unplaced:
            self._place()
        while self._pauses:
            self._pauses -= 1
            self.link.resume()

    def _place(self) -> None:
        self._unplaced = False
        self.link.place(None if self._target is None else memoryview(self._target))


def linked(data: bytes, draws: random.Random, accepts: Collection[Kind] = ALL_KINDS) -> Told:
    """What a link finds of a stream that comes in pieces. Nothing at all may be raised."""
    taker, transport = Taker(draws, accepts), _Transport()
    link = taker.link
    link.connection_made(transport)
    size = max(draws.choice((1, 7, 50, 3000, MIB)), len(data) // PIECES_MAX)
    while data and not transport.closing:
        if not transport.reading:
            taker.go_on()
            continue
        space = link.get_buffer(-1)
        assert len(space) > 0
        count = min(len(space), len(data), draws.randint(1, size))
        space[:count] = data[:count]
        link.buffer_updated(count)
        data = data[count:]
    while not (transport.reading or transport.closing):
        taker.go_on()
    assert not link.eof_received()
    link.connection_lost(None)
    return taker.told


def check(data: bytes, draws: random.Random) -> Told:
    """Hold what is found of any bytes against what is found of them in pieces."""
    whole = parsed(data)
    assert linked(data, draws) == whole
    for accepts in (FROM_CLIENT, FROM_SERVER):
        assert linked(data, draws, accepts) == parsed(data, accepts)
    return whole
