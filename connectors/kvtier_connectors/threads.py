"""Threads that wait for a medium, and calls that end only when no thread holds their buffers."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from kvtier.constants import WIRE_BYTES_PER_S_MIN
from kvtier.errors import ConnectorError, ConnectorUnavailableError

_ErrorT = TypeVar("_ErrorT", bound=ConnectorError)
_Job = TypeVar("_Job")
_P = ParamSpec("_P")
_T = TypeVar("_T")
Hop = Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]

#: Shares of calls that may run or wait for a thread; what comes on top fails rather than waits.
SHARES_MAX: Final = 256

#: A call has several turns, as a look at a header, its parts and what clears up after them, each of
#: which may meet with silence. What takes longer than so many, and than its bytes take at the
#: lowest rate, does not count as coming: a store that sends a byte now and then is never silent.
SILENCES_MAX: Final = 4


def call_s_max(silence_s: float, nbytes: int) -> float:
    """Return how long a call may take of a store that may be silent for so long at a time."""
    return SILENCES_MAX * silence_s + nbytes / WIRE_BYTES_PER_S_MIN


def without_frames(error: _ErrorT) -> _ErrorT:
    """Return an outcome with no more than its cause, and both without the frames that they came by.

    Those hold the caller's buffers, and often the errors, as do those of what the cause came from.
    """
    cause = error.__cause__
    each: BaseException | None = error
    while each is not None:
        after = each.__cause__ or each.__context__
        each.__cause__ = each.__context__ = each.__traceback__ = None
        each = after
    error.__cause__ = cause
    return error


class Halt:
    """Tells threads that nobody wants their answer any more. Set once; safe from any thread."""

    def __init__(self) -> None:
        """Start as not set."""
        self._lock = threading.Lock()
        self._is_set = False
        self._actions: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        """Tell whether to stop at the next good point."""
        with self._lock:
            return self._is_set

    def when_set(self, action: Callable[[], None]) -> None:
        """Have ``action`` called, by whoever sets this, or at once if that has happened."""
        with self._lock:
            if not self._is_set:
                self._actions.append(action)
                return
        action()

    def forget(self, action: Callable[[], None]) -> None:
        """Undo ``when_set``."""
        with self._lock:
            if action in self._actions:
                self._actions.remove(action)

    def set(self) -> None:
        """Set it and call what was asked for."""
        with self._lock:
            self._is_set = True
            # Under the lock, so that none is called any more once it was forgotten.
            while self._actions:
                self._actions.pop()()


class _Pool(ThreadPoolExecutor):
    """Never does what it has refused: whoever was refused has given the buffers to others.

    Python's own keeps work for which it could start no thread, and does it with the next one.
    """

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Raises ``ConnectorUnavailableError`` when it is closed or the system has no thread."""
        job: Future[_T] = Future()
        work = [partial(fn, *args, **kwargs)]
        try:
            super().submit(_do_boundary, job, work)
        except RuntimeError as error:
            # Unless a thread that runs already has begun it.
            if job.cancel():
                work.clear()
                raise ConnectorUnavailableError(f"no thread for the store: {error}") from None
        return job


class Threads:
    """A connector's own threads. Its methods belong to one event loop."""

    def __init__(self, count: int, name: str) -> None:
        """Start threads as they are needed, at most ``count``."""
        self.executor: Final = _Pool(count, thread_name_prefix=name)
        self._shares = 0
        self._closed = False

    def refusal(self, count: int) -> ConnectorUnavailableError | None:
        """Return why so many shares cannot be taken on now, or None."""
        if self._closed:
            return ConnectorUnavailableError("the connector is closed")
        if self._shares + count > SHARES_MAX:
            return ConnectorUnavailableError("too many calls wait for the store")
        return None

    async def gather(
        self, shares: Sequence[Awaitable[_T]], halt: Halt, limit_s: float = math.inf
    ) -> list[_T | ConnectorUnavailableError]:
        """Return what the shares return, which run in ``executor``, or that it had no thread.

        When we are cancelled, and when ``limit_s`` are over, ``halt`` is set, and we return once
        every share has ended.
        """
        futures = [asyncio.ensure_future(share) for share in shares]
        self._shares += len(futures)
        cancelled = False
        left_s = None if math.isinf(limit_s) else limit_s
        while futures and not all(future.done() for future in futures):
            try:
                _, running = await asyncio.wait(futures, timeout=left_s)
            except asyncio.CancelledError:
                cancelled = True
                running = set(futures)
            if running:
                halt.set()
                left_s = None
        self._shares -= len(futures)
        if cancelled:
            raise asyncio.CancelledError
        outcomes: list[_T | ConnectorUnavailableError] = []
        for future in futures:
            try:
                outcomes.append(future.result())
            except ConnectorUnavailableError as error:
                outcomes.append(without_frames(error))
        return outcomes

    async def each(
        self,
        function: Callable[[_Job, Halt], _T],
        jobs: Sequence[_Job],
        *,
        shares_max: int,
        hop: Hop | None = None,
        limit_s: float = math.inf,
    ) -> list[_T | ConnectorError]:
        """Do the jobs in as many threads at once; return what comes of each, in their order.

        What is not over within ``limit_s`` is given up, as when the call is cancelled.

        ``function`` raises nothing but ``ConnectorError``, which is an outcome. ``hop`` takes a
        function to a thread where the loop's own way is not wanted.
        """
        count = min(shares_max, len(jobs))
        if refusal := self.refusal(count):
            return [refusal for _ in jobs]
        halt = Halt()
        if count == 1 and hop is None:
            try:
                return await self._alone(partial(_do_share, function, jobs, halt), halt, limit_s)
            except ConnectorUnavailableError as error:  # No thread for it.
                return [without_frames(error) for _ in jobs]
        run = (hop or _hop)(_do_share)
        shares = [run(function, jobs[n::count], halt, executor=self.executor) for n in range(count)]
        outcomes: list[_T | ConnectorError] = [ConnectorUnavailableError() for _ in jobs]
        for start, share in enumerate(await self.gather(shares, halt, limit_s)):
            if isinstance(share, ConnectorUnavailableError):
                outcomes[start::count] = [share for _ in jobs[start::count]]
            else:
                outcomes[start::count] = share
        return outcomes

    async def _alone(self, share: Callable[[], _T], halt: Halt, limit_s: float) -> _T:
        """As ``gather`` for one share, in fewer turns of the loop."""
        loop = asyncio.get_running_loop()
        job = self.executor.submit(share)
        timer = None if math.isinf(limit_s) else loop.call_later(limit_s, halt.set)
        self._shares += 1
        cancelled = False
        while not job.done():
            ended = loop.create_future()
            job.add_done_callback(partial(_tell, loop, ended))
            try:
                await ended
            except asyncio.CancelledError:
                cancelled = True
                halt.set()
        self._shares -= 1
        if timer is not None:
            timer.cancel()
        if cancelled:
            raise asyncio.CancelledError
        return job.result()

    def close(self) -> None:
        """Take no more shares; those that run are finished."""
        self._closed = True
        self.executor.shutdown(wait=False)


def _do_boundary(job: Future[_T], work: list[partial[_T]]) -> None:
    """In a thread: do the one piece of work, unless it was taken back."""
    if not job.set_running_or_notify_cancel():
        return
    try:
        found = work.pop()()
    # Whoever waits for it has to know, whatever it is.
    except BaseException as error:
        job.set_exception(error)
    else:
        job.set_result(found)


def _tell(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None], job: Future[_T]) -> None:
    """From any thread: end what waits for a job in a loop that has not been closed meanwhile."""
    del job
    if not loop.is_closed():
        loop.call_soon_threadsafe(_end, ended)


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _hop(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """No task, as others make: a loop that ends cancels those, and no thread by that."""

    def run(*arguments: Any, executor: Executor) -> Awaitable[Any]:
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(executor, function, *arguments)
        except ConnectorUnavailableError as error:
            refused = loop.create_future()
            refused.set_exception(error)
            return refused

    return run


def _do_share(
    function: Callable[[_Job, Halt], _T], jobs: Sequence[_Job], halt: Halt
) -> list[_T | ConnectorError]:
    """In a thread: do one job after the other, whatever comes of each."""
    outcomes: list[_T | ConnectorError] = []
    for job in jobs:
        try:
            if halt.is_set():
                raise ConnectorUnavailableError("the call was given up")
            outcomes.append(function(job, halt))
        except ConnectorError as error:
            outcomes.append(without_frames(error))
    return outcomes
