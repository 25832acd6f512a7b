"""Stores that are refused, fail, come twice or come before their parents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import (
    STORE_CHUNKS_INFLIGHT_MAX,
)
from kvtier.types import MissReason, Result, Tier
from tests.lib.cache_setup import (
    CHUNK,
    CHUNK_BYTES,
    CacheSetup,
    cache_setup,
    disk_chunks,
    refused,
    settle,
    store_one,
    tier_stats,
    written,
)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def test_a_store_that_no_worker_did_is_absent(setup: CacheSetup) -> None:
    engine = setup.open()
    sequence = engine.sequence(range(3 * CHUNK))
    plan = engine.begin_store(sequence, range(3))
    assert plan is not None
    assert engine.match(sequence).tokens == 0, "not before the worker is done"
    assert not engine.cache.store_done(plan.plan_id)
    failed = Result(plan.plan_id, 0, ok=False, reason=MissReason.DEADLINE)
    engine.cache.finish([failed])
    assert engine.cache.store_done(plan.plan_id)
    assert engine.match(sequence).tokens == 0
    assert refused(engine, Tier.DRAM) == {MissReason.DEADLINE: 3}
    settle(engine)
    assert tier_stats(engine.cache, Tier.DRAM).used_bytes == 0
    assert engine.store(sequence)
    assert engine.load(engine.match(sequence)).outcome.end_token == 24


def test_a_chunk_whose_parent_was_not_stored_waits_for_it(setup: CacheSetup) -> None:
    engine = setup.open()
    sequence = engine.sequence(range(3 * CHUNK))
    first = engine.begin_store(sequence, range(1))
    rest = engine.begin_store(sequence, range(1, 3))
    assert first is not None
    assert rest is not None
    engine.run(rest)
    engine.cache.finish([Result(first.plan_id, 0, ok=False, reason=MissReason.WORKER)])
    assert engine.match(sequence).tokens == 0
    written(engine)
    assert disk_chunks(engine) == 0, "no lookup could reach it there"
    assert engine.store(sequence, range(1))
    written(engine)
    assert engine.load(engine.match(sequence)).outcome.end_token == 24
    written(engine)
    assert disk_chunks(engine) == 3
    settle(engine)


def test_a_chunk_is_stored_once_however_many_ask(setup: CacheSetup) -> None:
    engine = setup.open()
    sequence = engine.sequence(range(3 * CHUNK))
    plan = engine.begin_store(sequence, range(2))
    assert plan is not None
    again = engine.begin_store(engine.sequence(range(3 * CHUNK)), range(3))
    assert again is not None
    assert len(again.moves) == 1
    assert engine.begin_store(sequence, range(3)) is None
    engine.cache.finish([Result(plan.plan_id, 0, ok=False), Result(again.plan_id, 0, ok=False)])


def test_too_many_chunks_under_way_are_refused(setup: CacheSetup) -> None:
    limit = STORE_CHUNKS_INFLIGHT_MAX
    engine = setup.open(dram_chunks=limit + 8, disk_chunks=None, block_count=2 * (limit + 8))
    sequence = engine.sequence(range((limit + 4) * CHUNK))
    plan = engine.begin_store(sequence, range(limit + 4))
    assert plan is not None
    assert len(plan.moves) == limit
    assert engine.cache.stats().stores_inflight == limit
    assert engine.begin_store(engine.sequence(range(7, 7 + CHUNK)), range(1)) is None
    assert refused(engine, Tier.DRAM) == {MissReason.UNAVAILABLE: 2}
    engine.run(plan)
    assert engine.store(sequence, range(limit, limit + 4))
    assert engine.match(sequence).tokens == (limit + 4) * CHUNK


def test_a_full_dram_takes_what_fits_and_refuses_the_rest(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=4, disk_chunks=None)
    sequence = engine.sequence(range(6 * CHUNK))
    plan = engine.begin_store(sequence, range(6))
    assert plan is not None
    assert len(plan.moves) == 4
    assert refused(engine, Tier.DRAM) == {MissReason.NO_ROOM: 1}
    assert engine.begin_store(engine.sequence(range(9, 9 + CHUNK)), range(1)) is None
    engine.run(plan)
    assert engine.match(sequence).tokens == 4 * CHUNK


def test_a_disk_smaller_than_a_chunk_takes_none(setup: CacheSetup) -> None:
    engine = setup.open(disk_chunks=64)
    setup.close(engine)
    engine = setup.open(disk_chunks=1)
    store_one(engine, 0)
    written(engine)
    sequence = engine.sequence(range(50, 50 + 3 * CHUNK))
    engine.store(sequence)
    written(engine)
    assert disk_chunks(engine) == 1
    assert tier_stats(engine.cache, Tier.DISK).used_bytes <= CHUNK_BYTES
    assert engine.match(sequence).tokens == 24
