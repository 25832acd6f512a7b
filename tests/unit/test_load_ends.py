"""How a load ends: in time, late, cancelled, failed by a worker, or because one died."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import Blocks, Miss, MissReason, Plan, Result, Tier
from tests.lib.cache_setup import (
    CHUNK,
    SPLIT,
    CacheSetup,
    begun,
    cache_setup,
    fails,
    pins,
    ranks,
    settle,
    written,
)

FIVE = range(5 * CHUNK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def test_a_deadline_that_has_passed_loads_nothing(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(clock=clock)
    engine.store(engine.sequence(FIVE))
    loading = begun(engine, FIVE, deadline=clock.now())
    assert loading.load.poll() == []
    assert loading.outcome.misses == (Miss(Tier.DRAM, MissReason.DEADLINE, 40),)
    settle(engine)


def test_what_was_ordered_in_time_is_awaited_and_counts(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(clock=clock)
    engine.store(engine.sequence(FIVE))
    loading = begun(engine, FIVE)
    plans = loading.load.poll()
    for plan in plans:
        engine.execute(plan)
    engine.workers[0].close()
    clock.advance(100.0)
    assert loading.load.poll() == []
    assert loading.load.outcome is None
    engine.finish()
    assert loading.outcome.end_token == 40
    engine.check(loading)


def test_a_worker_starts_no_move_after_the_deadline(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(clock=clock)
    engine.store(engine.sequence(FIVE))
    loading = begun(engine, FIVE)
    plans = loading.load.poll()
    clock.advance(100.0)
    for plan in plans:
        engine.execute(plan)
    assert engine.drive(loading).misses == (Miss(Tier.DRAM, MissReason.DEADLINE, 40),)
    engine.ranks[0].check_untouched(Blocks(0, ((),), 4))


def test_a_load_that_nobody_polls_ends_at_its_deadline(setup: CacheSetup) -> None:
    engine = setup.on_disk(FIVE)
    loading = begun(engine, FIVE, deadline=0.0)
    wait_until(lambda: loading.load.outcome is not None, "the load outlives its deadline")
    assert loading.outcome.misses == (Miss(Tier.DISK, MissReason.DEADLINE, 40),)
    settle(engine)


def test_a_cancelled_load_waits_for_its_plans(setup: CacheSetup) -> None:
    engine = setup.open()
    engine.store(engine.sequence(FIVE))
    written(engine)
    loading = begun(engine, FIVE)
    plans = loading.load.poll()
    loading.load.cancel()
    assert loading.load.outcome is None, "a worker may be writing to the blocks"
    assert pins(engine) == (5, 0)
    assert loading.load.poll() == []
    for plan in plans:
        engine.run(plan)
    outcome = loading.outcome
    assert (outcome.end_token, outcome.tokens_by_tier) == (0, {})
    assert outcome.misses == (Miss(Tier.DRAM, MissReason.CANCELLED, 40),)
    loading.load.cancel()
    assert loading.outcome is outcome


def test_b90_cancels_at_any_point_lose_no_slot(setup: CacheSetup, rng: random.Random) -> None:
    engine = setup.open(dram_chunks=64)
    starts = range(0, 1200, 100)
    for start in starts:
        engine.store(engine.sequence(range(start, start + 4 * CHUNK)))
    written(engine)
    setup.close(engine)
    engine = setup.open(dram_chunks=8)
    for turn in range(200):
        start = starts[turn % len(starts)]
        match = engine.match(engine.sequence(range(start, start + 4 * CHUNK)))
        gate = FileGate(operations=(FileOperation.READ,), nth=rng.randrange(1, 5))
        setup.files.inject(gate)
        loading = engine.begin_load(match)
        assert loading is not None
        point = rng.randrange(4)
        if point > 0:
            plans = loading.load.poll()
            gate.wait_for_arrivals()
            plans += loading.load.poll()
            if point > 1:
                for plan in plans:
                    engine.execute(plan)
            else:
                engine.cache.finish([fails(plan) for plan in plans])
            if point > 2:
                engine.finish()
        loading.load.cancel()
        gate.open()
        assert engine.drive(loading).end_token == 0
        settle(engine)
        if turn % 20 == 19:
            stored = engine.sequence(range(5000 + turn, 5000 + turn + 8 * CHUNK))
            assert engine.store(stored), "all slots are free"
            assert engine.match(stored).tokens == 8 * CHUNK
            written(engine)
            settle(engine)
    assert pins(engine) == (0, 0)


def test_b45_one_rank_that_fails_makes_a_miss_on_all(setup: CacheSetup) -> None:
    engine = setup.open(SPLIT, placements=ranks(2))
    engine.store(engine.sequence(FIVE))
    loading = begun(engine, FIVE)
    (plan,) = loading.load.poll()
    engine.cache.finish([Result(plan.plan_id, 0, ok=True)])
    assert loading.load.outcome is None
    engine.cache.finish([fails(plan, worker=1)])
    assert loading.outcome.end_token == 0
    assert loading.outcome.misses == (Miss(Tier.DRAM, MissReason.WORKER, 40),)


def test_b45_what_came_before_the_failed_plan_counts(setup: CacheSetup) -> None:
    engine = setup.on_disk(range(3 * CHUNK))
    sequence = engine.sequence(range(3 * CHUNK))
    gates = [
        FileGate(operations=(FileOperation.READ,), path=key.hex()) for key in sequence.chunk_keys
    ]
    match = engine.match(sequence)
    setup.files.inject(*gates)
    loading = engine.begin_load(match)
    assert loading is not None

    def next_plan() -> Plan:
        plans: list[Plan] = []

        def ordered() -> bool:
            plans.extend(loading.load.poll())
            return bool(plans)

        wait_until(ordered, "nothing is ordered")
        return plans[0]

    gates[0].open()
    engine.run(next_plan())
    gates[1].open()
    failed = next_plan()
    gates[2].open()
    engine.run(next_plan())
    assert loading.load.outcome is None
    engine.cache.finish([fails(failed)])
    outcome = loading.outcome
    assert (outcome.end_token, outcome.tokens_by_tier) == (8, {Tier.DISK: 8})
    assert outcome.misses == (Miss(Tier.DISK, MissReason.WORKER, 16),)
    engine.check(loading)


def test_answers_that_nobody_waits_for_are_ignored(setup: CacheSetup) -> None:
    engine = setup.open()
    engine.store(engine.sequence(FIVE))
    loading = begun(engine, FIVE)
    (plan,) = loading.load.poll()
    engine.cache.finish([Result(999, 0, ok=True), Result(plan.plan_id, 7, ok=False)])
    assert loading.load.outcome is None
    engine.run(plan)
    engine.cache.finish([fails(plan), fails(plan)])
    assert loading.outcome.end_token == 40


def test_a_lost_worker_ends_what_it_owes(setup: CacheSetup) -> None:
    engine = setup.open(SPLIT, placements=ranks(2))
    sequence = engine.sequence(FIVE)
    engine.store(sequence)
    loading = begun(engine, FIVE)
    (plan,) = loading.load.poll()
    longer = engine.sequence(range(7 * CHUNK))
    store = engine.begin_store(longer, range(5, 7))
    assert store is not None
    engine.cache.finish([Result(plan.plan_id, 0, ok=True), Result(store.plan_id, 0, ok=True)])
    engine.cache.lose_worker(1)
    assert loading.outcome.misses == (Miss(Tier.DRAM, MissReason.WORKER, 40),)
    assert engine.cache.store_done(store.plan_id)
    settle(engine)
    assert engine.match(longer).tokens == 40


def test_nothing_more_is_ordered_of_a_worker_that_is_lost(setup: CacheSetup) -> None:
    """The second chunk came first and was ordered; the first one comes when nobody is there."""
    engine = setup.on_disk(range(2 * CHUNK))
    sequence = engine.sequence(range(2 * CHUNK))
    gate = FileGate(operations=(FileOperation.READ,), path=sequence.chunk_keys[0].hex())
    match = engine.match(sequence)
    setup.files.inject(gate)
    loading = engine.begin_load(match)
    assert loading is not None
    wait_until(lambda: bool(loading.load.poll()), "the second chunk is not ordered")
    gate.wait_for_arrivals()
    engine.cache.lose_worker(0)
    assert loading.outcome.misses == (Miss(Tier.DISK, MissReason.WORKER, 2 * CHUNK),)
    gate.open()
    settle(engine)
    assert loading.load.poll() == []
