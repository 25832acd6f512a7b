"""The test kit's own clock and fault decorators do what they are ordered to do."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import ConnectorTimeoutError, ConnectorUnavailableError
from kvtier.interfaces import Clock
from kvtier.testing.clock import FakeClock
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.testing.faults import CutRead, DropKey, FailCall, Faulty, FlipBit, Operation, Slow
from kvtier.types import ReadRequest, WriteItem
from kvtier_connectors.memory import MemoryConnector


def test_clocks_are_clocks() -> None:
    assert isinstance(FakeClock(), Clock)
    assert isinstance(SystemClock(), Clock)
    clock = SystemClock()
    before = clock.now()
    clock.sleep(0.0)
    assert clock.now() >= before


def test_fake_clock_wakes_whom_it_has_passed() -> None:
    clock = FakeClock(now=5.0)
    woken: list[str] = []

    def nap(seconds: float, name: str) -> None:
        clock.sleep(seconds)
        woken.append(name)

    threads = [
        threading.Thread(target=nap, args=(1.0, "short")),
        threading.Thread(target=nap, args=(10.0, "long")),
    ]
    for thread in threads:
        thread.start()
    clock.wait_for_sleepers(2)
    clock.advance(1.0)
    threads[0].join(timeout=30)
    assert woken == ["short"]
    clock.advance(9.0)
    threads[1].join(timeout=30)
    assert woken == ["short", "long"]
    assert clock.now() == 15.0
    assert not any(thread.is_alive() for thread in threads)


async def make_faulty(*faults: CutRead | DropKey | FailCall | FlipBit, seed: int = 0) -> Faulty:
    inner = MemoryConnector()
    await put(inner, {key: payload_of(key, 100) for key in (b"a", b"b")})
    return Faulty(inner, faults, seed=seed, error=ConnectorTimeoutError)


@pytest.mark.parametrize(
    ("last", "failing"), [(None, {2}), (3, {2, 3}), (0, {2, 3, 4})], ids=["one", "range", "ever"]
)
async def test_the_nth_calls_fail(last: int | None, failing: set[int]) -> None:
    faulty = await make_faulty(
        FailCall(Operation.READ, 2, last), FailCall(Operation.WRITE, 2, last)
    )
    for call in range(1, 5):
        found = await get(faulty, [ReadRequest(b"a", 0, 100), ReadRequest(b"b", 0, 100)])
        written = await faulty.write([WriteItem(b"c", memoryview(b"x"))])
        reads_fail = all(isinstance(outcome, ConnectorTimeoutError) for outcome, _ in found)
        writes_fail = all(isinstance(outcome, ConnectorTimeoutError) for outcome in written)
        assert (reads_fail, writes_fail) == (call in failing, call in failing)
    assert faulty.calls == {Operation.READ: 4, Operation.WRITE: 4}


async def test_failing_lookups_find_nothing_and_deletes_do_nothing() -> None:
    faulty = await make_faulty(FailCall(Operation.CONTAINS, 1), FailCall(Operation.DELETE, 1))
    assert await faulty.contains([b"a"]) == [False]
    await faulty.delete([b"a"])
    assert await faulty.contains([b"a"]) == [True]
    await faulty.delete([b"a"])
    assert await faulty.contains([b"a"]) == [False]


async def test_cut_and_drop_touch_only_their_key() -> None:
    faulty = await make_faulty(CutRead(b"a", 7))
    requests = [ReadRequest(b"a", 0, 100), ReadRequest(b"b", 0, 100)]
    assert [outcome for outcome, _ in await get(faulty, requests)] == [7, 100]
    faulty.faults = [DropKey(b"a")]
    assert await get_whole(faulty, {b"a": 100, b"b": 100}) == [None, payload_of(b"b", 100)]
    assert await faulty.contains([b"a", b"b"]) == [False, True]
    faulty.faults = []
    assert await get_whole(faulty, {b"a": 100}) == [payload_of(b"a", 100)]


async def test_flip_changes_one_bit_that_the_seed_chooses() -> None:
    wrong: list[bytes] = []
    for seed in (1, 1, 2):
        faulty = await make_faulty(FlipBit(b"a"), seed=seed)
        (data,) = await get_whole(faulty, {b"a": 100})
        assert data is not None
        changed = int.from_bytes(data, "big") ^ int.from_bytes(payload_of(b"a", 100), "big")
        assert changed.bit_count() == 1
        wrong.append(data)
    assert wrong[0] == wrong[1] != wrong[2]


async def test_the_default_error_is_unavailable() -> None:
    faulty = Faulty(MemoryConnector(), [FailCall(Operation.READ, 1)])
    ((outcome, _),) = await get(faulty, [ReadRequest(b"a", 0, 1)])
    assert isinstance(outcome, ConnectorUnavailableError)


async def test_slow_answers_when_the_clock_has_moved() -> None:
    clock = FakeClock()
    inner = MemoryConnector()
    await put(inner, {b"a": b"data"})
    slow = Slow(inner, 2.0, clock)
    pending = asyncio.ensure_future(get_whole(slow, {b"a": 4}))
    await asyncio.to_thread(clock.wait_for_sleepers, 1)
    assert not pending.done()
    clock.advance(2.0)
    assert await pending == [b"data"]
    assert await inner.contains([b"a"]) == [True]
