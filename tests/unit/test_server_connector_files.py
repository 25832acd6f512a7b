"""The connector of the cache server where a server's files are not what it says."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.errors import ConnectorDataError
from kvtier.interfaces import ReadOutcome
from kvtier.registry import connect
from kvtier.types import ReadRequest
from kvtier.wire import (
    FROM_CLIENT,
    Data,
    Hello,
    Lease,
    Leased,
    Map,
    Mapped,
    Message,
    Read,
    Release,
    Status,
    Welcome,
    encode,
)
from kvtier.wire_parser import Parser
from tests.lib.plane import until
from tests.lib.process_figures import figures

NBYTES = 5000
FILE_BYTES = 65_536
PLACE = 4096
REGION = 7


def shared_file(*, sealed: bool = True) -> int:
    """A file whose object is full of ``s``; by the socket it would be full of ``d``."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, FILE_BYTES)
    os.pwrite(descriptor, b"s" * NBYTES, PLACE)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


@dataclass
class Server:
    """Answers as it is told to. ``files`` go with the answer to a ``Map``."""

    files: Callable[[], list[int]] = lambda: [shared_file()]
    mapped: Mapped = field(default_factory=lambda: Mapped(0, Status.OK, "", REGION, FILE_BYTES))
    leased: tuple[int, int, int] = (REGION, PLACE, NBYTES)
    welcome: int = 2
    seen: list[Message] = field(default_factory=list)
    open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        with suppress(ConnectionError):
            await self._serve(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self.open -= 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = Parser(FROM_CLIENT)
        while data := await reader.read(4096):
            parser.buffer()[: len(data)] = data
            parser.received(len(data))
            while (frame := parser.next()) is not None:
                self.seen.append(frame.message)
                self.answer(frame.message, writer)

    def answer(self, message: Message, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, Hello):
            writer.write(encode(Welcome(self.welcome)))
        elif isinstance(message, Lease):
            writer.write(encode(Leased(message.request, Status.OK, "", *self.leased)))
        elif isinstance(message, Read):
            data = b"d" * message.nbytes
            writer.write(encode(Data(message.request, Status.OK, ""), len(data)) + data)
        elif isinstance(message, Map):
            files = self.files()
            number = os.dup(writer.get_extra_info("socket").fileno())
            with socket.socket(fileno=number) as connection:
                socket.send_fds(connection, [encode(self.mapped)], files)
            for each in files:
                os.close(each)

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.seen)


@asynccontextmanager
async def running(folder: Path, server: Server) -> AsyncIterator[str]:
    async with await asyncio.start_unix_server(server.serve, folder / "socket") as listening:
        yield f"kvtier+unix://{folder}/socket?shared_from=0&timeout_s=30&connect_timeout_s=30"
        await until(lambda: server.open == 0)
        listening.close()


async def read(folder: Path, server: Server, *, offset: int = 0) -> tuple[ReadOutcome, bytes]:
    buffer = memoryview(bytearray(NBYTES))
    async with running(folder, server) as url:
        connector = connect(url)
        (outcome,) = await connector.read([ReadRequest(b"key", offset, NBYTES)], [buffer])
        await until(lambda: server.count(Release) == server.count(Lease))
        await connector.close()
    return outcome, bytes(buffer)


async def test_what_is_leased_is_read_in_its_place(tmp_path: Path) -> None:
    server = Server()
    assert await read(tmp_path, server) == (NBYTES, b"s" * NBYTES)
    assert server.count(Read) == 0
    part, data = await read(tmp_path, server, offset=NBYTES - 10)
    assert part == 10
    assert data[:10] == b"s" * 10
    nothing, _ = await read(tmp_path, server, offset=NBYTES + 10)
    assert nothing == 0


async def test_an_object_that_ends_behind_its_file_is_a_fault(tmp_path: Path) -> None:
    server = Server(leased=(REGION, FILE_BYTES - NBYTES + 1, NBYTES))
    outcome, _ = await read(tmp_path, server)
    assert isinstance(outcome, ConnectorDataError)


LIES = {
    "a_file_that_may_become_shorter": Server(files=lambda: [shared_file(sealed=False)]),
    "no_file": Server(files=list),
    "a_file_of_another_length": Server(mapped=Mapped(0, Status.OK, "", REGION, FILE_BYTES + PLACE)),
    "a_file_of_no_bytes": Server(mapped=Mapped(0, Status.OK, "", REGION, 0)),
    "another_file": Server(mapped=Mapped(0, Status.OK, "", REGION + 1, FILE_BYTES)),
    "a_pipe": Server(files=lambda: [os.open("/dev/null", os.O_RDONLY)]),
    "a_refusal": Server(files=list, mapped=Mapped(0, Status.REFUSED, "no", 0, 0)),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_file_that_is_not_what_is_said_is_done_without(tmp_path: Path, name: str) -> None:
    before = figures(os.getpid()).descriptors
    server = LIES[name]
    assert await read(tmp_path, server) == (NBYTES, b"d" * NBYTES)
    assert server.count(Read) == 1
    assert figures(os.getpid()).descriptors == before


class Babbling(Server):
    """Sends the beginning of an answer, and when that was taken more than it can go on with."""

    babbles: asyncio.Task[None]

    def answer(self, message: Message, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, Map):
            self.babbles = asyncio.create_task(self.babble(writer))
        else:
            super().answer(message, writer)

    async def babble(self, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(self.mapped)[:10])
        number = writer.get_extra_info("socket").fileno()
        await until(lambda: fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)) == bytes(4))
        writer.write(bytes(4096))


async def test_a_server_that_babbles_instead_of_a_file_is_read_by_the_socket(
    tmp_path: Path,
) -> None:
    assert await read(tmp_path, Babbling()) == (NBYTES, b"d" * NBYTES)


async def test_what_cannot_be_had_is_not_asked_for_each_time(tmp_path: Path) -> None:
    server = Server(files=list, mapped=Mapped(0, Status.REFUSED, "no", 0, 0))
    async with running(tmp_path, server) as url:
        connector = connect(url)
        buffer = memoryview(bytearray(NBYTES))
        for _ in range(20):
            assert await connector.read([ReadRequest(b"key", 0, NBYTES)], [buffer]) == [NBYTES]
        await connector.close()
    assert server.count(Map) == 2


async def test_a_server_that_welcomes_to_version_1_is_asked_for_no_leases(tmp_path: Path) -> None:
    server = Server(welcome=1)
    assert await read(tmp_path, server) == (NBYTES, b"d" * NBYTES)
    assert server.count(Lease) == 0
    assert server.seen[0] == Hello(1, 2, b"")
