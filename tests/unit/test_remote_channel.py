"""The way to a remote: batches, connections, deadlines, tries, limits and an end in any case."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvtier.clock import SystemClock
from kvtier.constants import (
    LATE_JOBS_MAX,
    REMOTE_BATCH_KEYS_MAX,
    REMOTE_BATCH_OBJECTS_MAX,
    REMOTE_JOBS_MAX,
    REMOTE_TRIES_MAX,
)
from kvtier.errors import (
    ConfigError,
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
    TierError,
)
from kvtier.interfaces import Connector
from kvtier.testing.engine_double import wait_until
from kvtier.tiers.remote.channel import Channel
from kvtier.types import ReadRequest, WriteItem
from tests.lib.remote_lab import ToyRemote

FAR = 1e12


class Lab:
    """A channel to a toy, and what it said was slow."""

    def __init__(self, connections: int = 4, deadline_s: float = 5.0) -> None:
        self.remote = ToyRemote()
        self.slow = 0
        self.channel = Channel(
            lambda: self.remote,
            SystemClock(),
            random.Random(1),
            self._slow,
            connections=connections,
            deadline_s=deadline_s,
            name="test",
        )

    def _slow(self) -> None:
        self.slow += 1

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end and return the value or fault."""
        return self.channel.submit(work).result(20.0)

    def all(self, works: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        return self.do(gathered(works))  # type: ignore[no-any-return]

    def put(self, count: int) -> list[bytes]:
        keys = [b"key%d" % number for number in range(count)]
        for key in keys:
            self.remote.put(key, key * 10)
        return keys

    def read(self, key: bytes, deadline: float = FAR) -> tuple[bytearray, Any]:
        buffer = bytearray(len(key) * 10)
        request = ReadRequest(key, 0, len(buffer))
        return buffer, self.channel.read(request, memoryview(buffer), deadline=deadline)

    def close(self) -> None:
        self.remote.release()
        self.channel.close(5.0)


async def gathered(works: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*works, return_exceptions=True)


@pytest.fixture
def labs() -> Iterator[Callable[..., Lab]]:
    opened: list[Lab] = []

    def make(**how: Any) -> Lab:
        opened.append(Lab(**how))
        return opened[-1]

    yield make
    for lab in opened:
        lab.close()


def test_what_waits_goes_together(labs: Callable[..., Lab]) -> None:
    lab = labs(connections=1)
    keys = lab.put(20)
    lab.remote.hold("read")
    reads = [lab.read(key) for key in keys]
    future = lab.channel.submit(gathered([work for _, work in reads]))
    lab.remote.wait_for_calls("read", 1)
    lab.remote.release()
    assert future.result(20.0) == [len(key) * 10 for key in keys]
    assert [bytes(buffer) for buffer, _ in reads] == [key * 10 for key in keys]
    assert lab.remote.batches == [("read", 1), ("read", 19)]


def test_no_more_calls_are_out_than_connections(labs: Callable[..., Lab]) -> None:
    lab = labs(connections=3)
    keys = lab.put(300)
    lab.remote.hold("read")
    future = lab.channel.submit(gathered([lab.read(key)[1] for key in keys]))
    lab.remote.wait_for_calls("read", 3)
    assert lab.do(lab.channel.run(lambda: lab.remote.calls["read"])) == 3
    lab.remote.release()
    assert future.result(20.0) == [len(key) * 10 for key in keys]
    assert max(count for _, count in lab.remote.batches) <= REMOTE_BATCH_OBJECTS_MAX


def test_questions_are_cut_into_batches(labs: Callable[..., Lab]) -> None:
    lab = labs()
    keys = [b"%d" % number for number in range(2 * REMOTE_BATCH_KEYS_MAX + 1)]
    lab.remote.put(keys[-1], b"data")
    found = lab.do(lab.channel.contains(keys))
    assert found == [False] * (len(keys) - 1) + [True]
    assert [count for _, count in lab.remote.batches] == [
        REMOTE_BATCH_KEYS_MAX,
        REMOTE_BATCH_KEYS_MAX,
        1,
    ]


def test_no_kind_of_call_starves_another(labs: Callable[..., Lab]) -> None:
    lab = labs(connections=1)
    keys = lab.put(REMOTE_BATCH_OBJECTS_MAX * 4)
    lab.remote.hold("read")
    works = [lab.read(key)[1] for key in keys]
    works.append(lab.channel.contains(keys[:3]))
    works.append(lab.channel.write(WriteItem(b"new", memoryview(b"data")), deadline=FAR))
    future = lab.channel.submit(gathered(works))
    lab.remote.wait_for_calls("read", 1)
    lab.remote.release()
    future.result(20.0)
    order = [operation for operation, _ in lab.remote.batches]
    assert order.index("contains") < len(order) - 2
    assert order.index("write") < len(order) - 1


def test_a_missing_object_is_no_fault_and_a_short_one_is_told(labs: Callable[..., Lab]) -> None:
    lab = labs()
    lab.remote.put(b"short", b"abc")
    missing, short = lab.read(b"gone")[1], lab.read(b"short")[1]
    assert lab.all([missing, short]) == [None, 3]


@pytest.mark.parametrize("error", [ConnectorUnavailableError, ConnectorTimeoutError])
def test_what_may_pass_is_tried_again(
    labs: Callable[..., Lab], error: Callable[[str], ConnectorError]
) -> None:
    lab = labs()
    (key,) = lab.put(1)
    failures = iter([1] * (REMOTE_TRIES_MAX - 1))
    lab.remote.twist["read"] = lambda answer: [error("away")] if next(failures, 0) else answer
    assert lab.do(lab.read(key)[1]) == len(key) * 10
    assert lab.remote.calls["read"] == REMOTE_TRIES_MAX


def test_tries_come_to_an_end(labs: Callable[..., Lab]) -> None:
    lab = labs()
    (key,) = lab.put(1)
    lab.remote.twist["read"] = lambda _: [ConnectorUnavailableError("away")]
    assert isinstance(lab.do(lab.read(key)[1]), ConnectorUnavailableError)
    assert lab.remote.calls["read"] == REMOTE_TRIES_MAX


@pytest.mark.parametrize("error", [ConnectorRefusedError("no"), ConnectorDataError("odd")])
def test_b110_what_will_not_pass_is_not(labs: Callable[..., Lab], error: ConnectorError) -> None:
    lab = labs()
    lab.remote.twist["write"] = lambda _: [error]
    item = WriteItem(b"key", memoryview(b"data"))
    assert lab.do(lab.channel.write(item, deadline=FAR)) is error
    assert lab.remote.calls["write"] == 1


def test_nothing_is_sent_after_its_deadline(labs: Callable[..., Lab]) -> None:
    lab = labs()
    (key,) = lab.put(1)
    assert isinstance(lab.do(lab.read(key, deadline=0.0)[1]), ConnectorTimeoutError)
    assert lab.remote.calls["read"] == 0


def test_b92_a_read_that_is_overdue_keeps_its_buffer_and_frees_its_connection(
    labs: Callable[..., Lab],
) -> None:
    lab = labs(connections=1, deadline_s=0.2)
    first, second = lab.put(2)
    lab.remote.hold("read")
    buffer, work = lab.read(first)
    future = lab.channel.submit(work)
    wait_until(lambda: lab.slow == 1, "nobody says that it is slow")
    assert not future.done()
    assert lab.do(lab.channel.contains([second])) == [True]
    lab.remote.release()
    assert future.result(20.0) == len(buffer)
    assert bytes(buffer) == first * 10


def test_a_bounded_number_of_reads_is_overdue(labs: Callable[..., Lab]) -> None:
    lab = labs(connections=1, deadline_s=0.005)
    lab.remote.hold("read")
    futures = []
    for number in range(LATE_JOBS_MAX):
        futures.append(lab.channel.submit(lab.read(b"k%d" % number)[1]))
        wait_until(lambda: lab.slow == len(futures), "not overdue")
    assert isinstance(lab.do(lab.read(b"more")[1]), ConnectorUnavailableError)
    lab.remote.release()
    assert [future.result(20.0) for future in futures] == [None] * LATE_JOBS_MAX
    assert lab.do(lab.read(b"more")[1]) is None


def test_a_question_that_is_overdue_is_given_up(labs: Callable[..., Lab]) -> None:
    lab = labs(deadline_s=0.01)
    lab.remote.hold("contains")
    assert isinstance(lab.do(lab.channel.contains([b"key"])), ConnectorTimeoutError)


def test_too_much_that_waits_is_refused(labs: Callable[..., Lab]) -> None:
    lab = labs(connections=1)
    lab.remote.hold("read")
    future = lab.channel.submit(gathered([lab.read(b"k")[1] for _ in range(REMOTE_JOBS_MAX + 5)]))
    lab.remote.wait_for_calls("read", 1)
    lab.remote.release()
    outcomes = future.result(20.0)
    assert isinstance(outcomes, list)
    assert [type(outcome) for outcome in outcomes[-5:]] == [ConnectorRefusedError] * 5
    assert outcomes[:-5] == [None] * REMOTE_JOBS_MAX


@pytest.mark.parametrize("operation", ["contains", "read"])
def test_a_probe_finds_what_fails(labs: Callable[..., Lab], operation: str) -> None:
    lab = labs(deadline_s=0.3)
    assert lab.do(lab.channel.probe()) is None
    lab.remote.hold(operation)
    assert isinstance(lab.do(lab.channel.probe()), ConnectorTimeoutError)
    lab.remote.release()
    assert lab.do(lab.channel.probe()) is None

    def raises(_: Any) -> Any:
        raise KeyError("a bug")

    lab.remote.twist[operation] = raises
    assert isinstance(lab.do(lab.channel.probe()), ConnectorUnavailableError)


def cancelled(_: Any) -> Any:
    """As where a connector gives up a task that several of its calls wait for."""
    raise asyncio.CancelledError


@pytest.mark.parametrize("operation", ["contains", "read", "write", "delete"])
def test_a_call_that_a_connector_cancels_by_itself_ends_as_a_fault(
    labs: Callable[..., Lab], operation: str
) -> None:
    lab = labs()
    lab.remote.twist[operation] = cancelled
    works: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "contains": lambda: lab.channel.contains([b"key"]),
        "read": lambda: lab.read(b"key")[1],
        "write": lambda: lab.channel.write(WriteItem(b"key", memoryview(b"data")), deadline=FAR),
        "delete": lambda: lab.channel.delete([b"key"]),
    }
    assert isinstance(lab.do(works[operation]()), ConnectorUnavailableError)
    lab.remote.twist.clear()
    assert not isinstance(lab.do(works[operation]()), ConnectorError)


def test_a_probe_and_a_listing_that_a_connector_cancels_end_as_faults(
    labs: Callable[..., Lab],
) -> None:
    lab = labs()
    lab.remote.twist = dict.fromkeys(("contains", "list"), cancelled)
    assert isinstance(lab.do(lab.channel.probe()), ConnectorUnavailableError)
    assert isinstance(lab.do(lab.channel.listing(b"", 3)), ConnectorUnavailableError)


def test_a_listing_is_bounded_and_its_fault_is_one(labs: Callable[..., Lab]) -> None:
    lab = labs()
    lab.put(3)
    assert len(lab.do(lab.channel.listing(b"", 3))) == 3
    assert isinstance(lab.do(lab.channel.listing(b"", 2)), ConnectorRefusedError)

    def raises(_: Any) -> Any:
        raise KeyError("a bug")

    lab.remote.twist["list"] = raises
    assert isinstance(lab.do(lab.channel.listing(b"", 3)), ConnectorUnavailableError)


def test_a_bug_in_what_is_submitted_is_an_outcome(
    labs: Callable[..., Lab], caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    lab = labs()
    assert isinstance(lab.do(broken()), TierError)
    assert "remote work failed" in caplog.text


def channel_to(connect: Callable[[], Connector], name: str) -> Channel:
    """Open one of a single connection, which tells nobody what is slow."""
    clock, draws = SystemClock(), random.Random(1)
    return Channel(connect, clock, draws, lambda: None, connections=1, deadline_s=1.0, name=name)


def test_a_connector_that_cannot_be_opened_leaves_no_thread() -> None:
    def connect() -> Connector:
        raise ConfigError("no such option")

    before = threading.active_count()
    with pytest.raises(ConfigError, match="no such option"):
        channel_to(connect, "test")
    assert threading.active_count() == before


def test_after_the_close_everything_ends_at_once(labs: Callable[..., Lab]) -> None:
    lab = labs(connections=1)
    lab.remote.hold("read")
    out = lab.channel.submit(lab.read(b"out")[1])
    lab.remote.wait_for_calls("read", 1)
    waiting = lab.channel.submit(lab.read(b"waiting")[1])
    lab.channel.submit(lab.channel.run(lambda: None)).result(20.0)
    closing = threading.Thread(target=lab.channel.close, args=(5.0,))
    closing.start()
    assert isinstance(waiting.result(20.0), ConnectorUnavailableError)
    lab.remote.release()
    closing.join()
    assert out.result(20.0) is None
    assert lab.remote.closed
    lab.channel.close(1.0)


class GivesUp(ToyRemote):
    """Awaits at its end what it has cancelled itself."""

    async def close(self) -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task


def test_a_connector_that_cancels_its_own_end_is_closed_all_the_same() -> None:
    channel = channel_to(GivesUp, "gives-up")
    channel.close(5.0)
    assert not [each for each in threading.enumerate() if each.name.endswith("gives-up")]


class _Deaf(Lab):
    """Nobody can be told that something is slow."""

    def _slow(self) -> None:
        super()._slow()
        raise LookupError("nobody listens")


def test_who_cannot_be_told_that_a_call_is_slow_keeps_nobody_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lab = _Deaf(deadline_s=0.01)
    (key,) = lab.put(1)
    lab.remote.hold("read")
    buffer, reading = lab.read(key)
    outcome = lab.channel.submit(reading)
    wait_until(lambda: lab.slow == 1, "it is not overdue")
    lab.remote.release()
    assert outcome.result(20.0) == len(buffer)
    assert [record.name for record in caplog.records] == ["kvtier.remote"]
    lab.close()
