"""The connector to KVTier's cache server: pipelined requests over a few connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any, Final, Self, TypeVar

from kvtier.constants import (
    DAEMON_AT_ONCE_MAX,
    DAEMON_CONNECTION_BYTES_MAX,
    WIRE_KEY_BYTES_MAX,
    WIRE_KEYS_MAX,
    WIRE_PAYLOAD_BYTES_MAX,
)
from kvtier.errors import (
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorUnavailableError,
)
from kvtier.interfaces import LendOutcome, ReadOutcome
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import Contains, Data, Delete, Done, Found, Message, Read, Status, Write
from kvtier_connectors.server.errors import failure
from kvtier_connectors.server.line import Line
from kvtier_connectors.server.settings import Settings, parse_url
from kvtier_connectors.server.shared import NotSharedError, SharedPath

T = TypeVar("T")

#: Keys of one request, so that its header fits whatever their length.
_KEYS_BYTES_MAX: Final = 48 * 1024
_KEY_OVERHEAD_BYTES: Final = 8
#: Who has a connection asks no server for more of them so soon that could give none.
_PAUSE_S: Final = 5.0
_NOT_SHARED: Final = NotSharedError("the server shares no memory with us")
_Wanted = tuple[ReadRequest, memoryview]


class ServerConnector:
    """A ``Connector`` to one server. Belongs to the event loop that uses it first.

    A connection that is lost fails what was asked on it; the next call connects anew.
    """

    def __init__(self, settings: Settings) -> None:
        """Open nothing yet."""
        self._settings = settings
        self._shared = SharedPath(settings)
        self._shared_from = settings.shared_from
        self._lines: list[Line] = []
        self._opening: asyncio.Task[Line | ConnectorError] | None = None
        self._not_before_s = 0.0
        self._closed = False

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``kvtier://host:port``, ``kvtiers://host:port`` or ``kvtier+unix:///path``."""
        return cls(parse_url(url))

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell which keys have an object; a fault is no."""
        fit = [bytes(key) for key in keys if not _unfit(key, 0)]
        found = await _gathered([self._found(batch) for batch in _batches(fit)])
        answers = iter([each for batch in found for each in batch])
        return [not _unfit(key, 0) and next(answers) for key in keys]

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Fill the buffers. A range that ends behind the object gives what there is of it."""
        wanted = [*zip(requests, into, strict=True)]
        outcomes: list[ReadOutcome] = [None for _ in wanted]
        parts = self._parts(requests)
        reads = [self._read_part([wanted[index] for index in part]) for part in parts]
        for part, came in zip(parts, await _gathered(reads), strict=True):
            for index, outcome in zip(part, came, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def lend(self, keys: Sequence[bytes]) -> list[LendOutcome]:
        """Lease whole objects where they lie; refused where the server shares nothing with us."""
        starts = range(0, len(keys), DAEMON_AT_ONCE_MAX)
        parts = [[*map(bytes, keys[start : start + DAEMON_AT_ONCE_MAX])] for start in starts]
        with ExitStack() as undo:
            lent = await _gathered([self._lend(part, undo) for part in parts])
            undo.pop_all()
        return [*chain.from_iterable(lent)]

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Store whole objects."""
        return await _gathered([self._write(item) for item in items])

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Remove what is there; a fault is nobody's."""
        fit = [bytes(key) for key in keys if not _unfit(key, 0)]
        await _gathered([self._delete(batch) for batch in _batches(fit)])

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        lines, self._lines = self._lines, []
        for line in lines:
            line.close()
        self._shared.close()
        if self._opening is not None:
            await asyncio.wait({self._opening})

    async def _found(self, keys: Sequence[bytes]) -> list[bool]:
        try:
            answer, _ = await self._ask(lambda number: Contains(number, tuple(keys)))
        except ConnectorError:
            return [False for _ in keys]
        if not isinstance(answer, Found) or len(answer.found) != len(keys):
            return [False for _ in keys]
        return list(answer.found)

    def _parts(self, requests: Sequence[ReadRequest]) -> list[list[int]]:
        """Say by their indices which reads are one: as many leases as are answered in one go."""
        parts: list[list[int]] = []
        leased: list[int] = []
        nbytes = 0
        for index, request in enumerate(requests):
            if request.nbytes < self._shared_from:
                parts.append([index])
                continue
            nbytes += request.nbytes
            if len(leased) == DAEMON_AT_ONCE_MAX or nbytes > DAEMON_CONNECTION_BYTES_MAX:
                leased, nbytes = [], request.nbytes
            if not leased:
                parts.append(leased)
            leased.append(index)
        return parts

    async def _read_part(self, part: Sequence[_Wanted]) -> list[ReadOutcome]:
        """Read through shared memory where that is to be; what cannot be, by the socket."""
        if part[0][0].nbytes < self._shared_from:
            return [await self._read(*each) for each in part]
        outcomes: list[ReadOutcome] = [_unfit(each.key, each.nbytes) for each, _ in part]
        fit = [index for index, outcome in enumerate(outcomes) if outcome is None]
        requests, into = [part[index][0] for index in fit], [part[index][1] for index in fit]
        came: list[ReadOutcome] = [_NOT_SHARED for _ in fit]
        try:
            line = await self._line()
            if line.shares:
                came = await self._shared.read(line, requests, [each.cast("B") for each in into])
        except ConnectorError as error:
            came = [error.with_traceback(None) for _ in fit]
        left = [number for number, each in enumerate(came) if isinstance(each, NotSharedError)]
        again = await _gathered([self._read(requests[number], into[number]) for number in left])
        for number, outcome in zip(left, again, strict=True):
            came[number] = outcome
        for index, outcome in zip(fit, came, strict=True):
            outcomes[index] = outcome
        return outcomes

    async def _read(self, request: ReadRequest, into: memoryview) -> ReadOutcome:
        """Read by the socket."""
        key, offset, nbytes = bytes(request.key), request.offset, request.nbytes
        if fault := _unfit(key, nbytes):
            return fault
        try:
            answer, came = await self._ask(
                lambda number: Read(number, key, offset, nbytes), into=into.cast("B")
            )
        except ConnectorError as error:
            return error.with_traceback(None)
        if not isinstance(answer, Data):
            return _odd(answer)
        if answer.status is Status.ABSENT:
            return None
        return came if answer.status is Status.OK else failure(answer.status, answer.text)

    async def _lend(self, keys: Sequence[bytes], undo: ExitStack) -> list[LendOutcome]:
        fit = [key for key in keys if not _unfit(key, 0)]
        lent: list[LendOutcome] = [_NOT_SHARED for _ in fit]
        try:
            line = await self._line()
            if line.shares:
                lent = await self._shared.lend(line, fit, undo)
        except ConnectorError as error:
            lent = [error.with_traceback(None) for _ in fit]
        loans = iter(lent)
        return [_unfit(key, 0) or _refused(next(loans)) for key in keys]

    async def _write(self, item: WriteItem) -> ConnectorError | None:
        key, data = bytes(item.key), item.data.cast("B")
        if fault := _unfit(key, len(data)):
            return fault
        try:
            answer = await self._stored(key, data)
        except ConnectorError as error:
            return error.with_traceback(None)
        if not isinstance(answer, Done):
            return _odd(answer)
        return None if answer.status is Status.OK else _failed(answer)

    async def _stored(self, key: bytes, data: memoryview) -> Message:
        if len(data) >= self._shared_from and (line := await self._line()).shares:
            with suppress(NotSharedError):
                return await self._shared.write(line, key, data)
        answer, _ = await self._ask(lambda number: Write(number, key), payload=data)
        return answer

    async def _delete(self, keys: Sequence[bytes]) -> None:
        try:
            await self._ask(lambda number: Delete(number, tuple(keys)))
        except ConnectorError:
            return

    async def _ask(
        self,
        message: Callable[[int], Message],
        *,
        payload: memoryview | None = None,
        into: memoryview | None = None,
    ) -> tuple[Message, int]:
        line = await self._line()
        number = line.number()
        return await line.ask(message(number), number, payload=payload, into=into)

    async def _line(self) -> Line:
        """Return the connection with the least to do; open one while there are few.

        Whoever needs one that is being opened waits for that one. Where it cannot be had, they do
        with a busy one, or fail if there is none.
        """
        if self._closed:
            raise ConnectorUnavailableError("the connector is closed")
        self._lines = [line for line in self._lines if line.usable]
        least = min(self._lines, key=lambda line: line.load, default=None)
        if least is not None and not (least.load and self._may_grow()):
            return least
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
            self._opening.add_done_callback(self._opened)
        line = await asyncio.shield(self._opening)
        if not isinstance(line, ConnectorError):
            return line
        if least is not None and least.usable:
            return least
        raise line

    def _may_grow(self) -> bool:
        few = len(self._lines) < self._settings.connections and self._opening is None
        return few and asyncio.get_running_loop().time() >= self._not_before_s

    async def _open(self) -> Line | ConnectorError:
        line = Line(self._settings)
        try:
            await line.open()
        except ConnectorError as error:
            self._not_before_s = asyncio.get_running_loop().time() + _PAUSE_S
            return error.with_traceback(None)
        self._not_before_s = 0.0  # It may have been away, and given none to anybody.
        if self._closed:
            line.close()
        else:
            self._lines.append(line)
        return line

    def _opened(self, opening: asyncio.Task[Line | ConnectorError]) -> None:
        del opening
        self._opening = None


async def _gathered(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Do them at once; when we are cancelled, return once all of them have let go."""
    if len(calls) < 2:
        return [await call for call in calls]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


def _batches(keys: Sequence[bytes]) -> list[list[bytes]]:
    """Split keys into requests; keys that nothing can lie under are asked for as they are not."""
    batches: list[list[bytes]] = [[]]
    nbytes = 0
    for key in keys:
        if batches[-1] and (
            nbytes + len(key) > _KEYS_BYTES_MAX or len(batches[-1]) == WIRE_KEYS_MAX
        ):
            batches.append([])
            nbytes = 0
        batches[-1].append(bytes(key))
        nbytes += len(key) + _KEY_OVERHEAD_BYTES
    return [batch for batch in batches if batch]


def _unfit(key: bytes, nbytes: int) -> ConnectorError | None:
    """Return why nothing can lie under a key, or not so much."""
    if not 1 <= len(key) <= WIRE_KEY_BYTES_MAX:
        return ConnectorRefusedError(
            f"a key of {len(key)} bytes; allowed are 1 .. {WIRE_KEY_BYTES_MAX}"
        )
    if nbytes > WIRE_PAYLOAD_BYTES_MAX:
        return ConnectorRefusedError(f"{nbytes} bytes; allowed are {WIRE_PAYLOAD_BYTES_MAX}")
    return None


def _refused(outcome: LendOutcome) -> LendOutcome:
    """Say to the caller that nothing is lent, where that is so."""
    is_not = isinstance(outcome, NotSharedError)
    return ConnectorRefusedError(str(outcome)) if is_not else outcome


def _failed(answer: Done) -> ConnectorError:
    status = Status.UNAVAILABLE if answer.status is Status.ABSENT else answer.status
    return failure(status, answer.text)


def _odd(answer: Message) -> ConnectorDataError:
    return ConnectorDataError(f"an answer of another kind: {type(answer).__name__}")
