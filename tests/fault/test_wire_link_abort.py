"""A connection that is given up in the middle of a payload sends nothing more of that memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest

from kvtier.constants import MIB
from kvtier.loops import new_loop
from kvtier.wire import FROM_SERVER, Data, Status
from kvtier.wire_fields import WireError
from kvtier.wire_link import Link
from kvtier.wire_parser import Frame

NBYTES = 8 * MIB
OLD, NEW = 0x11, 0xEE


class Quiet:
    """An ``Owner`` that notes when its connection is gone."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    def opened(self) -> None:
        pass

    def arrived(self, frame: Frame) -> None:
        raise AssertionError(frame)

    def payload_arrived(self) -> None:
        raise AssertionError("nothing was sent here")

    def broken(self, error: WireError) -> None:
        raise error

    def closed(self, error: Exception | None) -> None:
        del error
        self.gone.set()


class Reader:
    """The other end, which reads only when it is told to."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self.data = bytearray()

    def take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while some := self._connection.recv(MIB):
                self.data += some


async def given_up(graceful_first: bool) -> bytes:
    """Give up a send that is stuck in its payload, write over that, and return what arrives."""
    ours, theirs = socket.socketpair()
    reader, owner = Reader(theirs), Quiet()
    link = Link(FROM_SERVER, owner)
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(lambda: link, ours)
    payload = bytearray([OLD]) * NBYTES
    sending = loop.create_task(link.send(Data(1, Status.OK, ""), memoryview(payload)))
    for _ in range(3):  # Some goes to the system, the rest has no room there.
        await asyncio.sleep(0)
    assert link.transport.get_write_buffer_size(), "nothing is left to be written"
    if graceful_first:
        link.close()
    reader.take()  # There is room again, as the connection is given up.
    link.abort()
    payload[:] = bytearray([NEW]) * NBYTES
    await owner.gone.wait()
    with pytest.raises(ConnectionError):
        await sending
    reader.take()
    theirs.close()
    return bytes(reader.data)


@pytest.mark.parametrize("graceful_first", [False, True], ids=["aborted", "closed-before"])
@pytest.mark.parametrize("loops", [new_loop, asyncio.new_event_loop], ids=["own", "asyncio"])
def test_what_is_written_over_after_an_abort_is_never_sent(
    loops: Callable[[], asyncio.AbstractEventLoop], graceful_first: bool
) -> None:
    loop = loops()
    try:
        arrived = loop.run_until_complete(given_up(graceful_first))
    finally:
        loop.close()
    assert OLD in arrived, "nothing was under way"
    assert NEW not in arrived
