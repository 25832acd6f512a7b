"""Payloads that never pass through a socket: read where the server has them, staged for it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

from kvtier.errors import ConnectorDataError, ConnectorError, ConnectorUnavailableError
from kvtier.interfaces import ReadOutcome
from kvtier.wire import Done, Lease, Leased, Message, Status, Take
from kvtier.wire_shared import copied
from kvtier_connectors.server.files import SharedFiles
from kvtier_connectors.server.line import Line
from kvtier_connectors.server.settings import Settings


class NotSharedError(ConnectorError):
    """Not through shared memory, that is; by the socket it may be."""


class LeasedLoan:
    """A ``Loan``: an object that is leased on a line, in the server's mapping."""

    def __init__(self, line: Line, number: int, view: memoryview) -> None:
        """The lease of that number becomes ours to end. Made in the line's loop."""
        self._line = line
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._view = view

    @property
    def view(self) -> memoryview:
        """Its bytes; the mapping stays as long as anybody has them."""
        return self._view

    @property
    def holds(self) -> bool:
        """True while the server has not hung up: before, it lets go of nothing."""
        return self._line.holds

    def release(self) -> None:
        """Have the line end the lease. Where the loop has ended, so has the line."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._line.release, self._number)


class SharedPath:
    """One connector's way through shared memory. Belongs to its loop."""

    def __init__(self, settings: Settings) -> None:
        self._files = SharedFiles(settings)

    async def read(self, line: Line, key: bytes, offset: int, into: memoryview) -> ReadOutcome:
        """Lease an object, copy what there is of a range, release it.

        Raises ``NotSharedError``, or another ``ConnectorError`` of the line.
        """
        leased = await _leased(line, key)
        if leased is None:
            return None
        try:
            view = await self._view(leased)
            data = view[offset : offset + len(into)]
            await copied(data, into[: len(data)])
            if not line.holds:
                raise ConnectorUnavailableError("the server has gone while its memory was read")
            return len(data)
        finally:
            line.release(leased.request)

    async def lend(self, line: Line, key: bytes) -> LeasedLoan | None:
        """Lease an object, and leave it where it is; None: there is none. Raises as ``read``."""
        leased = await _leased(line, key)
        if leased is None:
            return None
        with ExitStack() as undo:
            undo.callback(line.release, leased.request)
            loan = LeasedLoan(line, leased.request, await self._view(leased))
            undo.pop_all()
        return loan

    async def write(self, line: Line, key: bytes, data: memoryview) -> Message:
        """Stage an object and have the server take it; return its answer.

        Raises ``NotSharedError``, or another ``ConnectorError`` of the line.
        """
        part = await self._files.stage(len(data))
        if part is None:
            raise NotSharedError("no room in a staging file")
        read = False
        try:
            await copied(data, part.view)
            number = line.number()
            take = Take(number, key, part.region, part.offset, part.nbytes)
            answer, _ = await line.ask(take, number)
            if isinstance(answer, Done) and answer.status is Status.ABSENT:
                raise NotSharedError("the file is not the server's any more")
            read = True
        finally:
            self._files.unstage(part, read=read)
        return answer

    def close(self) -> None:
        """Let go of all files."""
        self._files.close()

    async def _view(self, leased: Leased) -> memoryview:
        memory = await self._files.objects(leased.region)
        if memory is None:
            raise NotSharedError("the file that it lies in is not to be had")
        view = memory[leased.offset : leased.offset + leased.nbytes]
        if len(view) != leased.nbytes:
            raise ConnectorDataError("an object that ends behind its file")
        return view


async def _leased(line: Line, key: bytes) -> Leased | None:
    """Lease an object, which is the caller's to release by its number; None: there is none."""
    number = line.number()
    leased, _ = await line.ask(Lease(number, key), number)
    if not isinstance(leased, Leased):
        raise ConnectorDataError(f"an answer of another kind: {type(leased).__name__}")
    if leased.status is Status.ABSENT:
        return None
    if leased.status is not Status.OK:
        raise NotSharedError(leased.text)
    return leased
