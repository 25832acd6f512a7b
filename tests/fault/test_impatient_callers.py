"""Callers who give a read too little time: that a tier has not answered says nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.cache import Cache
from kvtier.constants import BREAKER_FAILURES_MAX, READ_FAILURES_MAX, SLOW_S_MIN
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import tier_stats
from tests.lib.keyed_setup import KeyedSetup, finished, keyed_setup, settle
from tests.lib.remote_lab import RemoteLab, remote_lab, tokens_of

NBYTES = 70_000
#: Little, and still enough for a busy machine to begin all reads.
IMPATIENT_S = SLOW_S_MIN / 2
#: Real seconds in which all reads have begun on a busy machine; the clock goes on by less.
BEGUN_S = 0.5
CHUNKS = max(BREAKER_FAILURES_MAX, READ_FAILURES_MAX) + 1
PATIENCE = pytest.mark.parametrize(
    ("patience_s", "state"),
    [(IMPATIENT_S, "ok"), (2 * SLOW_S_MIN, "slow")],
    ids=["impatient", "patient"],
)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[KeyedSetup]:
    with keyed_setup(tmp_path) as setup:
        yield setup


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RemoteLab]:
    with remote_lab(tmp_path) as lab:
        yield lab


def given_up(setup: KeyedSetup, clock: FakeClock, patience_s: float) -> tuple[Cache, FileGate]:
    """Read all from a directory that hangs, and wait no longer than that; return what holds it."""
    sizes = {b"%d" % number: NBYTES for number in range(CHUNKS)}
    setup.on_disk(sizes)
    setup.close(setup.faces[0][0])
    keyed, cache = setup.open(clock=clock)
    gate = FileGate(operations=(FileOperation.READ,), path=".kvs")
    setup.files.inject(gate)
    into = [bytearray(NBYTES) for _ in sizes]
    deadline = clock.now() + max(patience_s, BEGUN_S)
    transfer = keyed.get(list(sizes), into, deadline=deadline)
    gate.wait_for_arrivals(CHUNKS)
    clock.advance(patience_s)
    assert finished(transfer) == [MissReason.DEADLINE] * CHUNKS
    wait_until(lambda: cache.stats().late_jobs == CHUNKS, "not all are late")
    return cache, gate


@PATIENCE
@pytest.mark.parametrize("ends_after_s", [0.0, 2 * SLOW_S_MIN])
def test_a_directory_is_left_alone_only_by_those_who_gave_it_time(
    setup: KeyedSetup, patience_s: float, state: str, ends_after_s: float
) -> None:
    """Once its reads have ended, how long those took in all is what counts."""
    clock = FakeClock()
    cache, gate = given_up(setup, clock, patience_s)
    assert tier_stats(cache, Tier.DISK).state == state
    clock.advance(ends_after_s)
    gate.open()
    settle(cache)
    assert tier_stats(cache, Tier.DISK).state == ("slow" if ends_after_s else state)


def test_a_directory_that_hangs_for_ever_is_left_alone_though_nobody_gave_it_time(
    setup: KeyedSetup,
) -> None:
    """Or each of those who have no time would give it all they have, again and again."""
    clock = FakeClock()
    cache, gate = given_up(setup, clock, IMPATIENT_S)
    clock.advance(2 * SLOW_S_MIN)
    wait_until(lambda: tier_stats(cache, Tier.DISK).state == "slow", "it is waited for again")
    gate.open()
    settle(cache)


@PATIENCE
@pytest.mark.parametrize("ends_after_s", [0.0, 2 * SLOW_S_MIN])
def test_a_remote_is_left_alone_only_by_those_who_gave_it_time(
    lab: RemoteLab, patience_s: float, state: str, ends_after_s: float
) -> None:
    clock = FakeClock()
    tokens = tokens_of(CHUNKS)
    engine = lab.filled(
        tokens,
        clock=clock,
        connections=CHUNKS,
        deadline_s=60.0,
        load_deadline_s=max(patience_s, BEGUN_S),
    )
    lab.remote.hold("read")
    loading = engine.begin_load(engine.match(engine.sequence(tokens)))
    assert loading is not None
    assert loading.load.poll() == []
    wait_until(lambda: lab.remote.count("read") == CHUNKS, "not all are asked for")
    clock.advance(patience_s)
    wait_until(lambda: not loading.load.poll() and loading.load.outcome is not None, "no end")
    assert loading.outcome.misses[0].reason is MissReason.DEADLINE
    wait_until(lambda: engine.cache.stats().late_jobs == CHUNKS, "not all are late")
    assert tier_stats(engine.cache, Tier.REMOTE).state == state
    clock.advance(ends_after_s)
    lab.remote.twist["contains"] = lambda _: [False]  # So that no probe heals it meanwhile.
    lab.remote.hold("contains")
    lab.remote.release("read")
    settle(engine.cache)
    expected = "slow" if ends_after_s else state
    assert tier_stats(engine.cache, Tier.REMOTE).state == expected
    lab.remote.release()
