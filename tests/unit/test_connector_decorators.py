"""What each decorator does with time, errors and counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import (
    ConfigError,
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.interfaces import Connector, ReadOutcome
from kvtier.testing.clock import FakeClock
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.testing.faults import DropKey, FailCall, Faulty, Operation
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.decorators import Deadlined, Decorator, Retrying, Throttled, Timed
from kvtier_connectors.decorators.timed import LATENCY_BOUNDS_S
from kvtier_connectors.memory import MemoryConnector

KEYS = (b"k1", b"k2", b"k3")


async def filled() -> MemoryConnector:
    inner = MemoryConnector()
    await put(inner, {key: payload_of(key, 1000) for key in KEYS})
    return inner


async def asleep(clock: FakeClock, count: int = 1) -> None:
    """Wait until that many threads wait for the clock."""
    await asyncio.to_thread(clock.wait_for_sleepers, count)


class SteppingClock:
    """Notes each wait and passes it at once."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def now(self) -> float:
        return sum(self.waits)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


class Hanging(Decorator):
    """Reads and writes that never end; notes that a cancelled one was let end."""

    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.began = asyncio.Event()
        self.cleared_up = False

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        await self.hang()
        return []

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        await self.hang()
        return []

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        await self.hang()
        return []

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self.hang()

    async def hang(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            # As a connector that needs a turn of the loop before its buffers are free.
            await asyncio.sleep(0)
            self.cleared_up = True


class Sequenced(Decorator):
    """Gives the keys of each read or write the errors that a script says, then succeeds."""

    def __init__(self, inner: Connector, *script: dict[bytes, ConnectorError]) -> None:
        super().__init__(inner)
        self.script = list(script)
        self.asked: list[list[bytes]] = []

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        errors = self.next_errors([request.key for request in requests])
        outcomes = await super().read(requests, into)
        pairs = zip(requests, outcomes, strict=True)
        return [errors.get(request.key, outcome) for request, outcome in pairs]

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        errors = self.next_errors([item.key for item in items])
        outcomes = await super().write(items)
        pairs = zip(items, outcomes, strict=True)
        return [errors.get(item.key, outcome) for item, outcome in pairs]

    def next_errors(self, keys: list[bytes]) -> dict[bytes, ConnectorError]:
        self.asked.append(keys)
        return self.script.pop(0) if self.script else {}


async def test_throttled_read_takes_latency_and_its_bytes_at_the_rate() -> None:
    clock = SteppingClock()
    throttled = Throttled(await filled(), bytes_per_s=100.0, latency_s=2.0, clock=clock)
    found = await get_whole(throttled, dict.fromkeys(KEYS, 1000))
    assert found == [payload_of(key, 1000) for key in KEYS]
    assert clock.now() == pytest.approx(2.0 + 3000 / 100)


async def test_throttled_write_is_stored_when_its_bytes_have_passed() -> None:
    clock = FakeClock(now=0.0)
    inner = MemoryConnector()
    throttled = Throttled(inner, bytes_per_s=1000.0, clock=clock)
    writing = asyncio.ensure_future(put(throttled, {b"key": bytes(20)}))
    await asleep(clock)
    assert await inner.contains([b"key"]) == [False]
    clock.advance(0.02)
    await writing
    assert await inner.contains([b"key"]) == [True]


async def test_throttled_misses_lookups_and_deletes_cost_latency_only() -> None:
    clock = SteppingClock()
    throttled = Throttled(await filled(), bytes_per_s=1e-3, latency_s=1.0, clock=clock)
    assert await get_whole(throttled, {b"absent": 1000}) == [None]
    assert await throttled.contains([b"k1"]) == [True]
    await throttled.delete([b"k1"])
    assert await throttled.contains([b"k1"]) == [False]
    assert clock.now() == 4.0


@pytest.mark.parametrize("bytes_per_s", [20e6, float("inf")])
async def test_throttled_transfers_share_a_direction_of_the_link(bytes_per_s: float) -> None:
    clock = SystemClock()
    inner = MemoryConnector()
    objects = {key: bytes(1_000_000) for key in KEYS}
    await put(inner, objects)
    throttled = Throttled(inner, bytes_per_s=bytes_per_s)
    start = clock.now()
    await asyncio.gather(*(get_whole(throttled, {key: 1_000_000}) for key in KEYS))
    assert clock.now() - start >= 3_000_000 / bytes_per_s


async def test_throttled_directions_do_not_wait_for_each_other() -> None:
    clock = FakeClock(now=0.0)
    throttled = Throttled(await filled(), bytes_per_s=1.0, clock=clock)
    reading = asyncio.ensure_future(get_whole(throttled, {b"k1": 1000}))
    await asleep(clock)
    throttled.bytes_per_s = float("inf")
    await put(throttled, {b"key": b"data"})
    assert not reading.done()
    clock.advance(0.03)
    assert await reading == [payload_of(b"k1", 1000)]


async def test_throttled_goes_on_at_a_new_rate() -> None:
    clock = FakeClock(now=0.0)
    throttled = Throttled(await filled(), bytes_per_s=1e-3, clock=clock)
    reading = asyncio.ensure_future(get_whole(throttled, {b"k1": 1000}))
    await asleep(clock)
    throttled.bytes_per_s = float("inf")
    clock.advance(0.03)
    assert await reading == [payload_of(b"k1", 1000)]


@pytest.mark.parametrize(("rate", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_throttled_refuses_an_impossible_link(rate: float, latency: float) -> None:
    with pytest.raises(ConfigError, match="must"):
        Throttled(MemoryConnector(), bytes_per_s=rate, latency_s=latency)


async def test_deadlined_gives_up_and_waits_until_the_buffers_are_free() -> None:
    clock = FakeClock()
    hanging = Hanging(MemoryConnector())
    deadlined = Deadlined(hanging, 3.0, clock=clock)
    reading = asyncio.ensure_future(get(deadlined, [ReadRequest(b"a", 0, 4)] * 2))
    await asyncio.gather(hanging.began.wait(), asleep(clock))
    clock.advance(3.0)
    outcomes = [outcome for outcome, _ in await reading]
    assert [type(outcome) for outcome in outcomes] == [ConnectorTimeoutError] * 2
    assert str(outcomes[0]) == "no answer within 3 s"
    assert hanging.cleared_up


async def test_deadlined_answers_for_every_operation() -> None:
    deadlined = Deadlined(Hanging(MemoryConnector()), 0.001)
    assert await deadlined.contains([b"a", b"b"]) == [False, False]
    (outcome,) = await deadlined.write([WriteItem(b"a", memoryview(b"data"))])
    assert isinstance(outcome, ConnectorTimeoutError)
    await deadlined.delete([b"a"])


async def test_a_cancelled_call_of_deadlined_cancels_the_inner_one() -> None:
    hanging = Hanging(MemoryConnector())
    reading = asyncio.ensure_future(get(Deadlined(hanging, 60.0), [ReadRequest(b"a", 0, 4)]))
    await hanging.began.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert hanging.cleared_up


async def test_a_call_of_deadlined_that_is_cancelled_twice_waits_for_the_inner_one() -> None:
    class Slow(Hanging):
        """Lets go of its buffers only when it may, however often it is cancelled."""

        async def hang(self) -> None:
            self.began.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            while not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()
            self.cleared_up = True

    may_end = asyncio.Event()
    slow = Slow(MemoryConnector())
    reading = asyncio.ensure_future(get(Deadlined(slow, 60.0), [ReadRequest(b"a", 0, 4)]))
    await slow.began.wait()
    ended = []
    for _ in range(3):
        reading.cancel()
        await asyncio.wait([reading], timeout=0.02)
        ended.append(reading.done())
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert ended == [False] * 3
    assert slow.cleared_up


def test_deadlined_refuses_no_time_at_all() -> None:
    with pytest.raises(ConfigError, match="deadline_s is 0"):
        Deadlined(MemoryConnector(), 0)


async def test_retrying_asks_again_for_what_may_pass_and_only_for_that() -> None:
    passing, lasting = ConnectorTimeoutError("slow"), ConnectorRefusedError("no")
    inner = Sequenced(await filled(), {b"k1": passing, b"k2": lasting}, {b"k1": passing})
    retrying = Retrying(inner, seed=1, backoff_s=0.0)
    found = await get(retrying, [ReadRequest(key, 0, 1000) for key in KEYS])
    assert inner.asked == [list(KEYS), [b"k1"], [b"k1"]]
    assert [outcome for outcome, _ in found] == [1000, lasting, 1000]
    assert found[0][1] == payload_of(b"k1", 1000)


async def test_retrying_writes_again_what_may_pass() -> None:
    errors: dict[bytes, ConnectorError] = {
        b"k2": ConnectorUnavailableError("gone"),
        b"k3": ConnectorDataError("other bytes"),
    }
    inner = Sequenced(MemoryConnector(), errors)
    items = [WriteItem(key, memoryview(b"data")) for key in KEYS]
    outcomes = await Retrying(inner, seed=1, backoff_s=0.0).write(items)
    assert inner.asked == [list(KEYS), [b"k2"]]
    assert outcomes == [None, None, errors[b"k3"]]


@pytest.mark.parametrize("tries_max", [1, 2, 4])
async def test_retrying_stops_at_its_limit(tries_max: int) -> None:
    faulty = Faulty(await filled(), [FailCall(op, 1, last=0) for op in Operation])
    retrying = Retrying(faulty, seed=1, tries_max=tries_max, backoff_s=0.0)
    ((outcome, _),) = await get(retrying, [ReadRequest(b"k1", 0, 1000)])
    assert isinstance(outcome, ConnectorUnavailableError)
    (written,) = await retrying.write([WriteItem(b"k1", memoryview(b"x"))])
    assert isinstance(written, ConnectorUnavailableError)
    assert faulty.calls[Operation.READ] == faulty.calls[Operation.WRITE] == tries_max


async def waits_of(seed: int) -> list[float]:
    clock = SteppingClock()
    faulty = Faulty(await filled(), [FailCall(Operation.READ, 1, last=0)])
    retrying = Retrying(
        faulty, seed=seed, tries_max=8, backoff_s=0.1, backoff_s_max=1.0, clock=clock
    )
    await get(retrying, [ReadRequest(b"k1", 0, 1000)])
    return clock.waits


async def test_retrying_waits_longer_each_time_with_a_jitter_that_the_seed_decides() -> None:
    waits = await waits_of(7)
    assert len(waits) == 7
    bounds = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert all(0 < wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    assert waits == await waits_of(7) != await waits_of(8)


@pytest.mark.parametrize(("tries", "backoff"), [(0, 0.1), (3, -1.0), (3, 2.0)])
def test_retrying_refuses_what_makes_no_sense(tries: int, backoff: float) -> None:
    with pytest.raises(ConfigError, match=r"tries_max|backoff_s"):
        Retrying(MemoryConnector(), seed=1, tries_max=tries, backoff_s=backoff)


async def test_timed_counts_outcomes_and_bytes() -> None:
    faulty = Faulty(await filled(), [DropKey(b"k2"), FailCall(Operation.READ, 2)])
    timed = Timed(faulty)
    requests = [ReadRequest(key, 0, 1000) for key in KEYS]
    await get(timed, requests)
    await get(timed, requests[:1])
    await put(timed, {b"k4": bytes(10), b"k5": bytes(20)})
    assert await timed.contains([b"k1", b"absent"]) == [True, False]
    await timed.delete([b"k4"])
    assert timed.reads.count == 2
    assert timed.reads.keys == 4
    assert timed.reads.nbytes == 2000
    assert timed.reads.outcomes == {"hit": 2, "miss": 1, "ConnectorUnavailableError": 1}
    assert timed.writes.outcomes == {"done": 2}
    assert timed.writes.nbytes == 30
    assert timed.lookups.outcomes == {"hit": 1, "miss": 1}
    assert timed.deletes.outcomes == {"done": 1}


async def test_timed_counts_failed_writes_without_their_bytes() -> None:
    timed = Timed(Faulty(MemoryConnector(), [FailCall(Operation.WRITE, 1)]))
    await timed.write([WriteItem(b"k1", memoryview(b"data"))])
    assert timed.writes.outcomes == {"ConnectorUnavailableError": 1}
    assert timed.writes.nbytes == 0


async def test_timed_sorts_calls_by_latency() -> None:
    clock = SteppingClock()
    throttled = Throttled(await filled(), clock=clock)
    timed = Timed(throttled, clock=clock)
    for latency_s in (0.0, 0.001, 0.001, 1.0, 100.0):
        throttled.latency_s = latency_s
        await timed.contains([b"k1"])
    assert timed.lookups.seconds == pytest.approx(101.002)
    assert timed.lookups.latency_s(0.2) == LATENCY_BOUNDS_S[0]
    assert 0.001 <= timed.lookups.latency_s(0.5) <= 0.0021
    assert 1.0 <= timed.lookups.latency_s(0.8) <= 2.1
    assert timed.lookups.latency_s(1.0) == float("inf")
    assert Timed(MemoryConnector()).reads.latency_s(0.5) == 0.0
