"""A whole cache in one thread and on virtual time: its loops, its threads and its waits.

The real ``Executor`` and ``Channel`` run on one loop whose clock jumps to the next event. What
they do in threads happens at an instant that a seed draws, and a wait for it lets time pass. So a
run is a function of its seed, and a hang of minutes takes no time.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar
from unittest import mock

from kvtier.cache import cache, executor
from kvtier.cache.below import opener, remote_epochs
from kvtier.tiers import epoch_record
from kvtier.tiers.disk import shard_files, volume
from kvtier.tiers.remote import channel

T = TypeVar("T")

#: How long virtual time may stand still for something that must happen.
_STUCK_S = 3600.0
#: The wall clock when a loop's says nought, and the least that passes there between two looks.
_WALL_S, _LOOK_NS = 1_700_000_000, 1000


class _Parked(BaseException):
    """A loop's thread has come to where it would wait for its loop."""


class _Selector:
    """Waits for nothing but time, and that passes at once."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen any more"
        self._loop.instant += max(timeout, 0.0)
        return []

    def close(self) -> None:
        """Nothing is open."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop on virtual time; also the ``Clock`` of all that runs on it."""

    def __init__(self) -> None:
        super().__init__()
        self.instant = 1000.0
        #: No thread does anything any more, as in a process that was killed.
        self.dead = False
        self._selector = _Selector(self)

    def time(self) -> float:
        return self.instant

    def now(self) -> float:
        return self.instant

    def sleep(self, seconds: float) -> None:
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        """Let all happen that is due until then."""
        self.run_until_complete(asyncio.sleep(seconds))

    def end(self) -> None:
        """Cancel all that is left, once it has begun: what has not would be told of."""
        while left := sorted(asyncio.all_tasks(self), key=_number):
            self.run_until_complete(asyncio.sleep(0))
            for task in left:
                task.cancel()
            self.run_until_complete(asyncio.wait(left))
        self.close()

    def pump(
        self, condition: Callable[[], bool], within_s: float = _STUCK_S, look_s: float = 0.01
    ) -> bool:
        """Let time pass until ``condition`` holds; False if it does not within that time."""
        end = self.instant + within_s
        while not condition():
            if self.instant >= end:
                return False
            self.pass_time(look_s)
        return True

    def _process_events(self, events: list[Any]) -> None:
        del events

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""


def _number(task: asyncio.Task[Any]) -> int:
    """Return a task's place in the order in which they were made; a set has none that replays."""
    return int(task.get_name().removeprefix("Task-"))


class PumpedFuture(Future[T]):
    """A future whose ``result`` lets virtual time pass instead of blocking."""

    def __init__(self, loop: VirtualLoop, work: Callable[[], T] | None = None) -> None:
        super().__init__()
        self._virtual = loop
        self._work = work

    def run_boundary(self) -> None:
        """Do the work, unless somebody has waited for it before or its process is dead."""
        work, self._work = self._work, None
        if work is None or self._virtual.dead:
            return
        try:
            self.set_result(work())
        except Exception as error:  # The future's, as in a thread.
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        if self._work is not None:
            self.run_boundary()
        elif not self.done() and not self._virtual.is_running():
            self._virtual.pump(self.done, _STUCK_S if timeout is None else timeout)
        return super().result(timeout=0)


class Threads:
    """Stands in for a pool of threads: each job ends at an instant that ``delay_s`` draws."""

    def __init__(
        self, loop: VirtualLoop, name: str, threads: int, delay_s: Callable[[str], float]
    ) -> None:
        self._loop = loop
        self._name = name
        self._delay_s = delay_s
        self._free_at = [0.0] * threads

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run the work once a thread is free and has had its time."""
        future: PumpedFuture[T] = PumpedFuture(self._loop, lambda: work(*arguments))
        begin = max(heapq.heappop(self._free_at), self._loop.now())
        end = begin + self._delay_s(self._name)
        heapq.heappush(self._free_at, end)
        self._loop.call_at(end, future.run_boundary)
        return future

    def close(self, timeout_s: float) -> None:
        """No thread is left."""
        del timeout_s

    def shutdown(self, *, wait: bool) -> None:
        """As ``close``."""
        del wait


class _OwnLoop:
    """What an owner of a loop gets: the one that all share, which it neither runs nor closes."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._shared = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    def run_forever(self) -> None:
        raise _Parked

    def stop(self) -> None:
        """Others live on it."""

    def close(self) -> None:
        """Others live on it."""


class _Thread:
    """Runs until it would wait for its loop."""

    def __init__(self, target: Callable[[], None], name: str, *, daemon: bool) -> None:
        del name, daemon
        self._target = target

    def start(self) -> None:
        try:
            self._target()
        except _Parked:
            return

    def join(self, timeout: float | None = None) -> None:
        del timeout


class _Event:
    """An event whose ``wait`` lets virtual time pass."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        return self._loop.pump(self.is_set, timeout)


class _Threading(NamedTuple):
    """Stands in for the module ``threading`` in the modules that start threads."""

    Event: Callable[[], _Event]
    Thread: type[_Thread] = _Thread
    Lock: Callable[[], Any] = threading.Lock


class _Asyncio:
    """Stands in for the module ``asyncio`` in the modules that own loops."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def new_event_loop(self) -> _OwnLoop:
        return _OwnLoop(self._time.loop)

    def set_event_loop(self, loop: _OwnLoop) -> None:
        del loop

    def run_coroutine_threadsafe(self, work: Coroutine[Any, Any, T], loop: object) -> Future[T]:
        del loop
        future: PumpedFuture[T] = PumpedFuture(self._time.loop)

        def ended(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        self._time.loop.create_task(work).add_done_callback(ended)
        return future


class _Time:
    """Stands in for the module ``time`` in the modules that look at it themselves."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._wall_ns = 0

    def monotonic(self) -> float:
        return self._time.loop.instant

    def time(self) -> float:
        return self.time_ns() / 1e9

    def time_ns(self) -> int:
        """Never the same twice: what a process names after it is not what the next one does."""
        now = _WALL_S * 10**9 + int(self._time.loop.instant * 1e9)
        self._wall_ns = max(self._wall_ns + _LOOK_NS, now)
        return self._wall_ns


class VirtualTime:
    """Which loop is the present process's, within ``virtual_time``."""

    def __init__(self, delay_s: Callable[[str], float]) -> None:
        """``delay_s`` draws what work takes, by the name of its threads."""
        self.loop = VirtualLoop()
        self.delay_s = delay_s

    def next_process(self) -> None:
        """End the loop with all that is left on it, and go on with another one."""
        instant = self.loop.instant
        self.loop.end()
        self.loop = VirtualLoop()
        self.loop.instant = instant


@contextmanager
def virtual_time(delay_s: Callable[[str], float]) -> Iterator[VirtualTime]:
    """Have caches that are made within run on virtual time; ``delay_s`` is ``VirtualTime``'s."""
    time = VirtualTime(delay_s)

    def pool(name: str, threads: int) -> Threads:
        return Threads(time.loop, name, threads, time.delay_s)

    def verifiers(threads: int, name: str) -> Threads:
        return pool(name, threads)

    def wait(futures: Iterable[Future[Any]], timeout: float) -> None:
        waited = list(futures)
        time.loop.pump(lambda: all(future.done() for future in waited), timeout)

    threads = _Threading(Event=lambda: _Event(time.loop))
    shim, clocks = _Asyncio(time), _Time(time)
    with ExitStack() as stack:
        for module in (cache, executor, remote_epochs, epoch_record, shard_files, volume):
            stack.enter_context(mock.patch.object(module, "time", clocks))
        for module in (executor, channel, opener):
            stack.enter_context(mock.patch.object(module, "threading", threads))
        for module in (executor, channel):
            stack.enter_context(mock.patch.object(module, "asyncio", shim))
        stack.enter_context(mock.patch.object(channel, "new_loop", shim.new_event_loop))
        stack.enter_context(mock.patch.object(executor, "ThreadPool", pool))
        stack.enter_context(mock.patch.object(executor, "wait", wait))
        stack.enter_context(mock.patch.object(channel, "ThreadPoolExecutor", verifiers))
        try:
            yield time
        finally:
            time.loop.end()
