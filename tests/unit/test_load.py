"""Loads step by step: what is pinned, read, ordered and given back, and when they end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import LOAD_CHUNKS_INFLIGHT_MAX, LOAD_CHUNKS_INFLIGHT_MIN
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import Blocks, Miss, MissReason, Plan, Tier
from tests.lib.cache_setup import (
    CHUNK,
    WINDOWED,
    CacheSetup,
    begun,
    cache_setup,
    fails,
    pins,
    settle,
    tier_stats,
    written,
)

FIVE = range(5 * CHUNK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


# Pins


def test_a_load_pins_until_its_outcome_and_no_longer(setup: CacheSetup) -> None:
    engine = setup.open()
    engine.store(engine.sequence(FIVE))
    written(engine)
    settle(engine)
    loading = begun(engine, FIVE)
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
    follower = engine.cache.begin_load(match, loading.blocks)
    assert follower is not None
    (shared,) = follower.poll()
    assert {move.shard.group for move in shared.moves} == {0}, "it follows the same read"
    follower.cancel()
    engine.cache.finish([fails(shared)])
    for plan in plans:
        engine.execute(plan)
    gate.open()
    engine.drive(loading)
    engine.check(loading)
    assert loading.outcome.tokens_by_tier == {Tier.DISK: CHUNK}


def test_fewer_of_them_when_they_are_large(
    setup: CacheSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cache.load.LOAD_BYTES_INFLIGHT", 1)
    many = range(2 * LOAD_CHUNKS_INFLIGHT_MIN * CHUNK)
    engine = setup.on_disk(many)
    gate = FileGate(operations=(FileOperation.READ,))
    match = engine.match(engine.sequence(many))
    setup.files.inject(gate)
    loading = engine.begin_load(match)
    assert loading is not None
    assert loading.load.poll() == []
    assert pins(engine)[0] == LOAD_CHUNKS_INFLIGHT_MIN
    gate.open()
    assert engine.drive(loading).end_token == many.stop


def test_few_chunks_are_on_their_way_at_a_time(setup: CacheSetup) -> None:
    many = range(3 * LOAD_CHUNKS_INFLIGHT_MAX * CHUNK)
    engine = setup.on_disk(many)
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
    engine = setup.on_disk(range(2 * CHUNK))
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
    settle(engine)
    assert setup.files.count(FileOperation.READ) - before == 2
    counters = tier_stats(engine.cache, Tier.DISK).counters
    assert counters.hit_tokens == 10 * 2 * CHUNK
    assert counters.read_bytes == 2 * 4 * 4096


def test_a_load_that_follows_anothers_read_survives_its_cancel(setup: CacheSetup) -> None:
    engine = setup.on_disk(range(2 * CHUNK))
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
    engine = setup.on_disk(range(2 * CHUNK))
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
    engine = setup.on_disk(range(10 * CHUNK), dram_chunks=3)
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
    engine = setup.on_disk(FIVE, dram_chunks=2, clock=clock)
    plans = [
        engine.begin_store(engine.sequence(range(start, start + CHUNK)), range(1))
        for start in (1, 2)
    ]
    loading = begun(engine, FIVE)
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
    setup.close(setup.on_disk(FIVE))
    engine = setup.open(dram_bytes=2 * 4096, clock=FakeClock())
    loading = begun(engine, FIVE)
    assert loading.load.poll() == []
    assert loading.outcome.misses == (Miss(Tier.DISK, MissReason.NO_ROOM, 40),)
    assert not engine.store(engine.sequence(range(1, 9)))


def test_b53_others_go_on_while_a_load_waits_for_room(setup: CacheSetup) -> None:
    engine = setup.on_disk(FIVE, dram_chunks=2)
    first = engine.begin_store(engine.sequence(range(1, 1 + CHUNK)), range(1))
    second = engine.begin_store(engine.sequence(range(2, 2 + CHUNK)), range(1))
    assert first is not None
    assert second is not None
    loading = begun(engine, FIVE)
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
