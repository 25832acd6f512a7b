"""The way to one remote: a connector, the loop that it lives in, and what waits for it.

Calls are gathered as they come: while all connections are busy, what waits goes together into the
next call that is free. Whatever a connector does, each job ends with what it was asked for or with
a ``ConnectorError``; one that raises, answers half a batch or counts bytes that cannot be is a
fault of the remote.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from kvtier.constants import (
    LATE_JOBS_MAX,
    REMOTE_BATCH_BYTES,
    REMOTE_BATCH_KEYS_MAX,
    REMOTE_BATCH_OBJECTS_MAX,
    REMOTE_JOBS_MAX,
    REMOTE_TRIES_MAX,
)
from kvtier.errors import (
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.interfaces import Clock, Connector, Lending, Listable, Loan
from kvtier.loops import new_loop
from kvtier.tiers.remote.answers import checked_found, checked_loans, checked_reads, checked_writes
from kvtier.tiers.remote.batches import batch_count
from kvtier.tiers.remote.boundaries import Fault, listed_boundary, outcome_boundary
from kvtier.tiers.remote.breaker import retry_delay_s
from kvtier.types import KeyInfo, ReadRequest, WriteItem

T = TypeVar("T")

_log = logging.getLogger("kvtier.remote")

_VERIFY_THREADS: Final = 2
_PROBE_KEY: Final = b"kvtier-probe"
_RETRIED: Final = (ConnectorUnavailableError, ConnectorTimeoutError)


class _Kind(Enum):
    CONTAINS = "contains"
    READ = "read"
    WRITE = "write"
    LEND = "lend"
    DELETE = "delete"


# What a call that is overdue may not be cancelled for: somebody else's memory is in it.
_BORROWS: Final = frozenset({_Kind.READ, _Kind.WRITE})


@dataclass(slots=True, eq=False)
class _Job:
    """Something asked of the connector. ``payload`` is what its kind takes."""

    payload: Any
    nbytes: int
    deadline: float
    ended: asyncio.Future[Any]
    tries: int = 0


class Channel:
    """Owns a connector and its loop's thread. ``submit`` and ``close`` from any other thread.

    The coroutines run in that loop, by ``submit``. Each raises ``ConnectorError``. At most
    ``connections`` calls are out, and those that have been for longer than ``deadline_s`` beside
    them; ``on_slow`` is called in the loop's thread for each of these. Lookups and deletions that
    are overdue are given up.
    """

    def __init__(
        self,
        connect: Callable[[], Connector],
        clock: Clock,
        draws: random.Random,
        on_slow: Callable[[], None],
        *,
        connections: int,
        deadline_s: float,
        name: str,
    ) -> None:
        """Start the thread and open the connector in it. Raises what ``connect`` raises."""
        self._clock = clock
        self._draws = draws
        self._on_slow = on_slow
        self._connections = connections
        self._deadline_s = deadline_s
        self._queues: dict[_Kind, deque[_Job]] = {kind: deque() for kind in _Kind}
        self._waiting = 0
        self._running = 0
        self._overdue = 0
        self._calls: set[asyncio.Task[None]] = set()
        self._closing = False
        self._verifiers = ThreadPoolExecutor(_VERIFY_THREADS, f"kvtier-verify-{name}")
        self._loop = new_loop()
        self._thread = threading.Thread(
            target=self._run_loop, name=f"kvtier-remote-{name}", daemon=True
        )
        self._thread.start()
        with ExitStack() as undo:
            undo.callback(self._stop, 1.0)
            opening = asyncio.run_coroutine_threadsafe(_opened(connect), self._loop)
            self._connector = opening.result()
            undo.pop_all()

    @property
    def listable(self) -> bool:
        """Tell whether the connector can say what it holds."""
        return isinstance(self._connector, Listable)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T | Fault]:
        """Run a coroutine in the loop; its fault is the future's result, and a bug becomes one."""
        return asyncio.run_coroutine_threadsafe(outcome_boundary(work), self._loop)

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask which objects are there. An answer that is overdue is given up."""
        found: list[bool] = []
        for start in range(0, len(keys), REMOTE_BATCH_KEYS_MAX):
            some = keys[start : start + REMOTE_BATCH_KEYS_MAX]
            found += await self._do(_Kind.CONTAINS, some, len(some), self._soon)
        return found

    async def read(self, request: ReadRequest, into: memoryview, *, deadline: float) -> int | None:
        """Fill ``into``; return how many bytes came, None where there is no such object.

        ``into`` is the connector's until this returns, which may be long after the deadline.
        """
        nbytes: int | None = await self._do(_Kind.READ, (request, into), request.nbytes, deadline)
        return nbytes

    @property
    def lends(self) -> bool:
        """Tell whether the connector may lend what it holds, to be read where it lies."""
        return isinstance(self._connector, Lending)

    async def lend(self, key: bytes, *, deadline: float) -> Loan | None:
        """Borrow an object; None where there is none. A loan is the caller's to release."""
        loan: Loan | None = await self._do(_Kind.LEND, [key], 1, deadline)
        return loan

    async def write(self, item: WriteItem, *, deadline: float) -> None:
        """Store an object whole. Its data is the connector's until this returns."""
        await self._do(_Kind.WRITE, item, len(item.data), deadline)

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Remove objects; whether they are gone nobody tells."""
        for start in range(0, len(keys), REMOTE_BATCH_KEYS_MAX):
            some = keys[start : start + REMOTE_BATCH_KEYS_MAX]
            await self._do(_Kind.DELETE, some, len(some), self._soon)

    async def probe(self) -> None:
        """Find out whether the remote answers at all, a lookup and a read."""
        await self._alone(_Kind.CONTAINS, [_PROBE_KEY])
        await self.fetch(_PROBE_KEY, 1)

    async def fetch(self, key: bytes, nbytes_max: int) -> bytes | None:
        """Return the start of an object, beside all that waits; None where there is none."""
        data = bytearray(nbytes_max)
        request = ReadRequest(key, 0, nbytes_max)
        count: int | None = await self._alone(_Kind.READ, (request, memoryview(data)))
        return None if count is None else bytes(data[:count])

    async def put(self, key: bytes, data: bytes) -> None:
        """Store a small object, beside all that waits."""
        await self._alone(_Kind.WRITE, WriteItem(key, memoryview(data)))

    async def _alone(self, kind: _Kind, payload: Any) -> Any:
        """Make a call with one job; when it is overdue, it is given up: its memory is ours."""
        if self._closing:
            raise ConnectorUnavailableError("the remote is being closed")
        job = _Job(payload, 1, math.inf, self._future())
        call = self._loop.create_task(self._sent_boundary(kind, [job]))
        await asyncio.wait({call}, timeout=self._deadline_s)
        if not call.done():
            call.cancel()
            raise ConnectorTimeoutError("no answer in time")
        (outcome,) = call.result()
        if isinstance(outcome, ConnectorError):
            raise outcome
        return outcome

    async def listing(self, prefix: bytes, objects_max: int) -> list[KeyInfo]:
        """Return what is there. Raises ``ConnectorRefusedError`` beyond ``objects_max``."""
        assert isinstance(self._connector, Listable), "a connector that cannot list"
        return await listed_boundary(self._connector, prefix, objects_max)

    async def run(self, work: Callable[[], T]) -> T:
        """Run what takes a while, in a thread."""
        return await self._loop.run_in_executor(self._verifiers, work)

    def close(self, timeout_s: float) -> None:
        """End what is out as far as time allows, close the connector, end the thread.

        A connector that hangs is left behind with its thread. A second call does nothing.
        """
        if self._closing:
            return
        self._closing = True
        future = asyncio.run_coroutine_threadsafe(self._finish_boundary(timeout_s), self._loop)
        try:
            future.result(timeout_s + 0.5)
        except FutureTimeoutError:
            _log.warning("a remote's connector does not end")
        self._stop(timeout_s)

    async def _do(self, kind: _Kind, payload: Any, nbytes: int, deadline: float) -> Any:
        if self._closing:
            raise ConnectorUnavailableError("the remote is being closed")
        if self._waiting >= REMOTE_JOBS_MAX:
            raise ConnectorRefusedError("too much is waiting for the remote")
        job = _Job(payload, nbytes, deadline, self._future())
        self._waiting += 1
        self._queues[kind].append(job)
        self._pump()
        try:
            outcome = await asyncio.shield(job.ended)
        finally:
            self._waiting -= 1
        if isinstance(outcome, ConnectorError):
            raise outcome
        return outcome

    @property
    def _soon(self) -> float:
        return self._clock.now() + self._deadline_s

    def _future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    def _pump(self) -> None:
        """Make calls of what waits, each kind in turn, while a connection is free."""
        if self._overdue >= LATE_JOBS_MAX:
            for bulk in _BORROWS:
                self._fail(self._queues[bulk], "too many answers are overdue")
        while self._running < self._connections:
            kind = next((kind for kind, jobs in self._queues.items() if jobs), None)
            if kind is None:
                return
            self._queues[kind] = queue = self._queues.pop(kind)  # The next time the last one.
            jobs = self._take(kind, queue)
            if jobs:
                self._running += 1
                task = self._loop.create_task(self._call(kind, jobs))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)

    def _take(self, kind: _Kind, queue: deque[_Job]) -> list[_Job]:
        """Take what goes into the next call; what came too late for it ends."""
        now = self._clock.now()
        while queue and now >= queue[0].deadline:
            _end(queue.popleft(), ConnectorTimeoutError("its turn came after its deadline"))
        bulk = kind in _BORROWS
        items_max = REMOTE_BATCH_OBJECTS_MAX if bulk else REMOTE_BATCH_KEYS_MAX
        bytes_max = REMOTE_BATCH_BYTES if bulk else REMOTE_BATCH_KEYS_MAX
        sizes = [job.nbytes for job, _ in zip(queue, range(items_max), strict=False)]
        count = batch_count(sizes, items_max=items_max, bytes_max=bytes_max)
        return [queue.popleft() for _ in range(count)]

    async def _call(self, kind: _Kind, jobs: list[_Job]) -> None:
        sent = self._loop.create_task(self._sent_boundary(kind, jobs))
        await asyncio.wait({sent}, timeout=self._deadline_s)
        self._running -= 1
        if not sent.done():
            if kind in _BORROWS:
                self._slow_boundary()
                self._overdue += 1
                self._pump()
                await asyncio.wait({sent})
                self._overdue -= 1
            else:
                sent.cancel()
        slow = ConnectorTimeoutError("no answer in time")
        outcomes = sent.result() if sent.done() else [slow for _ in jobs]
        for job, outcome in zip(jobs, outcomes, strict=True):
            self._settle(kind, job, outcome)
        self._pump()

    def _slow_boundary(self) -> None:
        """Tell that a call is overdue. Whoever waits for its jobs waits on, whatever that does."""
        try:
            self._on_slow()
        except Exception:  # The call is settled by who called us, whatever others make of it.
            _log.exception("nobody could be told that a remote is slow")

    def _settle(self, kind: _Kind, job: _Job, outcome: Any) -> None:
        job.tries += 1
        if isinstance(outcome, _RETRIED) and job.tries < REMOTE_TRIES_MAX and not self._closing:
            delay_s = retry_delay_s(job.tries, self._draws)
            if self._clock.now() + delay_s < job.deadline:
                self._loop.call_later(delay_s, self._again, kind, job)
                return
        _end(job, outcome)

    def _again(self, kind: _Kind, job: _Job) -> None:
        if self._closing:
            _end(job, ConnectorUnavailableError("the remote is being closed"))
            return
        self._queues[kind].appendleft(job)
        self._pump()

    async def _sent_boundary(self, kind: _Kind, jobs: list[_Job]) -> list[Any]:
        """Call the connector; return one outcome per job, whatever it does."""
        try:
            return await self._send(kind, jobs)
        except ConnectorError as error:
            return [error for _ in jobs]
        # It must not raise; one that does fails its batch and no more. When it is we who cancel it,
        # nobody looks at what comes of it.
        except (Exception, asyncio.CancelledError) as error:
            failure = ConnectorUnavailableError(f"the connector raised {type(error).__name__}")
            failure.__cause__ = error
            return [failure for _ in jobs]

    async def _send(self, kind: _Kind, jobs: list[_Job]) -> list[Any]:
        connector = self._connector
        if kind is _Kind.READ:
            requests, buffers = zip(*(job.payload for job in jobs), strict=True)
            return checked_reads(requests, await connector.read(requests, buffers))
        if kind is _Kind.WRITE:
            items = [job.payload for job in jobs]
            return checked_writes(items, await connector.write(items))
        keys = [key for job in jobs for key in job.payload]
        if kind is _Kind.LEND:
            assert isinstance(connector, Lending), "a connector that lends nothing"
            return checked_loans(keys, await connector.lend(keys))
        if kind is _Kind.DELETE:
            await connector.delete(keys)
            return [None for _ in jobs]
        found = iter(checked_found(keys, await connector.contains(keys)))
        return [[next(found) for _ in job.payload] for job in jobs]

    def _fail(self, queue: deque[_Job], why: str) -> None:
        while queue:
            _end(queue.popleft(), ConnectorUnavailableError(why))

    async def _finish_boundary(self, timeout_s: float) -> None:
        for queue in self._queues.values():
            self._fail(queue, "the remote is being closed")
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=timeout_s)
        try:
            await asyncio.wait_for(self._connector.close(), timeout_s)
        # Whatever it raises, there is nothing to be done about it any more. One that cancels its
        # own end would leave its thread behind, and everything else open.
        except (Exception, asyncio.CancelledError) as error:
            _log.warning("a remote's connector did not close: %s", type(error).__name__)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(left, timeout=0.1) if left else _nothing())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _stop(self, timeout_s: float) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        self._verifiers.shutdown(wait=False)


def _end(job: _Job, outcome: Any) -> None:
    if not job.ended.done():
        job.ended.set_result(outcome)


async def _nothing() -> None:
    """Do nothing."""


async def _opened(connect: Callable[[], Connector]) -> Connector:
    return connect()
