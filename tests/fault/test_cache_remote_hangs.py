"""A remote that hangs or answers late, loads that are cancelled, and ends at any moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import BREAKER_FAILURES_MAX, CLOSE_S_MIN, LATE_JOBS_MAX
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import begun, idle, settle, tier_stats
from tests.lib.remote_lab import (
    RemoteLab,
    first_answer,
    remote_lab,
    tokens_of,
)

FIVE = tokens_of(5)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


def state(engine: EngineDouble) -> str:
    return tier_stats(engine.cache, Tier.REMOTE).state


# Hanging and coming late


def test_b09_an_answer_after_the_deadline_writes_to_no_other_slot(lab: RemoteLab) -> None:
    clock = FakeClock()
    engine = lab.filled(
        FIVE, clock=clock, connections=8, deadline_s=0.05, dram_chunks=6, load_deadline_s=1.0
    )
    lab.remote.hold("read")
    loading = begun(engine, FIVE)
    assert loading.load.poll() == []
    wait_until(lambda: lab.remote.count("read") == 5, "not all are asked for")
    clock.advance(1.0)
    wait_until(lambda: not loading.load.poll() and loading.load.outcome is not None, "no end")
    assert loading.outcome.misses[0].reason is MissReason.DEADLINE
    wait_until(lambda: engine.cache.stats().late_jobs == 5, "not all are late")
    # What is overdue keeps its slots: others are stored beside it.
    other = engine.sequence(tokens_of(1, start=1000))
    assert engine.store(other)
    assert tier_stats(engine.cache, Tier.DRAM).pinned_chunks == 5
    lab.remote.release()
    settle(engine)
    engine.load(engine.match(other))
    assert engine.store(engine.sequence(tokens_of(3, start=1100)))


def test_a_remote_that_hangs_is_left_out_and_its_answers_are_bounded(lab: RemoteLab) -> None:
    tokens = tokens_of(20)
    engine = lab.filled(tokens, load_deadline_s=0.4, deadline_s=0.2, connections=2)
    match = engine.match(engine.sequence(tokens))
    lab.remote.hold("read")
    for _ in range(5):
        loading = engine.begin_load(match)
        if loading is not None:
            assert engine.drive(loading).end_token == 0
    assert 0 < engine.cache.stats().late_jobs <= LATE_JOBS_MAX
    assert state(engine) == "slow"
    assert engine.match(engine.sequence(tokens)).tokens == 0
    lab.remote.release()
    wait_until(lambda: state(engine) == "ok", "it is not used again")

    def loaded() -> bool:
        """What came of an earlier one stays; each has a part of a second."""
        outcome = engine.load(engine.match(engine.sequence(tokens))).outcome
        return outcome.end_token == len(tokens)

    wait_until(loaded, "not all of it comes")


def test_a_lookup_that_hangs_opens_the_breaker(lab: RemoteLab) -> None:
    # By a clock that stands still no probe asks meanwhile.
    engine = lab.filled(FIVE, clock=FakeClock(), deadline_s=0.1)
    lab.remote.hold("contains")
    for _ in range(BREAKER_FAILURES_MAX + 1):
        assert engine.match(engine.sequence(FIVE)).tokens == 0
    wait_until(lambda: state(engine) == "slow", "nobody notices")
    asked = lab.remote.calls["contains"]
    for _ in range(20):
        assert engine.match(engine.sequence(FIVE)).tokens == 0
    assert lab.remote.calls["contains"] == asked
    lab.remote.release()


def test_a_connector_that_blocks_its_loop_holds_up_nobody_else(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE, load_deadline_s=0.3, pending_deadline_s=0.6)
    match = engine.match(engine.sequence(FIVE))
    opened = threading.Event()
    lab.remote.twist["read"] = lambda answer: opened.wait(20.0) and answer
    loading = engine.begin_load(match)
    assert loading is not None
    assert engine.drive(loading).misses[0].reason is MissReason.DEADLINE
    engine.store(engine.sequence(tokens_of(3, start=5000)))
    assert engine.load(engine.match(engine.sequence(tokens_of(3, start=5000)))).outcome.end_token
    assert engine.match(engine.sequence(tokens_of(2, start=9000))).tokens == 0
    opened.set()


# Ends


@pytest.mark.parametrize("operation", ["contains", "read", "write"])
def test_close_while_something_is_out(lab: RemoteLab, operation: str) -> None:
    """A close comes to its end in time, whatever the remote does."""
    engine = lab.filled(FIVE)
    match = engine.match(engine.sequence(tokens_of(5))) if operation == "read" else None
    lab.remote.calls.clear()
    lab.remote.hold(operation)
    if match is not None:
        loading = engine.begin_load(match)
        assert loading is not None
        loading.load.poll()
    elif operation == "contains":
        first_answer(engine, tokens_of(3, start=700))
    else:
        engine.store(engine.sequence(tokens_of(1, start=500)))
    lab.remote.wait_for_calls(operation, 1)
    lab.engines.remove(engine)
    engine.close()
    engine.cache.close(timeout_s=CLOSE_S_MIN / 2)
    lab.remote.release()


@pytest.mark.parametrize("when", ["before", "reading", "coming", "ordered", "answered"])
def test_b90_a_cancel_at_each_step_leaves_nothing_behind(lab: RemoteLab, when: str) -> None:
    engine = lab.filled(FIVE, dram_chunks=8)
    for _ in range(3):
        loading = begun(engine, FIVE)
        if when != "before":
            lab.remote.hold("read")
            plans = loading.load.poll()
            if when != "reading":
                lab.remote.release()
            while when in {"ordered", "answered"} and not plans:
                plans = loading.load.poll()
            for plan in plans:
                engine.execute(plan)
            if when == "answered":
                engine.step(loading)
        loading.load.cancel()
        lab.remote.release()
        assert engine.drive(loading).end_token == 0
        settle(engine)
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)


def test_a_load_that_was_cancelled_fetches_no_more(lab: RemoteLab) -> None:
    tokens = tokens_of(20)
    engine = lab.filled(tokens, connections=1)
    match = engine.match(engine.sequence(tokens))
    lab.remote.batches.clear()
    lab.remote.hold("read")
    loading = engine.begin_load(match)
    assert loading is not None
    loading.load.poll()
    lab.remote.wait_for_calls("read", 1)
    loading.load.cancel()
    lab.remote.release()
    wait_until(lambda: idle(engine.cache.stats()), "not idle")
    read = lab.remote.count("read")
    assert read <= 8
    engine.drive(loading)


def test_another_load_goes_on_where_one_was_cancelled(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    lab.remote.hold("read")
    first, second = begun(engine, FIVE), begun(engine, FIVE)
    first.load.poll()
    second.load.poll()
    first.load.cancel()
    lab.remote.release()
    engine.drive(first)
    assert engine.drive(second).end_token == len(FIVE)


def test_b92_a_worker_that_dies_during_a_fetch_leaves_nothing_behind(lab: RemoteLab) -> None:
    engine = lab.filled(FIVE)
    lab.remote.hold("read")
    loading = begun(engine, FIVE)
    loading.load.poll()
    engine.replace_worker(0)
    engine.cache.lose_worker(0)
    lab.remote.release()
    assert engine.drive(loading).end_token == 0
    settle(engine)
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == len(FIVE)
