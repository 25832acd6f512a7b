"""What goes to disk, when, in which order, and what a slow or failing disk costs."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config import Durability, WriteMode
from kvtier.constants import (
    DIRTY_SHARE_HIGH,
    DIRTY_SHARE_LOW,
    GROUP_COMMIT_S,
    HEALTH_BACKOFF_S_MIN,
    WRITES_INFLIGHT_MAX,
)
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.testing.fault_files import (
    EVER,
    FileFailure,
    FileGate,
    FileOperation,
    TornWrite,
)
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import (
    CHUNK,
    CHUNK_BYTES,
    CacheSetup,
    cache_setup,
    disk_chunks,
    pins,
    refused,
    settle,
    store_one,
    tier_stats,
    written,
)


@pytest.fixture(params=[None, "zstd"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CacheSetup]:
    """Without and with a byte codec, which writes in two steps."""
    with cache_setup(tmp_path) as setup:
        setup.byte_codec = request.param
        yield setup


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[CacheSetup]:
    """Where a bound is told in chunks as DRAM has them."""
    with cache_setup(tmp_path) as setup:
        yield setup


def synced(setup: CacheSetup) -> list[str]:
    """Shard files that were synced; the index has syncs of its own."""
    calls = [call for call in setup.files.calls if call.operation is FileOperation.SYNC_FILE]
    return [call.path for call in calls if call.path.endswith(".kvs")]


def nothing_queued(engine: EngineDouble, clock: FakeClock) -> bool:
    """Tell whether all is written, giving a disk that failed time to be tried again."""
    clock.advance(HEALTH_BACKOFF_S_MIN)
    return engine.cache.stats().writes_queued == 0


# Modes


def test_through_writes_what_was_stored(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=64)
    for start in range(3):
        store_one(engine, start)
    written(engine)
    assert disk_chunks(engine) == 3
    assert len(setup.shard_files()) == 3


def test_back_writes_above_the_high_watermark_down_to_the_low_one(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=16, mode=WriteMode.BACK)
    high, low = int(16 * DIRTY_SHARE_HIGH), int(16 * DIRTY_SHARE_LOW)
    for start in range(high):
        store_one(engine, start)
    settle(engine)
    assert disk_chunks(engine) == 0
    assert engine.cache.stats().writes_queued == high
    first = engine.sequence(range(CHUNK)).chunk_keys[0]
    store_one(engine, 100)
    wait_until(lambda: engine.cache.stats().writes_queued == low, "nothing is written back")
    settle(engine)
    assert disk_chunks(engine) == high + 1 - low
    assert any(path.name.startswith(first.hex()) for path in setup.shard_files()), "oldest first"
    for start in range(200, 200 + high - low):
        store_one(engine, start)
    settle(engine)
    assert engine.cache.stats().writes_queued == high, "not again before the high one"
    store_one(engine, 300)
    wait_until(lambda: engine.cache.stats().writes_queued == low, "nothing is written back")
    settle(engine)


def test_back_leaves_alone_what_is_on_disk(setup: CacheSetup) -> None:
    """What is on disk is not dirty, and an access does not make it so."""
    engine = setup.open(dram_chunks=16, mode=WriteMode.BACK)
    for start in range(12):
        store_one(engine, start)
    low = int(16 * DIRTY_SHARE_LOW)
    wait_until(lambda: engine.cache.stats().writes_queued <= low + 3, "nothing is written back")
    settle(engine)
    before = disk_chunks(engine)
    engine.load(engine.match(engine.sequence(range(CHUNK))))
    settle(engine)
    assert disk_chunks(engine) == before


def test_b119_back_tries_a_disk_again_below_its_watermark(setup: CacheSetup) -> None:
    """Else a disk that was full once would be called full for ever."""
    clock = FakeClock()
    engine = setup.open(dram_chunks=4, mode=WriteMode.BACK, clock=clock)
    engine.match(engine.sequence([]))
    # The second of two: no write that works follows it.
    setup.files.inject(FileFailure(operations=(FileOperation.CREATE,), nth=2, errno=errno.ENOSPC))
    for start in range(3):
        store_one(engine, start)
    wait_until(lambda: engine.cache.stats().degraded, "nothing is written back")
    settle(engine)
    assert engine.cache.stats().writes_queued <= 4 * DIRTY_SHARE_HIGH
    clock.advance(HEALTH_BACKOFF_S_MIN)
    wait_until(lambda: not engine.cache.stats().degraded, "the disk is not tried again")
    settle(engine)


def test_b71_closing_writes_back_what_is_dirty(setup: CacheSetup) -> None:
    engine = setup.open(mode=WriteMode.BACK, dram_chunks=32)
    sequence = engine.sequence(range(12 * CHUNK))
    engine.store(sequence)
    assert disk_chunks(engine) == 0
    setup.close(engine)
    assert len(setup.shard_files()) == 12
    engine = setup.open(dram_chunks=32)
    assert engine.load(engine.match(engine.sequence(range(12 * CHUNK)))).outcome.end_token == 96


def test_b71_closing_while_the_disk_opens_loses_nothing(setup: CacheSetup) -> None:
    gate = FileGate(operations=(FileOperation.LIST,))
    setup.files.inject(gate)
    engine = setup.open()
    engine.store(engine.sequence(range(3 * CHUNK)))
    gate.wait_for_arrivals()
    gate.open()
    setup.close(engine)
    assert len(setup.shard_files()) == 3


def test_closing_gives_up_on_a_disk_that_hangs(setup: CacheSetup) -> None:
    engine = setup.open()
    settle(engine)
    engine.match(engine.sequence([]))
    gate = FileGate(operations=(FileOperation.CREATE,))
    setup.files.inject(gate)
    engine.store(engine.sequence(range(3 * CHUNK)))
    gate.wait_for_arrivals()
    setup.engines.remove(engine)
    engine.close()
    engine.cache.close(timeout_s=0.05)
    gate.open()


# Slow disks


def test_b96_a_disk_that_blocks_costs_writes_and_nothing_else(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=8, disk_chunks=256)
    engine.match(engine.sequence([]))
    gate = FileGate(operations=(FileOperation.CREATE,))
    setup.files.inject(gate)
    keys = [store_one(engine, start) for start in range(100)]
    engine.cache.check_integrity()
    wait_until(lambda: pins(engine)[0] == WRITES_INFLIGHT_MAX, "what is encoded stays pinned")
    stats = engine.cache.stats()
    dropped = refused(engine, Tier.DISK)[MissReason.NO_ROOM]
    assert dropped + stats.writes_queued == 100
    assert dropped == 100 - 8
    gate.open()
    written(engine)
    settle(engine)
    assert disk_chunks(engine) == 8
    assert store_one(engine, 500) not in keys
    settle(engine)
    plan = engine.begin_store(engine.sequence(range(1000, 1000 + 8 * CHUNK)), range(8))
    assert plan is not None
    assert len(plan.moves) == 8, "all slots are free"
    engine.run(plan)


def test_a_dropped_write_gets_another_chance_with_the_next_access(plain: CacheSetup) -> None:
    """The disk evicts a chunk that DRAM still holds."""
    engine = plain.open(dram_chunks=16, disk_chunks=2)
    first = engine.sequence(range(CHUNK))
    engine.store(first)
    written(engine)
    for start in (100, 200):
        store_one(engine, start)
        written(engine)
    assert disk_chunks(engine) == 2
    assert not engine.store(first), "DRAM holds it"
    engine.load(engine.match(first))
    written(engine)
    plain.close(engine)
    engine = plain.open()
    assert engine.match(engine.sequence(range(CHUNK))).tokens == CHUNK


# Failing disks


@pytest.mark.parametrize(
    "fault",
    [
        FileFailure(operations=(FileOperation.CREATE,), errno=errno.ENOSPC, last=EVER),
        FileFailure(operations=(FileOperation.REPLACE,), errno=errno.EROFS, last=EVER),
        TornWrite(nbytes=4096, last=EVER),
    ],
    ids=["full", "read only", "torn"],
)
def test_what_could_not_be_written_is_written_later_in_order(
    setup: CacheSetup, fault: FileFailure | TornWrite
) -> None:
    """A chunk is on disk only after its parent; several fail together and all come back."""
    clock = FakeClock()
    engine = setup.open(clock=clock)
    engine.match(engine.sequence([]))
    setup.files.inject(fault)
    sequence = engine.sequence(range(6 * CHUNK))
    engine.store(sequence)
    settle(engine)
    assert engine.cache.stats().writes_queued == 6
    assert disk_chunks(engine) == 0
    assert setup.shard_files() == []
    assert engine.load(engine.match(sequence)).outcome.end_token == 6 * CHUNK
    setup.files.inject()
    clock.advance(HEALTH_BACKOFF_S_MIN * 20)
    written(engine)
    assert disk_chunks(engine) == 6
    assert refused(engine, Tier.DISK) == {}
    setup.close(engine)
    engine = setup.open()
    assert engine.match(engine.sequence(range(6 * CHUNK))).tokens == 6 * CHUNK


def test_each_write_that_fails_is_tried_again(setup: CacheSetup) -> None:
    """Whichever of the first writes it is that fails, all chunks end up on disk."""
    for nth in range(1, 6):
        clock = FakeClock()
        engine = setup.open(clock=clock)
        engine.match(engine.sequence([]))
        setup.files.inject(FileFailure(operations=(FileOperation.CREATE,), nth=nth))
        sequence = engine.sequence(range(1000 * nth, 1000 * nth + 5 * CHUNK))
        engine.store(sequence)
        wait_until(functools.partial(nothing_queued, engine, clock), "writes do not end")
        setup.close(engine)
        engine = setup.open()
        match = engine.match(engine.sequence(range(1000 * nth, 1000 * nth + 5 * CHUNK)))
        assert match.tokens == 5 * CHUNK, f"write {nth} failed"
        setup.close(engine)


def test_a_chunk_that_leaves_dram_while_its_write_fails_is_forgotten(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(dram_chunks=4, clock=clock)
    engine.match(engine.sequence([]))
    setup.files.inject(FileFailure(operations=(FileOperation.CREATE,), last=EVER))
    for start in range(20):
        store_one(engine, start)
        settle(engine)  # A write that has not failed yet holds its slot.
    assert engine.cache.stats().writes_queued == 4
    setup.files.inject()
    clock.advance(HEALTH_BACKOFF_S_MIN * 20)
    written(engine)
    assert disk_chunks(engine) == 4
    assert refused(engine, Tier.DISK) == {MissReason.NO_ROOM: 16}


# Eviction below


def test_b43_what_the_disk_evicts_dram_still_has(plain: CacheSetup) -> None:
    engine = plain.open(dram_chunks=4, disk_chunks=2)
    first = engine.sequence(range(CHUNK))
    engine.store(first)
    for start in (100, 200):
        store_one(engine, start)
    written(engine)
    assert disk_chunks(engine) == 2
    assert engine.load(engine.match(first)).outcome.tokens_by_tier == {Tier.DRAM: CHUNK}
    for start in (300, 400, 500, 600):
        store_one(engine, start)
    written(engine)
    assert engine.match(first).tokens == 0
    settle(engine)


def test_b43_what_dram_evicts_the_disk_still_has(setup: CacheSetup) -> None:
    engine = setup.open(dram_chunks=2)
    first = engine.sequence(range(CHUNK))
    engine.store(first)
    written(engine)
    for start in (100, 200):
        store_one(engine, start)
        written(engine)
    assert engine.load(engine.match(first)).outcome.tokens_by_tier == {Tier.DISK: CHUNK}


@pytest.mark.parametrize("smaller", [10, 4])
def test_b41_a_restart_keeps_bound_and_order(plain: CacheSetup, smaller: int) -> None:
    engine = plain.open(disk_chunks=10)
    starts = range(0, 800, 100)
    for number, start in enumerate(starts):
        key = store_one(engine, start)
        written(engine)
        (path,) = [p for p in plain.shard_files() if p.name.startswith(key.hex())]
        os.utime(path, (number, number))
    plain.close(engine)
    engine = plain.open(disk_chunks=smaller)
    held = [s for s in starts if engine.match(engine.sequence(range(s, s + CHUNK))).hits]
    assert held == list(starts)[-smaller:]
    most = 0
    for start in range(1000, 1800, 100):
        store_one(engine, start)
        written(engine)
        most = max(most, len(plain.shard_files()))
        used = tier_stats(engine.cache, Tier.DISK).used_bytes
        assert used <= smaller * CHUNK_BYTES
    assert most <= smaller
    settle(engine)
    assert disk_chunks(engine) == smaller
    assert not engine.match(engine.sequence(range(CHUNK))).hits, "the oldest left first"


def test_b41_a_smaller_bound_keeps_the_newest_sequences_whole(plain: CacheSetup) -> None:
    engine = plain.open()
    for number, start in enumerate((100, 0, 200)):
        sequence = engine.sequence(range(start, start + 3 * CHUNK))
        engine.store(sequence)
        written(engine)
        for key in sequence.chunk_keys:
            (path,) = [p for p in plain.shard_files() if p.name.startswith(key.hex())]
            os.utime(path, (number, number))
    plain.close(engine)
    engine = plain.open(disk_chunks=5)
    written(engine)
    tokens = {
        start: engine.match(engine.sequence(range(start, start + 3 * CHUNK))).tokens
        for start in (100, 0, 200)
    }
    assert tokens == {100: 0, 0: 2 * CHUNK, 200: 3 * CHUNK}
    wait_until(lambda: len(plain.shard_files()) == 5, "what does not fit is not removed")


# Durability


def test_each_write_is_synced_before_it_counts(setup: CacheSetup) -> None:
    engine = setup.open(durability=Durability.EACH)
    store_one(engine, 0)
    written(engine)
    assert len(synced(setup)) == 1
    assert setup.files.count(FileOperation.SYNC_DIRECTORY) >= 1


def test_writes_are_synced_in_groups(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(durability=Durability.BATCH, clock=clock)
    engine.match(engine.sequence([]))
    for start in range(5):
        store_one(engine, start)
    written(engine)
    clock.advance(GROUP_COMMIT_S)
    wait_until(lambda: len(synced(setup)) == 5, "no group commit")
    store_one(engine, 9)
    setup.close(engine)
    assert len(synced(setup)) == 6, "the last group is synced at close"
