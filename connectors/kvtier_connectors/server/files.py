"""Files in memory that the server shares with us, and the connection that they come by."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
from contextlib import ExitStack, suppress
from typing import Final, NamedTuple

from kvtier.constants import ALIGN_BYTES
from kvtier.errors import ConnectorDataError, ConnectorError, ConnectorUnavailableError
from kvtier.tiers.extents import Extents
from kvtier.wire import (
    FROM_SERVER,
    WIRE_VERSION,
    Area,
    Hello,
    Map,
    Mapped,
    Message,
    Refused,
    Status,
    Welcome,
    encode,
)
from kvtier.wire_fields import WireError
from kvtier.wire_parser import Parser
from kvtier_connectors.server.errors import failure, translated
from kvtier_connectors.server.settings import Settings

#: What the server refuses is not asked for again so soon.
_PAUSE_S: Final = 5.0


class Part(NamedTuple):
    """Bytes of a staging file, for one upload."""

    region: int
    offset: int
    nbytes: int
    view: memoryview


class _File(NamedTuple):
    region: int
    view: memoryview


class FileLine:
    """A connection of its own, because descriptors come with their bytes. One thing at a time."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._parser = Parser(FROM_SERVER)
        self._descriptors: list[int] = []
        self._waits = self._closed = False

    async def open(self, settings: Settings) -> None:
        """Connect and be welcomed. Raises ``OSError``, ``WireError`` or ``ConnectorError``."""
        await asyncio.get_running_loop().sock_connect(self._socket, settings.path)
        answer = await self._ask(Hello(WIRE_VERSION, WIRE_VERSION, settings.token))
        if not isinstance(answer, Welcome):
            raise ConnectorDataError("an answer before the welcome")

    async def map(self, area: Area) -> _File:
        """Ask for a file and map it. Raises as ``open``."""
        answer = await self._ask(Map(0, area))
        descriptors, self._descriptors = self._descriptors, []
        try:
            if not isinstance(answer, Mapped):
                raise ConnectorDataError(f"an answer of another kind: {type(answer).__name__}")
            if answer.status is not Status.OK or len(descriptors) != 1:
                raise failure(max(answer.status, Status.REFUSED), answer.text)
            writable = area is Area.STAGING
            return _File(answer.region, _mapped(descriptors[0], answer.nbytes, writable=writable))
        finally:
            _close(descriptors)

    def close(self) -> None:
        """Hang up; what is mapped stays. Whoever waits for an answer is told so at once."""
        self._closed = True
        if self._waits:  # The loop still looks at the descriptor.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            return
        self._socket.close()
        _close(self._descriptors)
        self._descriptors = []

    async def _ask(self, message: Message) -> Message:
        await asyncio.get_running_loop().sock_sendall(self._socket, encode(message))
        while (frame := self._parser.next()) is None:
            space = self._parser.buffer()
            data = await self._receive(len(space))
            if not data:
                raise ConnectorUnavailableError("the server has closed the connection")
            space[: len(data)] = data
            self._parser.received(len(data))
        if isinstance(frame.message, Refused):
            raise failure(max(frame.message.status, Status.REFUSED), frame.message.text)
        return frame.message

    async def _receive(self, nbytes_max: int) -> bytes:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._socket, readable.set)
        self._waits = True
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._socket)
            self._waits = False
            if self._closed:
                self.close()
        if self._closed:
            return b""
        data, descriptors, _, _ = socket.recv_fds(self._socket, nbytes_max, 1)
        self._descriptors += descriptors
        return data


class SharedFiles:
    """What the server shares with one connector. Belongs to its loop.

    A file that cannot be had is no fault: payloads go through sockets then.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._turn = asyncio.Lock()
        self._line: FileLine | None = None
        self._objects: _File | None = None
        self._staging: _File | None = None
        self._free = Extents(0)  # Of the staging file.
        self._not_before_s = dict.fromkeys(Area, 0.0)
        self._closed = False

    async def objects(self, region: int) -> memoryview | None:
        """Return the file that is named so, for reading; None: it cannot be had."""
        if self._objects is None or self._objects.region != region:
            async with self._turn:
                if self._objects is None or self._objects.region != region:
                    self._objects = await self._map(Area.OBJECTS)
        file = self._objects
        return file.view if file is not None and file.region == region else None

    async def stage(self, nbytes: int) -> Part | None:
        """Return room for an upload of so many bytes; None: there is none. See ``unstage``."""
        if self._staging is None:
            async with self._turn:
                if self._staging is None:
                    self._staging = await self._map(Area.STAGING)
                    length = len(self._staging.view) if self._staging is not None else 0
                    self._free = Extents(length)
        units = -(-nbytes // ALIGN_BYTES)
        taken = self._free.take(units * ALIGN_BYTES, 1) if self._staging is not None else None
        if self._staging is None or taken is None:
            return None
        region, view = self._staging
        return Part(region, taken[0], nbytes, view[taken[0] : taken[0] + nbytes])

    def unstage(self, part: Part, *, read: bool) -> None:
        """Take room back. Unless the server has ``read`` it, the file is used no more.

        The server may still be reading then.
        """
        if self._staging is None or self._staging.region != part.region:
            return
        if read:
            self._free.give(part.offset, -(-part.nbytes // ALIGN_BYTES) * ALIGN_BYTES)
        else:
            self._let_go()

    def close(self) -> None:
        """Hang up and let go of all files; what is being read or written stays mapped.

        There are none from now on.
        """
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = self._objects = self._staging = None

    async def _map(self, area: Area) -> _File | None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before_s[area]:
            return None
        for fresh in (False, True):  # The line may be of a server that is gone.
            if self._closed:
                break
            try:
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    return await self._mapped(area)
            except asyncio.CancelledError:
                self._let_go()  # An answer may be on its way.
                raise
            except (OSError, WireError, ConnectorError):
                self._let_go()
                if fresh:
                    self._not_before_s[area] = loop.time() + _PAUSE_S
        return None

    async def _mapped(self, area: Area) -> _File:
        if self._line is None:
            line = FileLine()
            with ExitStack() as undo:
                undo.callback(line.close)
                await line.open(self._settings)
                if self._closed:
                    raise ConnectorUnavailableError("the connector is closed")
                undo.pop_all()
            self._line = line
        return await self._line.map(area)


def _mapped(descriptor: int, nbytes: int, *, writable: bool) -> memoryview:
    """Map a whole file of a length that stays. Raises ``ConnectorDataError`` for another one."""
    try:
        kept = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not kept or os.fstat(descriptor).st_size != nbytes:
            raise ConnectorDataError("a file that may become shorter")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return memoryview(mmap.mmap(descriptor, nbytes, prot=access))
    except (OSError, ValueError) as error:
        raise translated(error) if isinstance(error, OSError) else ConnectorDataError() from error


def _close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)
