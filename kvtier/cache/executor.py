"""Runs blocking work beside the scheduler, with deadlines: one loop that only coordinates.

The loop's thread waits, counts and calls back; every copy, checksum and system call runs in a
pool of plain threads. Those are daemon threads, because a read that hangs in the kernel must not
keep the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from kvtier.constants import HOUSEKEEPING_S, IO_THREADS_DEFAULT
from kvtier.errors import DeadlineError, KVTierError, TierError
from kvtier.interfaces import Clock

T = TypeVar("T")
Fault = OSError | KVTierError

_log = logging.getLogger("kvtier.executor")


class ThreadPool:
    """A fixed number of daemon threads over one queue. Work is bounded by whoever submits it."""

    def __init__(self, name: str, threads: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` in one of the threads. Its exception becomes the future's."""
        future: Future[T] = Future()

        def run_boundary() -> None:
            try:
                future.set_result(work())
            # Whoever waits for the future would wait for ever.
            except BaseException as error:
                future.set_exception(error)

        self._queue.put(run_boundary)
        return future

    def close(self, timeout_s: float | None) -> None:
        """End the threads once the queue is worked off; leave those that hang behind.

        Waits so long for each; None: as long as it takes.
        """
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # What it holds goes before the next work comes.


class Executor:
    """Owns the loop and the threads. Callbacks run in the loop's thread and must not block.

    ``tick`` is called there every ``tick_s`` seconds. How much work is out is bounded by whoever
    submits it.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lanes: int,
        tick: Callable[[], None],
        read_threads: int = IO_THREADS_DEFAULT,
        tick_s: float = HOUSEKEEPING_S,
    ) -> None:
        """``lanes`` is how many devices there are, each with threads of its own.

        Then one that hangs holds up none of the others.
        """
        self._clock = clock
        self._tick = tick
        self._tick_s = tick_s
        self._readers = [ThreadPool(f"kvtier-read-{lane}", read_threads) for lane in range(lanes)]
        # One writer a device: what a write displaces is unlinked before it, in the order of
        # reservations.
        self._writers = [ThreadPool(f"kvtier-write-{lane}", 1) for lane in range(lanes)]
        # What can be prepared while a device is busy is, by one thread: it is bound by memory.
        self._ahead = ThreadPool("kvtier-ahead", 1)
        self._running: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="kvtier-loop", daemon=True)
        self._closing = threading.Event()

    def now(self) -> float:
        """Return the instant of the clock by which deadlines are kept. Any thread."""
        return self._clock.now()

    def start(self) -> None:
        """Begin to tick and to take work."""
        self._thread.start()

    def read(
        self,
        lane: int,
        work: Callable[[], T],
        done: Callable[[T | Fault], None],
        *,
        deadline: float,
        late: Callable[[T | Fault], None],
    ) -> None:
        """Run blocking ``work`` in one of the lane's threads; tell ``done`` its value or fault.

        At ``deadline`` (a clock instant) ``done`` gets a ``DeadlineError`` instead, and ``late``
        gets what the work came to once it has ended after all. A bug in ``work`` is logged and
        reported as a ``TierError``, so that whoever waits goes on.
        """
        self._start(self._readers[lane], work, done, deadline, late)

    def begin_read(self, lane: int, work: Callable[[], None]) -> None:
        """Run ``work`` in one of the lane's threads; whoever waits for it has it ``watch``ed."""
        self._readers[lane].submit(work)

    def write(
        self,
        lane: int,
        work: Callable[[], T],
        done: Callable[[T | Fault], None],
        *,
        deadline: float,
        late: Callable[[T | Fault], None],
    ) -> None:
        """As ``read``, in the lane's writing thread: one by one, in the order of the calls."""
        self._start(self._writers[lane], work, done, deadline, late)

    def prepare(self, work: Callable[[], T]) -> Future[T]:
        """Run what a later write will wait for; the write takes the future's result."""
        return self._ahead.submit(work)

    def ahead(self, work: Callable[[], T], done: Callable[[T | Fault], None]) -> None:
        """As ``write``, without a deadline and in the thread of ``prepare``: before any device."""
        self._start(self._ahead, work, done, math.inf, done)

    def close(self, timeout_s: float, last: Sequence[Callable[[], None]] = ()) -> None:
        """Stop ticking, wait for work as long as allowed (what it starts included), end.

        ``last`` is what each lane does at the very end, in its writing thread and within the same
        time: where that still hangs, it is not done.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        end = time.monotonic() + timeout_s
        asyncio.run_coroutine_threadsafe(self._drain(timeout_s), self._loop).result()
        ending = [
            writer.submit(partial(outcome_boundary, work))
            for writer, work in zip(self._writers, last, strict=False)
        ]
        wait(ending, max(0.0, end - time.monotonic()))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for pool in (*self._readers, self._ahead, *self._writers):
            pool.close(0.1)
        self._loop.close()

    def watch(
        self,
        future: Future[T | Fault],
        done: Callable[[T | Fault], None],
        *,
        deadline: float,
        late: Callable[[T | Fault], None],
    ) -> None:
        """As ``read``, for work that is under way elsewhere and whose future never raises."""

        def begin() -> None:
            task = self._loop.create_task(self._watch(future, done, deadline, late))
            self._running.add(task)
            task.add_done_callback(self._ended)

        self._loop.call_soon_threadsafe(begin)

    def _start(
        self,
        pool: ThreadPool,
        work: Callable[[], T],
        done: Callable[[T | Fault], None],
        deadline: float,
        late: Callable[[T | Fault], None],
    ) -> None:
        future = pool.submit(lambda: outcome_boundary(work))
        self.watch(future, done, deadline=deadline, late=late)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a callback failed", exc_info=error)

    async def _watch(
        self,
        future: Future[T | Fault],
        done: Callable[[T | Fault], None],
        deadline: float,
        late: Callable[[T | Fault], None],
    ) -> None:
        waited = asyncio.wrap_future(future)
        left_s = None if deadline == math.inf else max(0.0, deadline - self._clock.now())
        await asyncio.wait({waited}, timeout=left_s)
        if waited.done():
            done(waited.result())
            return
        done_boundary(partial(done, DeadlineError("no answer in time")))  # Its end comes yet.
        await asyncio.wait({waited})
        late(waited.result())

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        ticking = self._loop.create_task(self._keep_ticking())
        self._loop.run_forever()
        # What was begun last arrives while the others end: until there is no task any more.
        while left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        assert ticking.done(), "it was among them"

    async def _keep_ticking(self) -> None:
        while not self._closing.is_set():
            self._tick_boundary()
            await asyncio.sleep(self._tick_s)

    def _tick_boundary(self) -> None:
        try:
            self._tick()
        # The next tick may do better; without ticks no deadline is kept.
        except Exception:
            _log.exception("housekeeping failed")

    async def _drain(self, timeout_s: float) -> None:
        end = self._loop.time() + timeout_s
        # Let what was just submitted arrive, then follow whatever it starts in turn.
        await asyncio.sleep(0)
        while self._running and (left_s := end - self._loop.time()) > 0:
            await asyncio.wait(
                set(self._running), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            await asyncio.sleep(0)


def outcome_boundary(work: Callable[[], T]) -> T | Fault:
    """Run work in this thread: a fault is its outcome, and a bug becomes one."""
    try:
        return work()
    except (OSError, KVTierError) as error:
        return error
    # Whoever waits for the outcome would wait for ever.
    except BaseException as error:
        _log.exception("storage work failed")
        failure = TierError(f"storage work failed: {error!r}")
        failure.__cause__ = error
        return failure


def done_boundary(callback: Callable[[], object]) -> bool:
    """Call back whoever waits for some work; a bug there is logged, and told by False.

    For callers who have others to answer after that.
    """
    try:
        callback()
    # Whatever it is: the others wait for their answers.
    except Exception:
        _log.exception("a callback failed")
        return False
    return True
