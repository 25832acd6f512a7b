"""The executor: deadlines, late answers, bugs in work, ticks, and an end that is bounded."""

from __future__ import annotations

import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvtier.cache.executor import Executor, ThreadPool
from kvtier.errors import ChecksumError, DeadlineError, TierError
from kvtier.testing.clock import FakeClock

WAIT_S = 30.0


class Answers:
    """What ``done`` or ``late`` was called with, and in which thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.threads: list[str] = []

    def __call__(self, outcome: object) -> None:
        self.threads.append(threading.current_thread().name)
        self._queue.put(outcome)

    def next(self) -> object:
        return self._queue.get(timeout=WAIT_S)

    @property
    def none_left(self) -> bool:
        return self._queue.empty()


class Gate:
    """Work that ends when it is told to."""

    def __init__(self, value: object = "value") -> None:
        self._value = value
        self._entered = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> object:
        self._entered.set()
        assert self._open.wait(WAIT_S), "nobody opened the gate"
        if isinstance(self._value, BaseException):
            raise self._value
        return self._value

    def wait_for_arrival(self) -> None:
        assert self._entered.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def executor(clock: FakeClock) -> Iterator[Executor]:
    made = Executor(clock, read_threads=2, lanes=2, tick=lambda: None, tick_s=60.0)
    made.start()
    yield made
    made.close(WAIT_S)


def fail_with(error: BaseException) -> Callable[[], object]:
    def work() -> object:
        raise error

    return work


@pytest.mark.parametrize("kind", ["read", "write"])
def test_work_runs_beside_and_answers_in_the_loop(executor: Executor, kind: str) -> None:
    done, late = Answers(), Answers()
    names: list[str] = []

    def work() -> int:
        names.append(threading.current_thread().name)
        return 7

    submit = executor.read if kind == "read" else executor.write
    submit(1, work, done, deadline=math.inf, late=late)
    assert done.next() == 7
    assert names[0].startswith(f"kvtier-{kind}-1-")
    assert done.threads == ["kvtier-loop"]
    assert late.none_left


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ChecksumError("differs")])
def test_a_fault_is_an_answer(executor: Executor, error: Exception) -> None:
    done = Answers()
    executor.read(0, fail_with(error), done, deadline=math.inf, late=done)
    assert done.next() is error
    assert done.none_left


@pytest.mark.parametrize(
    "bug",
    [AssertionError("a bug"), KeyError("k"), MemoryError(), StopIteration(), SystemExit(3)],
    ids=repr,
)
def test_a_bug_in_work_becomes_a_tier_error_and_is_logged(
    executor: Executor, bug: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    done = Answers()
    with caplog.at_level(logging.ERROR, "kvtier.executor"):
        executor.write(0, fail_with(bug), done, deadline=math.inf, late=done)
        failure = done.next()
    assert isinstance(failure, TierError)
    assert failure.__cause__ is bug
    assert "storage work failed" in caplog.text
    executor.write(0, lambda: "goes on", done, deadline=math.inf, late=done)
    assert done.next() == "goes on"


@pytest.mark.parametrize("value", ["value", OSError(5, "late"), KeyError("late bug")], ids=repr)
def test_an_overdue_answer_comes_late_and_once(
    executor: Executor, clock: FakeClock, value: object
) -> None:
    gate, done, late = Gate(value), Answers(), Answers()
    executor.read(0, gate, done, deadline=clock.now(), late=late)
    gate.wait_for_arrival()
    assert isinstance(done.next(), DeadlineError)
    assert late.none_left
    gate.open()
    outcome = late.next()
    if isinstance(value, KeyError):
        assert isinstance(outcome, TierError)
    else:
        assert outcome is value
    executor.close(WAIT_S)
    assert done.none_left
    assert late.none_left


def test_a_deadline_that_lies_ahead_is_waited_for(executor: Executor, clock: FakeClock) -> None:
    gate, done, late = Gate(), Answers(), Answers()
    executor.read(0, gate, done, deadline=clock.now() + 3600, late=late)
    gate.wait_for_arrival()
    assert done.none_left
    gate.open()
    assert done.next() == "value"
    assert late.none_left


def test_writes_run_one_after_the_other_in_the_order_of_the_calls(executor: Executor) -> None:
    gate, done = Gate(0), Answers()
    started: list[int] = []
    executor.write(0, gate, done, deadline=math.inf, late=done)
    for number in range(1, 50):

        def work(number: int = number) -> int:
            started.append(number)
            return number

        executor.write(0, work, done, deadline=math.inf, late=done)
    gate.wait_for_arrival()
    assert started == []
    gate.open()
    assert [done.next() for _ in range(50)] == list(range(50))
    assert started == list(range(1, 50))


def test_an_overdue_write_is_not_overtaken(executor: Executor, clock: FakeClock) -> None:
    """What the next write displaces may be what the hung one still writes."""
    gate, done, late = Gate(), Answers(), Answers()
    order: list[str] = []
    executor.write(0, gate, done, deadline=clock.now(), late=late)
    assert isinstance(done.next(), DeadlineError)
    executor.write(0, lambda: order.append("second"), done, deadline=math.inf, late=late)
    executor.read(0, lambda: "read", late, deadline=math.inf, late=late)
    assert late.next() == "read"
    assert order == []
    gate.open()
    assert late.next() == "value"
    assert done.next() is None
    assert order == ["second"]


def test_a_lane_that_hangs_holds_up_no_other_lane(executor: Executor) -> None:
    gate, done, other = Gate(), Answers(), Answers()
    executor.write(0, gate, done, deadline=math.inf, late=done)
    gate.wait_for_arrival()
    for number in range(20):
        executor.write(1, functools.partial(abs, number), other, deadline=math.inf, late=other)
        assert other.next() == number
    assert done.none_left
    gate.open()
    assert done.next() == "value"


def test_reads_that_hang_in_one_lane_hold_up_no_other_lane(executor: Executor) -> None:
    gate, done, other = Gate(), Answers(), Answers()
    for _ in range(10):
        executor.read(0, gate, done, deadline=math.inf, late=done)
    gate.wait_for_arrival()
    executor.read(1, lambda: "read", other, deadline=math.inf, late=other)
    assert other.next() == "read"
    assert done.none_left
    gate.open()
    assert [done.next() for _ in range(10)] == ["value"] * 10


def test_what_is_prepared_is_done_while_a_lane_is_busy(executor: Executor) -> None:
    gate, done = Gate(), Answers()
    executor.write(0, gate, done, deadline=math.inf, late=done)
    gate.wait_for_arrival()
    thread = executor.prepare(lambda: threading.current_thread().name)
    assert thread.result(WAIT_S).startswith("kvtier-ahead")
    failed = executor.prepare(fail_with(OSError(5, "no")))
    executor.write(0, failed.result, done, deadline=math.inf, late=done)
    gate.open()
    assert done.next() == "value"
    assert done.next() is failed.exception(WAIT_S), "a fault in it is a fault of the write"


def test_close_ends_what_prepares_too(clock: FakeClock) -> None:
    executor = Executor(clock, read_threads=1, lanes=1, tick=lambda: None, tick_s=60.0)
    executor.start()
    gate, done = Gate(), Answers()
    ahead = executor.prepare(gate)
    executor.write(0, ahead.result, done, deadline=math.inf, late=done)
    gate.wait_for_arrival()
    gate.open()
    executor.close(WAIT_S)
    assert done.next() == "value"


def test_a_hung_read_leaves_the_other_threads_working(executor: Executor) -> None:
    gate, done = Gate(), Answers()
    executor.read(0, gate, done, deadline=math.inf, late=done)
    gate.wait_for_arrival()
    for number in range(20):
        executor.read(0, functools.partial(abs, number), done, deadline=math.inf, late=done)
        assert done.next() == number
    gate.open()
    assert done.next() == "value"


def test_a_failing_callback_harms_nobody_else(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    done = Answers()

    def broken(_: object) -> None:
        raise RuntimeError("a bug in a callback")

    with caplog.at_level(logging.ERROR, "kvtier.executor"):
        executor.read(0, lambda: 1, broken, deadline=math.inf, late=done)
        executor.read(0, lambda: 2, done, deadline=math.inf, late=done)
        assert done.next() == 2
        executor.close(WAIT_S)
    assert "a callback failed" in caplog.text


class TestTicks:
    def make(self, tick: Callable[[], None]) -> Executor:
        executor = Executor(FakeClock(), read_threads=1, lanes=1, tick=tick, tick_s=0.001)
        executor.start()
        return executor

    def test_ticks_come_in_the_loop_and_go_on_after_an_exception(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        ticks: queue.SimpleQueue[str] = queue.SimpleQueue()

        def tick() -> None:
            ticks.put(threading.current_thread().name)
            raise KeyError("a bug in housekeeping")

        with caplog.at_level(logging.ERROR, "kvtier.executor"):
            executor = self.make(tick)
            assert [ticks.get(timeout=WAIT_S) for _ in range(3)] == ["kvtier-loop"] * 3
            executor.close(WAIT_S)
        assert "housekeeping failed" in caplog.text

    def test_no_tick_comes_after_close(self) -> None:
        ticked = threading.Event()
        count = 0

        def tick() -> None:
            nonlocal count
            count += 1
            ticked.set()

        executor = self.make(tick)
        assert ticked.wait(WAIT_S)
        executor.close(WAIT_S)
        after = count
        assert after > 0
        assert count == after


class TestClose:
    def test_it_waits_for_what_is_out_and_what_that_starts(self, executor: Executor) -> None:
        """Each write starts the next from its callback, as a queue of dirty chunks does."""
        left = iter(range(40))
        finished: list[int] = []

        def next_write(outcome: object = None) -> None:
            if isinstance(outcome, int):
                finished.append(outcome)
            number = next(left, None)
            if number is not None:
                executor.write(0, lambda: number, next_write, deadline=math.inf, late=next_write)

        next_write()
        executor.close(WAIT_S)
        assert finished == list(range(40))

    def test_it_waits_for_late_work_too(self, executor: Executor, clock: FakeClock) -> None:
        gate, done, late = Gate(), Answers(), Answers()
        executor.write(0, gate, done, deadline=clock.now(), late=late)
        assert isinstance(done.next(), DeadlineError)
        closer = threading.Thread(target=executor.close, args=(WAIT_S,))
        closer.start()
        gate.open()
        closer.join(WAIT_S)
        assert not closer.is_alive()
        assert late.next() == "value"

    def test_b96_work_that_hangs_does_not_hold_it_up(
        self, clock: FakeClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = set(threading.enumerate())
        executor = Executor(clock, read_threads=2, lanes=2, tick=lambda: None, tick_s=60.0)
        executor.start()
        gates = [Gate(), Gate()]
        answers = Answers()
        executor.read(0, gates[0], answers, deadline=math.inf, late=answers)
        executor.write(0, gates[1], answers, deadline=clock.now(), late=answers)
        for gate in gates:
            gate.wait_for_arrival()
        assert isinstance(answers.next(), DeadlineError)
        started = time.monotonic()
        executor.close(0.05)
        assert time.monotonic() - started < 5.0
        assert answers.none_left
        caplog.clear()
        hung = set(threading.enumerate()) - before
        for gate in gates:
            gate.open()
        for thread in hung:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in hung)
        assert answers.none_left
        assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []

    def test_a_second_close_does_nothing_and_no_thread_is_left(self, clock: FakeClock) -> None:
        before = set(threading.enumerate())
        executor = Executor(clock, read_threads=2, lanes=2, tick=lambda: None, tick_s=60.0)
        executor.start()
        started = set(threading.enumerate()) - before
        assert len(started) == 1 + 2 * 2 + 2 + 1, (
            "the loop; readers and a writer a lane; what prepares"
        )
        executor.close(WAIT_S)
        executor.close(WAIT_S)
        assert not any(thread.is_alive() for thread in started)


class TestThreadPool:
    def test_work_is_spread_over_the_threads_and_finished_before_the_end(self) -> None:
        pool = ThreadPool("kvtier-test", 3)
        gates = [Gate(number) for number in range(3)]
        futures = [pool.submit(gate) for gate in gates]
        for gate in gates:
            gate.wait_for_arrival()
        queued = [pool.submit(functools.partial(abs, -number)) for number in range(10)]
        for gate in gates:
            gate.open()
        assert [future.result(WAIT_S) for future in futures] == [0, 1, 2]
        pool.close(WAIT_S)
        assert [future.result(0) for future in queued] == list(range(10))

    def test_an_exception_is_the_futures(self) -> None:
        pool = ThreadPool("kvtier-test", 1)
        failed = pool.submit(fail_with(OSError(5, "no")))
        with pytest.raises(OSError, match="no"):
            failed.result(WAIT_S)
        assert pool.submit(lambda: 1).result(WAIT_S) == 1
        pool.close(WAIT_S)
