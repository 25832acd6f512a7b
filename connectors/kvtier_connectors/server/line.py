"""One connection to a server: requests out, answers matched by their numbers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from kvtier.constants import WIRE_KEYS_MAX
from kvtier.errors import ConnectorDataError, ConnectorError, ConnectorUnavailableError
from kvtier.wire import (
    FROM_SERVER,
    WIRE_VERSION,
    WIRE_VERSION_SOCKET,
    Data,
    Done,
    Found,
    Hello,
    Leased,
    Message,
    Refused,
    Release,
    Status,
    Welcome,
    version_of,
)
from kvtier.wire_fields import WireError
from kvtier.wire_link import Link
from kvtier.wire_parser import Frame
from kvtier.wire_shared import hung_up
from kvtier_connectors.server.asked import Asked, any_of
from kvtier_connectors.server.errors import failure, translated, wordless
from kvtier_connectors.server.settings import Settings

_NUMBERS: Final = 2**32
#: Those without a payload. A union made for each answer would cost as much as taking it.
_ANSWERS: Final = (Found, Done, Leased)


class Line:
    """The ``Owner`` of one connection. Everything happens in the loop's thread.

    ``ask`` may be called any number of times at once. What was asked when the connection is lost
    ends with an error; a request that is given up lets go of its buffer at once.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, Asked] = {}  # In the order of their deadlines.
        self._expiry: asyncio.TimerHandle | None = None
        self._numbers = itertools.count()
        self._welcomed: asyncio.Future[None] = self._loop.create_future()
        self._coming: tuple[int, Data, int] | None = None
        self._fault: ConnectorError | None = None
        self._version = WIRE_VERSION_SOCKET
        self._connection: socket.socket | None = None  # Ours, to see whether the server is there.
        self._released: list[int] = []
        self._releasing: asyncio.Handle | asyncio.Task[None] | None = None
        self._link = Link(FROM_SERVER, self)

    @property
    def usable(self) -> bool:
        """True while it can be asked."""
        return self._fault is None

    @property
    def shares(self) -> bool:
        """True while the server gives leases on it."""
        return self._version == WIRE_VERSION and self.usable

    @property
    def holds(self) -> bool:
        """True while everything that was leased on it and not released stays as it is.

        Any thread may ask: it is ``usable`` after the look only if the loop had not closed our
        descriptor before, whose number may be another connection's by then.
        """
        connection = self._connection
        return connection is not None and not hung_up(connection) and self.usable

    @property
    def load(self) -> int:
        """Requests that have no answer yet."""
        return len(self._asked)

    async def open(self) -> None:
        """Connect and be welcomed. Raises ``ConnectorError``."""
        settings, loop = self._settings, self._loop
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                if settings.path:
                    await loop.create_unix_connection(lambda: self._link, settings.path)
                else:
                    await loop.create_connection(
                        lambda: self._link, settings.host, settings.port, ssl=settings.tls
                    )
                await self._welcomed
        except (OSError, WireError) as error:
            self._lose(translated(error))
            raise self.fault from error
        except (ConnectorError, asyncio.CancelledError):
            self._lose(ConnectorUnavailableError("the connection was given up"))
            raise

    @property
    def fault(self) -> ConnectorError:
        """Why it is not usable."""
        return self._fault or ConnectorUnavailableError("the connection is closed")

    def number(self) -> int:
        """Return a number for a request that no open one has."""
        return next(self._numbers) % _NUMBERS

    async def ask(
        self,
        message: Message,
        number: int,
        *,
        payload: memoryview | None = None,
        into: memoryview | None = None,
    ) -> tuple[Message, int]:
        """Send a request; return its answer, and how many bytes came into ``into``.

        Raises ``ConnectorError``. Neither buffer is touched after it has returned or raised. What
        it returns as leased is the caller's to release.
        """
        asked = self._note(number, into)
        taken = False
        try:
            if payload is None and self._link.clear:
                self._put(message)
            else:
                async with asyncio.timeout_at(asked.deadline_s):
                    await self._link.send(message, payload)
            answer = await asked.answer
            taken = True
            return answer
        except OSError as error:
            raise self._failed(asked, error) from error
        finally:
            if taken:
                del self._asked[number]
            else:
                self._forget(number, asked)

    async def ask_each(
        self, messages: Mapping[int, Message]
    ) -> AsyncGenerator[tuple[int, Message | ConnectorError], None]:
        """Send requests in one go, by their numbers; give each one's answer, or fault, as it comes.

        None of them has a payload, nor has its answer. What was given as leased is the caller's to
        release; what was not when it is closed is given up.
        """
        left = {number: self._note(number, None) for number in messages}
        try:
            await self._put_all(left, messages)
            while left:
                done = [number for number, asked in left.items() if asked.answer.done()]
                for number in done:
                    asked = left.pop(number)
                    del self._asked[number]
                    yield number, self._outcome(asked)
                if not done:
                    await any_of(left.values())
        finally:
            for number, asked in left.items():
                self._forget(number, asked)

    def release(self, *numbers: int) -> None:
        """End leases: with the next request, or when the loop has nothing else to do."""
        self._released += numbers
        if self._releasing is None:
            self._releasing = self._loop.call_soon(self._release)

    def close(self) -> None:
        """Close; what is asked ends with an error."""
        self._lose(ConnectorUnavailableError("the connector is closed"))

    def opened(self) -> None:
        """See ``Owner``."""
        newest = WIRE_VERSION if self._settings.shared else WIRE_VERSION_SOCKET
        self._link.send_now(Hello(WIRE_VERSION_SOCKET, newest, self._settings.token))

    def arrived(self, frame: Frame) -> None:
        """See ``Owner``."""
        message = frame.message
        if self._version == WIRE_VERSION and isinstance(message, _ANSWERS):
            self._end(message.request, message, 0)  # It was welcomed, and takes all kinds.
        elif isinstance(message, Refused):
            status = Status.REFUSED if message.status is Status.OK else message.status
            status = Status.UNAVAILABLE if status is Status.ABSENT else status
            self._lose(failure(status, message.text))
        elif isinstance(message, Welcome):
            self._take_welcome(message)
        elif not self._welcomed.done():
            self._lose(ConnectorDataError("an answer before the welcome"))
        elif version_of(message.kind) > self._version:
            self._lose(ConnectorDataError("an answer of another version of the wire"))
        elif isinstance(message, Data):
            self._take_data(message, frame.payload_bytes)
        elif isinstance(message, _ANSWERS):
            self._end(message.request, message, 0)

    def payload_arrived(self) -> None:
        """See ``Owner``."""
        assert self._coming is not None, "a payload of nothing"
        (number, message, nbytes), self._coming = self._coming, None
        self._end(number, message, nbytes)

    def broken(self, error: WireError) -> None:
        """See ``Owner``."""
        self._lose(translated(error))

    def closed(self, error: Exception | None) -> None:
        """See ``Owner``."""
        fault: ConnectorError = ConnectorUnavailableError("the server has closed the connection")
        if isinstance(error, OSError):
            fault = translated(error)
        settings = self._settings
        if not (settings.path or self._welcomed.done() or self._link.received_bytes):
            fault = wordless(fault, tls=settings.tls is not None, certified=settings.certified)
        self._lose(fault)

    def _take_welcome(self, message: Welcome) -> None:
        newest = WIRE_VERSION if self._settings.shared else WIRE_VERSION_SOCKET
        if not WIRE_VERSION_SOCKET <= message.version <= newest or self._welcomed.done():
            self._lose(ConnectorDataError(f"welcomed to version {message.version} of the wire"))
            return
        self._version = message.version
        if self.shares:
            try:
                self._connection = self._link.duplicate()
            except OSError as error:
                self._lose(translated(error))
                return
        self._welcomed.set_result(None)

    def _take_data(self, message: Data, nbytes: int) -> None:
        asked = self._asked.get(message.request)
        if not nbytes:
            self._end(message.request, message, 0)
            return
        into = asked.into if asked is not None else None
        if into is not None and nbytes > len(into):
            self._lose(ConnectorDataError(f"{nbytes} bytes where {len(into)} were asked for"))
            return
        # What nobody waits for any more goes nowhere.
        self._coming = (message.request, message, nbytes)
        self._link.place(None if into is None else into[:nbytes])

    def _note(self, number: int, into: memoryview | None) -> Asked:
        """Note a request that is about to be sent. Raises ``ConnectorError``."""
        if self._fault is not None:
            raise self._fault
        loop = self._loop
        deadline_s = loop.time() + self._settings.timeout_s
        received_bytes = self._link.received_bytes
        asked = Asked(loop.create_future(), into, deadline_s, received_bytes)
        self._asked[number] = asked
        if self._expiry is None:
            self._expiry = loop.call_at(deadline_s, self._expire)
        return asked

    def _expire(self) -> None:
        """Give up what is late, and look again when the next one may be: one timer for all."""
        self._expiry = None
        now_s = self._loop.time()
        for asked in self._asked.values():
            if asked.deadline_s > now_s:
                self._expiry = self._loop.call_at(asked.deadline_s, self._expire)
                return
            asked.fail(TimeoutError())

    def _put(self, *messages: Message) -> None:
        """Send requests, and with them what has been released, over a link that is clear."""
        if self._released:
            self._link.put(*self._ended_leases(), *messages)
        else:
            self._link.put(*messages)

    async def _put_all(self, asked: Mapping[int, Asked], messages: Mapping[int, Message]) -> None:
        """Send requests; those that cannot be sent fail."""
        if self._link.clear:
            self._put(*messages.values())
            return
        try:
            for number, message in messages.items():
                async with asyncio.timeout_at(asked[number].deadline_s):
                    await self._link.send(message)
        except OSError as error:
            for each in asked.values():
                each.fail(self._failed(each, error))

    def _outcome(self, asked: Asked) -> Message | ConnectorError:
        """Return the answer of a request that is done, or why there is none."""
        error = asked.answer.exception()
        if error is None:
            return asked.answer.result()[0]
        return error if isinstance(error, ConnectorError) else self._failed(asked, error)

    def _failed(self, asked: Asked, error: BaseException) -> ConnectorError:
        """Return why a request has failed; whoever has said nothing since it was sent is left."""
        assert isinstance(error, OSError), "no error of a connection"
        fault = translated(error)  # Whichever is told, the error has let go of the buffers.
        if not self.usable:
            fault = self.fault
        late = isinstance(error, TimeoutError)
        if not late or self._link.received_bytes == asked.before_bytes:
            self._lose(fault)  # What has said nothing for so long may be gone for good.
        return fault

    def _end(self, number: int, message: Message, nbytes: int) -> None:
        asked = self._asked.get(number)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result((message, nbytes))
        elif isinstance(message, Leased) and message.status is Status.OK:
            self.release(number)  # Nobody waits for it any more.

    def _forget(self, number: int, asked: Asked) -> None:
        """Let go of a request and its buffer, and of what it got, as nobody took it."""
        del self._asked[number]
        answer = asked.answer
        if answer.done() and not answer.cancelled() and not answer.exception():
            self._end(number, *answer.result())
        if not answer.cancel() and not answer.cancelled():
            answer.exception()  # Nobody may have waited for it.
        if self._coming is not None and self._coming[0] == number:
            self._link.discard()

    def _lose(self, fault: ConnectorError) -> None:
        """End everything for a reason; the first one counts."""
        if self._fault is not None:
            return
        self._fault = fault
        self._link.abort()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._connection is not None:
            with self._connection as connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # Ours keeps it open otherwise.
            self._connection = None
        for asked in self._asked.values():
            asked.fail(fault)
        if not self._welcomed.done():
            self._welcomed.set_exception(fault)
            self._welcomed.exception()  # Nobody may wait for it any more.

    def _release(self) -> None:
        """Tell the server of leases that have ended, unless a request has taken that along."""
        if self._released and self.usable and not self._link.clear:
            self._releasing = self._loop.create_task(self._release_later())
            return
        self._releasing = None
        if self._released and self.usable:
            self._put()

    async def _release_later(self) -> None:
        try:
            while self._released:
                for message in self._ended_leases():
                    await self._link.send(message)
        except OSError as error:
            self._lose(translated(error))
        finally:
            self._releasing = None

    def _ended_leases(self) -> list[Message]:
        """Return what tells the server of all leases that have ended since the last time."""
        ended, self._released = self._released, []
        starts = range(0, len(ended), WIRE_KEYS_MAX)
        return [Release(tuple(ended[start : start + WIRE_KEYS_MAX])) for start in starts]
