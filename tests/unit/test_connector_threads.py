"""Calls of a connector end when its threads have let go, and are refused above a limit."""

from __future__ import annotations

import asyncio
import threading

import pytest
from aiofiles.os import wrap

from kvtier.errors import ConnectorUnavailableError
from kvtier_connectors.threads import SHARES_MAX, Halt, Hop, Threads
from tests.lib.plane import until


def is_let_go(data: bytearray) -> bool:
    """Tell whether nobody has a view of it."""
    try:
        data.append(0)
    except BufferError:
        return False
    return True


def test_halt_calls_what_was_asked_for_once() -> None:
    halt = Halt()
    called: list[str] = []
    first, second = (lambda: called.append("first")), (lambda: called.append("second"))
    halt.when_set(first)
    halt.when_set(second)
    halt.forget(first)
    halt.forget(first)
    assert not halt.is_set()
    halt.set()
    halt.set()
    assert halt.is_set()
    assert called == ["second"]
    halt.when_set(first)
    assert called == ["second", "first"]


async def test_a_cancelled_call_sets_halt_and_waits_for_its_threads() -> None:
    threads, halt, ended = Threads(1, "kvtier-test"), Halt(), threading.Event()
    asked = threading.Event()
    halt.when_set(asked.set)

    def work() -> None:
        assert asked.wait(30)
        ended.set()

    loop = asyncio.get_running_loop()
    call = asyncio.ensure_future(
        threads.gather([loop.run_in_executor(threads.executor, work)], halt)
    )
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()
    threads.close()


async def test_more_shares_than_the_limit_are_refused_until_some_have_ended() -> None:
    threads, let_go = Threads(1, "kvtier-test"), threading.Event()
    loop = asyncio.get_running_loop()
    shares = [loop.run_in_executor(threads.executor, let_go.wait, 30) for _ in range(SHARES_MAX)]
    assert threads.refusal(SHARES_MAX) is None
    call = asyncio.ensure_future(threads.gather(shares, Halt()))
    await asyncio.sleep(0)
    assert isinstance(threads.refusal(1), ConnectorUnavailableError)
    let_go.set()
    assert await call == [True] * SHARES_MAX
    assert threads.refusal(SHARES_MAX) is None
    assert isinstance(threads.refusal(SHARES_MAX + 1), ConnectorUnavailableError)
    threads.close()
    assert isinstance(threads.refusal(0), ConnectorUnavailableError)


async def test_what_takes_longer_than_it_may_is_given_up_and_awaited() -> None:
    threads, ended = Threads(1, "kvtier-test"), threading.Event()

    def work(job: int, halt: Halt) -> int:
        asked = threading.Event()
        halt.when_set(asked.set)
        assert asked.wait(30)
        ended.set()
        return job

    outcomes = await threads.each(work, [1, 2], shares_max=1, limit_s=0.0)
    assert ended.is_set()
    assert outcomes[0] == 1, "what it came to counts all the same"
    assert isinstance(outcomes[1], ConnectorUnavailableError), "the next one is not begun"
    threads.close()


async def test_a_call_that_ends_in_time_is_not_given_up() -> None:
    threads = Threads(1, "kvtier-test")
    outcomes = await threads.each(lambda _, halt: halt.is_set(), [1, 2], shares_max=1, limit_s=60.0)
    assert outcomes == [False, False]
    threads.close()


@pytest.mark.parametrize("shares_max", [1, 2])
async def test_a_call_that_is_cancelled_again_and_again_waits_for_its_threads(
    shares_max: int,
) -> None:
    threads, begun, let_go = Threads(2, "kvtier-test"), threading.Event(), threading.Event()
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def told() -> None:
        loop.call_soon_threadsafe(asked.set)

    def work(job: int, halt: Halt) -> int:
        halt.when_set(told)
        begun.set()
        assert let_go.wait(30)
        return job

    call = asyncio.ensure_future(threads.each(work, [1, 2], shares_max=shares_max))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        call.cancel()
        await asked.wait()
    assert not call.done()
    assert threads.refusal(SHARES_MAX) is not None, "its threads count for as long as they run"
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert threads.refusal(SHARES_MAX) is None
    threads.close()


@pytest.mark.parametrize("shares_max", [1, 2])
def test_a_loop_that_ends_waits_for_the_threads_of_a_call(shares_max: int) -> None:
    """It cancels all of its tasks, and no thread by that."""
    threads, begun, let_go = Threads(2, "kvtier-test"), threading.Event(), threading.Event()
    ended: list[int] = []

    def work(job: int, halt: Halt) -> int:
        del halt
        begun.set()
        assert let_go.wait(30)
        ended.append(job)
        return job

    async def leave() -> asyncio.Task[object]:
        loop = asyncio.get_running_loop()
        call = loop.create_task(threads.each(work, [1, 2], shares_max=shares_max))
        await asyncio.to_thread(begun.wait)
        loop.call_later(0.05, let_go.set)
        return call

    call = asyncio.run(leave())
    came_too_late = not let_go.is_set()
    let_go.set()
    assert call.cancelled()
    assert not came_too_late, "the loop had ended, and a thread had not"
    assert ended
    threads.close()


@pytest.mark.parametrize("shares_max", [1, 2])
@pytest.mark.parametrize("hop", [None, wrap])
async def test_what_no_thread_can_be_started_for_is_an_outcome_and_never_done(
    monkeypatch: pytest.MonkeyPatch, shares_max: int, hop: Hop | None
) -> None:
    """Its buffers are somebody else's by the time that there is a thread."""
    threads, done = Threads(2, "kvtier-test"), list[int]()

    def work(job: int, halt: Halt) -> int:
        del halt
        done.append(job)
        return job

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        outcomes = await threads.each(work, [1, 2], shares_max=shares_max, hop=hop)
    assert [type(outcome) for outcome in outcomes] == [ConnectorUnavailableError] * 2
    assert await threads.each(work, [3], shares_max=1) == [3]
    assert done == [3]
    assert threads.refusal(SHARES_MAX) is None
    threads.close()


@pytest.mark.parametrize("shares_max", [1, 2])
async def test_the_outcome_of_a_job_that_failed_keeps_none_of_its_memory(shares_max: int) -> None:
    """It may be kept for long, and with it what it came from."""
    threads, data = Threads(2, "kvtier-test"), bytearray(1)

    def work(view: memoryview, halt: Halt) -> int:
        del halt
        try:
            try:
                return view[1]
            except IndexError as error:
                raise OSError("the medium is shorter") from error
        except OSError as error:
            raise ConnectorUnavailableError(str(error)) from error

    jobs = [memoryview(data), memoryview(data)]
    outcomes = await threads.each(work, jobs, shares_max=shares_max)
    del jobs
    await until(lambda: is_let_go(data))
    assert [type(outcome) for outcome in outcomes] == [ConnectorUnavailableError] * 2
    threads.close()


async def test_what_no_thread_could_be_started_for_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, data = Threads(1, "kvtier-test"), bytearray(1)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        outcomes = await threads.each(lambda view, _: len(view), [memoryview(data)], shares_max=1)
    await until(lambda: is_let_go(data))
    assert isinstance(outcomes[0], ConnectorUnavailableError)
    threads.close()
