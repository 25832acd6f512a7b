"""Loads step by step: what is pinned, read, ordered and given back, and when they end."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import LOAD_CHUNKS_INFLIGHT_MAX
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, Loading, wait_until
from kvtier.testing.fault_files import FileFailure, FileGate, FileOperation
from kvtier.types import Blocks, Miss, MissReason, Plan, Result, Tier
from tests.lib.cache_setup import (
    CHUNK,
    NAMESPACE,
    SPLIT,
    WINDOWED,
    CacheSetup,
    ErrorLog,
    idle,
    ranks,
    settle,
    tier_stats,
    written,
)

FIVE = range(5 * CHUNK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    setup = CacheSetup(tmp_path)
    log = ErrorLog(setup.errors)
    logging.getLogger("kvtier").addHandler(log)
    yield setup
    setup.close_all()
    logging.getLogger("kvtier").removeHandler(log)


def on_disk(setup: CacheSetup, tokens: range = FIVE, **how: int) -> EngineDouble:
    """Store a sequence, restart, and return the engine: everything lies on disk alone."""
    engine = setup.open(dram_chunks=64)
    engine.store(engine.sequence(tokens))
    written(engine)
    setup.close(engine)
    return setup.open(**how)  # type: ignore[arg-type]


def begun(engine: EngineDouble, tokens: range = FIVE, *, deadline: float | None = None) -> Loading:
    """Begin to load a sequence."""
    loading = engine.begin_load(engine.match(engine.sequence(tokens)), deadline=deadline)
    assert loading is not None
    return loading


def pins(engine: EngineDouble) -> tuple[int, int]:
    """Pinned chunks in DRAM and on disk."""
    return (
        tier_stats(engine.cache, Tier.DRAM).pinned_chunks,
        tier_stats(engine.cache, Tier.DISK).pinned_chunks,
    )


def fails(plan: Plan, worker: int = 0) -> Result:
    return Result(plan.plan_id, worker, ok=False, reason=MissReason.WORKER, detail="on purpose")


# Pins


def test_a_load_pins_until_its_outcome_and_no_longer(setup: CacheSetup) -> None:
    engine = setup.open()
    engine.store(engine.sequence(FIVE))
    written(engine)
    settle(engine)
    loading = begun(engine)
    assert pins(engine) == (5, 0)
    plans = loading.load.poll()
    assert loading.load.outcome is None
    assert pins(engine) == (5, 0)
    assert loading.load.poll() == [], "a piece is ordered once"
    for plan in plans:
        engine.execute(plan)
    engine.drive(loading)
    assert pins(engine) == (0, 0)
    engine.check(loading)


def test_b87_a_match_that_is_never_loaded_pins_nothing(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=4, disk_chunks=None)
    engine.store(engine.sequence(range(4 * CHUNK)))
    match = engine.match(engine.sequence(range(4 * CHUNK)))
    engine.cache.note_admission(match, 32, 32)
    for start in range(1, 5):
        assert engine.store(engine.sequence(range(start, start + CHUNK)))
    stats = tier_stats(engine.cache, Tier.DRAM)
    assert (stats.chunks, stats.pinned_chunks, stats.counters.evicted_chunks) == (4, 0, 4)


def test_b88_two_loads_of_a_chunk_pin_it_twice(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=2, disk_chunks=None)
    engine.store(engine.sequence(range(CHUNK)))
    first, second = begun(engine, range(CHUNK)), begun(engine, range(CHUNK))
    engine.drive(first)
    for start in range(1, 4):
        engine.store(engine.sequence(range(start, start + CHUNK)))
    assert engine.match(engine.sequence(range(CHUNK))).tokens == CHUNK, "still pinned"
    engine.poison()
    engine.drive(second)
    engine.check(second)
    settle(engine)


def test_b39_room_for_a_chunk_is_not_made_by_its_own_ancestors(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=4, disk_chunks=None)
    sequence = engine.sequence(range(4 * CHUNK))
    engine.store(sequence, range(1))
    for start in range(1, 4):
        engine.store(engine.sequence(range(start, start + CHUNK)))
    engine.store(sequence)
    assert engine.match(sequence).tokens == 4 * CHUNK


def test_b40_lookups_do_not_keep_a_chunk(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=4, disk_chunks=None)
    held = [engine.sequence(range(start, start + CHUNK)) for start in range(4)]
    for sequence in held:
        engine.store(sequence)
    for sequence in held:
        assert engine.match(sequence).tokens == CHUNK
    assert engine.store(engine.sequence(range(9, 9 + CHUNK)))
    assert tier_stats(engine.cache, Tier.DRAM).counters.evicted_chunks == 1


def test_b63_chunks_that_leave_after_the_match_shorten_the_load(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=3, disk_chunks=None)
    sequence = engine.sequence(range(3 * CHUNK))
    engine.store(sequence)
    match = engine.match(sequence)
    assert match.tokens == 3 * CHUNK
    for start in (1, 2):
        engine.store(engine.sequence(range(start, start + CHUNK)))
    outcome = engine.load(match).outcome
    assert outcome.end_token == CHUNK
    assert outcome.misses == (Miss(Tier.DRAM, MissReason.ABSENT, 2 * CHUNK),)


def test_b63_a_match_of_which_nothing_is_left_loads_nothing(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=2, disk_chunks=None)
    sequence = engine.sequence(range(2 * CHUNK))
    engine.store(sequence)
    match = engine.match(sequence)
    for start in (1, 2, 3):
        engine.store(engine.sequence(range(start, start + CHUNK)))
    outcome = engine.load(match).outcome
    assert (outcome.start_token, outcome.end_token) == (0, 0)
    assert outcome.misses == (Miss(Tier.DRAM, MissReason.ABSENT, 2 * CHUNK),)


# Streaming from disk


def test_sections_are_ordered_as_they_are_verified(setup: CacheSetup) -> None:
    """Reads of a chunk hold its slot: nothing of the second shard is ordered before its read."""
    engine = setup.open(WINDOWED)
    sequence = engine.sequence(range(CHUNK))
    engine.store(sequence)
    written(engine)
    setup.close(engine)
    engine = setup.open(WINDOWED)
    gate = FileGate(operations=(FileOperation.READ,), path=f"{sequence.chunk_keys[0].hex()}0001")
    match = engine.match(engine.sequence(range(CHUNK)))
    setup.files.inject(gate)
    loading = engine.begin_load(match)
    assert loading is not None
    plans: list[Plan] = []

    def first_shard_ordered() -> bool:
        plans.extend(loading.load.poll())
        return bool(plans)

    wait_until(first_shard_ordered, "nothing is ordered")
    gate.wait_for_arrivals()
    assert {move.shard.group for plan in plans for move in plan.moves} == {0}
    assert loading.load.outcome is None
    for plan in plans:
        engine.execute(plan)
    gate.open()
    engine.drive(loading)
    engine.check(loading)
    assert loading.outcome.tokens_by_tier == {Tier.DISK: CHUNK}


def test_few_chunks_are_on_their_way_at_a_time(setup: CacheSetup) -> None:
    many = range(3 * LOAD_CHUNKS_INFLIGHT_MAX * CHUNK)
    engine = on_disk(setup, many)
    gate = FileGate(operations=(FileOperation.READ,))
    match = engine.match(engine.sequence(many))
    setup.files.inject(gate)
    loading = engine.begin_load(match)
    assert loading is not None
    for _ in range(3):
        assert loading.load.poll() == []
    assert pins(engine) == (LOAD_CHUNKS_INFLIGHT_MAX, 3 * LOAD_CHUNKS_INFLIGHT_MAX)
    gate.open()
    assert engine.drive(loading).end_token == many.stop
    engine.check(loading)


def test_b62_ten_loads_of_the_same_chunks_read_them_once(setup: CacheSetup) -> None:
    engine = on_disk(setup, range(2 * CHUNK))
    match = engine.match(engine.sequence(range(2 * CHUNK)))
    gate = FileGate(operations=(FileOperation.READ,))
    setup.files.inject(gate)
    before = setup.files.count(FileOperation.READ)
    loads = [engine.begin_load(match) for _ in range(10)]
    for loading in loads:
        assert loading is not None
        assert loading.load.poll() == []
    gate.open()
    for loading in loads:
        assert loading is not None
        outcome = engine.drive(loading)
        assert (outcome.end_token, outcome.misses) == (2 * CHUNK, ())
    assert setup.files.count(FileOperation.READ) - before == 2
    counters = tier_stats(engine.cache, Tier.DISK).counters
    assert counters.hit_tokens == 10 * 2 * CHUNK
    assert counters.read_bytes == 2 * 4 * 4096


def test_a_load_that_follows_anothers_read_survives_its_cancel(setup: CacheSetup) -> None:
    engine = on_disk(setup, range(2 * CHUNK))
    match = engine.match(engine.sequence(range(2 * CHUNK)))
    gate = FileGate(operations=(FileOperation.READ,))
    setup.files.inject(gate)
    first = engine.begin_load(match)
    assert first is not None
    first.load.poll()
    second = engine.begin_load(match)
    assert second is not None
    second.load.poll()
    first.load.cancel()
    assert first.outcome.misses == (Miss(Tier.DISK, MissReason.CANCELLED, 2 * CHUNK),)
    gate.open()
    assert engine.drive(second).end_token == 2 * CHUNK
    engine.check(second)


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_chunk_that_is_being_stored_is_waited_for(setup: CacheSetup, *, succeeds: bool) -> None:
    """The store began before the disk was open and told that it holds the chunk."""
    engine = on_disk(setup, range(2 * CHUNK))
    setup.close(engine)
    gate = FileGate(operations=(FileOperation.LIST,))
    setup.files.inject(gate)
    engine = setup.open()
    sequence = engine.sequence(range(2 * CHUNK))
    plan = engine.begin_store(sequence, range(2))
    assert plan is not None
    gate.open()
    match = engine.match(sequence)
    assert [hit.tier for hit in match.hits] == [Tier.DISK, Tier.DISK]
    loading = engine.begin_load(match)
    assert loading is not None
    assert loading.load.poll() == []
    if succeeds:
        for rank in engine.ranks:
            rank.write(sequence.chunk_keys, store_blocks(plan))
        engine.run(plan)
        engine.poison()
    else:
        engine.cache.finish([fails(plan)])
    assert engine.drive(loading).end_token == 2 * CHUNK
    engine.check(loading)


def store_blocks(plan: Plan) -> Blocks:
    """The blocks of a plan that stores one shard per chunk."""
    return Blocks(0, (tuple(b for move in plan.moves for b in move.block_ids),), 4)


# Room


def test_b51_a_load_larger_than_dram_goes_in_turns(setup: CacheSetup) -> None:
    engine = on_disk(setup, range(10 * CHUNK), dram_chunks=3)
    loading = begun(engine, range(10 * CHUNK))
    outcome = engine.drive(loading)
    assert outcome.tokens_by_tier == {Tier.DISK: 10 * CHUNK}
    engine.check(loading)
    settle(engine)
    assert engine.load(engine.match(engine.sequence(range(10 * CHUNK)))).outcome.end_token == 80


def test_a_sequence_larger_than_dram_is_stored_chunk_by_chunk(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=3)
    sequence = engine.sequence(range(10 * CHUNK))
    for chunk in range(10):
        assert engine.store(sequence, range(chunk, chunk + 1))
        written(engine)
        engine.cache.check_integrity()
    assert engine.load(engine.match(sequence)).outcome.end_token == 10 * CHUNK


def test_b52_a_dram_full_of_pins_refuses_by_the_deadline(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = on_disk(setup, dram_chunks=2, clock=clock)  # type: ignore[arg-type]
    plans = [
        engine.begin_store(engine.sequence(range(start, start + CHUNK)), range(1))
        for start in (1, 2)
    ]
    loading = begun(engine)
    before = len(setup.files.calls)
    for _ in range(20):
        assert loading.load.poll() == []
    assert pins(engine) == (2, 5)
    clock.advance(5.0)
    loading.load.poll()
    assert loading.outcome.misses == (Miss(Tier.DISK, MissReason.NO_ROOM, 5 * CHUNK),)
    assert len(setup.files.calls) == before, "nothing was tried meanwhile"
    for plan in plans:
        assert plan is not None
        engine.cache.finish([fails(plan)])
    settle(engine)
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == 40


def test_a_dram_smaller_than_a_chunk_refuses_at_once(setup: CacheSetup) -> None:
    setup.close(on_disk(setup))
    engine = setup.open(dram_bytes=2 * 4096, clock=FakeClock())
    loading = begun(engine)
    assert loading.load.poll() == []
    assert loading.outcome.misses == (Miss(Tier.DISK, MissReason.NO_ROOM, 40),)
    assert not engine.store(engine.sequence(range(1, 9)))


def test_b53_others_go_on_while_a_load_waits_for_room(setup: CacheSetup) -> None:
    engine = on_disk(setup, dram_chunks=2)
    first = engine.begin_store(engine.sequence(range(1, 1 + CHUNK)), range(1))
    second = engine.begin_store(engine.sequence(range(2, 2 + CHUNK)), range(1))
    assert first is not None
    assert second is not None
    loading = begun(engine)
    assert loading.load.poll() == []
    answers: list[int] = []

    def others() -> None:
        sequence = engine.sequence(FIVE)
        answers.append(engine.match(sequence).tokens)
        answers.append(len(engine.cache.stats().tiers))

    thread = threading.Thread(target=others)
    thread.start()
    thread.join()
    assert answers == [40, 2]
    engine.run(first)
    engine.run(second)
    engine.poison()
    assert engine.drive(loading).end_token == 40
    engine.check(loading)


# Ends


def test_a_deadline_that_has_passed_loads_nothing(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(clock=clock)
    engine.store(engine.sequence(FIVE))
    loading = begun(engine, deadline=clock.now())
    assert loading.load.poll() == []
    assert loading.outcome.misses == (Miss(Tier.DRAM, MissReason.DEADLINE, 40),)
    settle(engine)


def test_what_was_ordered_in_time_is_awaited_and_counts(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(clock=clock)
    engine.store(engine.sequence(FIVE))
    loading = begun(engine)
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
    loading = begun(engine)
    plans = loading.load.poll()
    clock.advance(100.0)
    for plan in plans:
        engine.execute(plan)
    assert engine.drive(loading).misses == (Miss(Tier.DRAM, MissReason.DEADLINE, 40),)
    engine.ranks[0].check_untouched(Blocks(0, ((),), 4))


def test_a_load_that_nobody_polls_ends_at_its_deadline(setup: CacheSetup) -> None:
    engine = on_disk(setup)
    loading = begun(engine, deadline=0.0)
    wait_until(lambda: loading.load.outcome is not None, "the load outlives its deadline")
    assert loading.outcome.misses == (Miss(Tier.DISK, MissReason.DEADLINE, 40),)
    settle(engine)


def test_a_cancelled_load_waits_for_its_plans(setup: CacheSetup) -> None:
    engine = setup.open()
    engine.store(engine.sequence(FIVE))
    written(engine)
    loading = begun(engine)
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
    loading = begun(engine)
    (plan,) = loading.load.poll()
    engine.cache.finish([Result(plan.plan_id, 0, ok=True)])
    assert loading.load.outcome is None
    engine.cache.finish([fails(plan, worker=1)])
    assert loading.outcome.end_token == 0
    assert loading.outcome.misses == (Miss(Tier.DRAM, MissReason.WORKER, 40),)


def test_b45_what_came_before_the_failed_plan_counts(setup: CacheSetup) -> None:
    engine = on_disk(setup, range(3 * CHUNK))
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
    loading = begun(engine)
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
    loading = begun(engine)
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
    engine = on_disk(setup, range(2 * CHUNK))
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


# Figures


def test_b161_admission_is_counted_once_however_often_it_is_tried(setup: CacheSetup) -> None:
    engine = setup.open()
    engine.store(engine.sequence(range(CHUNK)))
    sequence = engine.sequence(range(CHUNK + 1))
    for _ in range(5):
        match = engine.match(sequence)
    engine.cache.note_admission(match, 0, 9)
    engine.load(match)
    dram = tier_stats(engine.cache, Tier.DRAM).counters
    assert (dram.hit_tokens, dram.miss_tokens) == (8, {})


def test_b163_what_was_asked_for_in_vain_counts_as_a_miss(setup: CacheSetup) -> None:
    engine = setup.open()
    sequence = engine.sequence(range(CHUNK))
    engine.cache.note_admission(engine.match(sequence), 0, CHUNK)
    engine.store(sequence)
    engine.cache.note_admission(engine.match(sequence), 0, CHUNK)
    engine.load(engine.match(sequence))
    for tier, hits in {Tier.DRAM: 8, Tier.DISK: 0}.items():
        counters = tier_stats(engine.cache, tier).counters
        assert (counters.hit_tokens, counters.miss_tokens) == (hits, {MissReason.ABSENT: 8})


def test_tokens_that_the_engine_has_are_asked_of_nobody(setup: CacheSetup) -> None:
    engine = setup.open(disk_chunks=None)
    match = engine.match(engine.sequence(FIVE))
    engine.cache.note_admission(match, 12, 30)
    counters = tier_stats(engine.cache, Tier.DRAM).counters
    assert counters.miss_tokens == {MissReason.ABSENT: 4 + 8}


def test_a_failed_load_counts_in_the_tier_that_failed(setup: CacheSetup) -> None:
    engine = on_disk(setup)
    match = engine.match(engine.sequence(FIVE))
    setup.files.inject(FileFailure(operations=(FileOperation.READ,), nth=1))
    loading = engine.begin_load(match)
    assert loading is not None
    outcome = engine.drive(loading)
    lost = sum(miss.tokens for miss in outcome.misses)
    counters = tier_stats(engine.cache, Tier.DISK).counters
    assert counters.hit_tokens + lost == 40
    assert counters.miss_tokens == {MissReason.IO_ERROR: lost}
    wait_until(lambda: idle(engine.cache.stats()), "reads go on")


# Threads


def test_many_threads_share_a_cache(setup: CacheSetup, seed: int) -> None:
    """Each has its own pool and its own worker number's plans; DRAM is too small for all."""
    first = setup.open(dram_chunks=6, disk_chunks=16)
    problems: list[BaseException] = []
    doubles = [EngineDouble(first.cache, NAMESPACE, seed=i) for i in range(4)]

    def serve_boundary(index: int) -> None:
        rng = random.Random(seed + index)
        engine = doubles[index]
        try:
            for _ in range(25):
                start = rng.randrange(4)
                sequence = engine.sequence(range(start, start + CHUNK * rng.randrange(1, 5)))
                match = engine.match(sequence)
                loading = engine.begin_load(match) if match.hits else None
                if loading is not None:
                    if rng.random() < 0.2:
                        loading.load.cancel()
                    engine.drive(loading)
                    engine.check(loading)
                engine.store(sequence)
                engine.cache.stats()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=serve_boundary, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for double in doubles:
        double.close()
    assert not problems, problems
    written(first)
