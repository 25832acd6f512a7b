"""Payloads that never pass through a socket: read where the server has them, staged for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing, suppress
from typing import Any, TypeVar

from kvtier.errors import ConnectorDataError, ConnectorError, ConnectorUnavailableError
from kvtier.interfaces import LendOutcome, ReadOutcome
from kvtier.types import ReadRequest
from kvtier.wire import Done, Lease, Leased, Message, Status, Take
from kvtier.wire_shared import copied
from kvtier_connectors.server.files import SharedFiles
from kvtier_connectors.server.line import Line
from kvtier_connectors.server.settings import Settings

T = TypeVar("T")


class NotSharedError(ConnectorError):
    """Not through shared memory, that is; by the socket it may be."""


class LeasedLoan:
    """A ``Loan``: an object that is leased on a line, in the server's mapping."""

    def __init__(self, line: Line, number: int, view: memoryview) -> None:
        """The lease of that number becomes ours to end. Made in the line's loop."""
        self._line = line
        self._number = number
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
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
            if threading.get_ident() == self._thread:
                self._line.release(self._number)
            else:
                self._loop.call_soon_threadsafe(self._line.release, self._number)


class SharedPath:
    """One connector's way through shared memory. Belongs to its loop."""

    def __init__(self, settings: Settings) -> None:
        self._files = SharedFiles(settings)

    async def read(
        self, line: Line, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Lease objects, copy what there is of a range of each, release them in one go.

        A ``NotSharedError`` is the outcome of what is to be read by the socket. Raises a
        ``ConnectorError`` of a line that is not usable.
        """
        held: list[int] = []

        async def copy(index: int, leased: Leased) -> ReadOutcome:
            held.append(leased.request)
            offset, target = requests[index].offset, into[index]
            data = (await self._view(leased))[offset : offset + len(target)]
            await copied(data, target[: len(data)])
            return len(data)

        try:
            outcomes = await _each_leased(line, [bytes(each.key) for each in requests], copy)
            if not held or line.holds:
                return outcomes
            gone = ConnectorUnavailableError("the server has gone while its memory was read")
            return [gone if isinstance(each, int) else each for each in outcomes]
        finally:
            line.release(*held)

    async def lend(self, line: Line, keys: Sequence[bytes], undo: ExitStack) -> list[LendOutcome]:
        """Lease objects, and leave them where they are. Outcomes and errors are as of ``read``.

        ``undo`` is given the release of each.
        """

        async def keep(_: int, leased: Leased) -> LendOutcome:
            with ExitStack() as lost:
                lost.callback(line.release, leased.request)
                loan = LeasedLoan(line, leased.request, await self._view(leased))
                lost.pop_all()
            undo.callback(loan.release)
            return loan

        return await _each_leased(line, keys, keep)

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


async def _each_leased(
    line: Line,
    keys: Sequence[bytes],
    work: Callable[[int, Leased], Coroutine[Any, Any, T]],
) -> list[T | ConnectorError | None]:
    """Lease objects in one go; do with each, by its index, what it is for, as they come.

    Whoever works has the lease to release by its number. Return what was done with each; None
    where there is no object.
    """
    if len(keys) == 1:  # In half the time.
        number = line.number()
        try:
            answer, _ = await line.ask(Lease(number, keys[0]), number)
        except ConnectorError as error:
            return [error.with_traceback(None)]
        return [await _done(work, 0, answer)]
    outcomes: list[T | ConnectorError | None] = [None for _ in keys]
    asked = {line.number(): index for index, _ in enumerate(keys)}
    messages = {number: Lease(number, keys[index]) for number, index in asked.items()}
    async with aclosing(line.ask_each(messages)) as answers:
        async for number, outcome in answers:
            outcomes[asked[number]] = await _done(work, asked[number], outcome)
    return outcomes


async def _done(
    work: Callable[[int, Leased], Coroutine[Any, Any, T]],
    index: int,
    answer: Message | ConnectorError,
) -> T | ConnectorError | None:
    try:
        leased = _taken(answer)
        return None if leased is None else await work(index, leased)
    except ConnectorError as error:
        return error.with_traceback(None)


def _taken(answer: Message | ConnectorError) -> Leased | None:
    """Return what was leased; None: there is no object. Raises ``ConnectorError``."""
    if isinstance(answer, ConnectorError):
        raise answer
    if not isinstance(answer, Leased):
        raise ConnectorDataError(f"an answer of another kind: {type(answer).__name__}")
    if answer.status is Status.ABSENT:
        return None
    if answer.status is not Status.OK:
        raise NotSharedError(answer.text)
    return answer
