"""A cache on a disk that fails, lies, hangs or goes away: shorter loads, never wrong ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.constants import (
    HEALTH_BACKOFF_S_MAX,
    LATE_JOBS_MAX,
    LOAD_CHUNKS_INFLIGHT_MAX,
    QUARANTINE_FILES_MAX,
)
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.testing.fault_files import (
    BitFlip,
    FileCrash,
    FileFailure,
    FileGate,
    FileOperation,
    ShortRead,
)
from kvtier.types import Blocks, Miss, MissReason, Plan, Tier
from tests.lib.cache_setup import (
    CHUNK,
    CHUNK_BYTES,
    WINDOWED,
    CacheSetup,
    cache_setup,
    settle,
    tier_stats,
    written,
)

THREE = range(3 * CHUNK)
FIVE = range(5 * CHUNK)
READ = (FileOperation.READ,)
#: Time enough to begin a load on a busy machine.
SOON_S = 0.2
#: Time enough for a part of one to come.
LATER_S = 1.5


@pytest.fixture(params=[None, "zstd"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CacheSetup]:
    """Without and with a byte codec, which writes in two steps."""
    with cache_setup(tmp_path) as setup:
        setup.byte_codec = request.param
        yield setup


def soon(seconds: float = SOON_S) -> float:
    return SystemClock().now() + seconds


# Reads that fail


def test_b04_a_failed_read_ends_the_prefix(setup: CacheSetup) -> None:
    engine = setup.on_disk(THREE)
    second = engine.sequence(THREE).chunk_keys[1].hex()
    setup.files.inject(FileFailure(operations=READ, path=second))
    loading = engine.load(engine.match(engine.sequence(THREE)))
    assert (loading.outcome.start_token, loading.outcome.end_token) == (0, CHUNK)
    assert loading.outcome.tokens_by_tier == {Tier.DISK: CHUNK}
    assert loading.outcome.misses == (Miss(Tier.DISK, MissReason.IO_ERROR, 2 * CHUNK),)
    settle(engine)
    counters = tier_stats(engine.cache, Tier.DISK).counters
    assert (counters.io_errors, counters.hit_tokens) == (1, CHUNK)
    assert counters.miss_tokens == {MissReason.IO_ERROR: 2 * CHUNK}
    assert tier_stats(engine.cache, Tier.DISK).state == "ok", "one error is no broken disk"
    assert engine.load(engine.match(engine.sequence(THREE))).outcome.end_token == 3 * CHUNK


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("kind", ["error", "short", "flip"])
def test_b05_whichever_read_goes_wrong_no_wrong_byte_arrives(
    setup: CacheSetup, nth: int, kind: str
) -> None:
    """``load`` checks each token that counts, so what a slot held before would be seen."""
    engine = setup.on_disk(FIVE)
    fault = {
        "error": FileFailure(operations=READ, nth=nth),
        "short": ShortRead(nbytes=2 * 4096, nth=nth),
        "flip": BitFlip(nth=nth),
    }[kind]
    setup.files.inject(fault)
    first = engine.load(engine.match(engine.sequence(FIVE))).outcome
    reason = MissReason.IO_ERROR if kind == "error" else MissReason.CORRUPT
    lost = {miss.reason for miss in first.misses}
    assert lost <= {reason}
    assert first.end_token + sum(miss.tokens for miss in first.misses) == 40
    settle(engine)
    again = engine.match(engine.sequence(FIVE))
    assert (again.tokens == 40) == (kind == "error" or not lost)
    if again.hits:
        engine.load(again)
    engine.store(engine.sequence(FIVE))
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == 40


@pytest.mark.parametrize("harm", ["payload", "header", "swapped", "cut"])
def test_b78_what_a_disk_spoils_is_a_miss_once(setup: CacheSetup, harm: str) -> None:
    engine = setup.on_disk(THREE)
    keys = [key.hex() for key in engine.sequence(THREE).chunk_keys]
    paths = [next(p for p in setup.shard_files() if p.name.startswith(key)) for key in keys]
    spoiled = bytearray(paths[1].read_bytes())
    if harm == "swapped":
        spoiled = bytearray(paths[2].read_bytes())
    elif harm == "cut":
        del spoiled[-1:]
    else:
        spoiled[5000 if harm == "payload" else 40] ^= 4
    paths[1].write_bytes(spoiled)

    outcome = engine.load(engine.match(engine.sequence(THREE))).outcome
    assert outcome.end_token == CHUNK
    assert outcome.misses == (Miss(Tier.DISK, MissReason.CORRUPT, 2 * CHUNK),)
    settle(engine)
    stats = tier_stats(engine.cache, Tier.DISK)
    assert (stats.counters.corrupt_shards, stats.quarantined_files) == (1, 1)
    assert stats.counters.io_errors == 0
    assert stats.state == "ok"
    assert engine.match(engine.sequence(THREE)).tokens == CHUNK, "it is not offered again"

    assert engine.store(engine.sequence(THREE))
    written(engine)
    wait_until(lambda: not paths[1].exists(), "the spoiled file is not moved away")
    assert (setup.folder / "disk" / "quarantine" / paths[1].name).exists()
    setup.close(engine)
    engine = setup.open()
    assert engine.load(engine.match(engine.sequence(THREE))).outcome.end_token == 3 * CHUNK


@pytest.mark.parametrize("harm", ["header", "swapped", "cut"])
def test_b78_what_was_spoiled_while_nobody_looked_is_found_at_the_start(
    setup: CacheSetup, harm: str
) -> None:
    engine = setup.on_disk(THREE)
    keys = [key.hex() for key in engine.sequence(THREE).chunk_keys]
    setup.close(engine)
    paths = [next(p for p in setup.shard_files() if p.name.startswith(key)) for key in keys]
    data = {
        "header": bytes(8) + paths[1].read_bytes()[8:],
        "swapped": paths[2].read_bytes(),
        "cut": paths[1].read_bytes()[:-1],
    }[harm]
    paths[1].write_bytes(data)
    engine = setup.open()
    assert engine.load(engine.match(engine.sequence(THREE))).outcome.end_token == CHUNK
    stats = tier_stats(engine.cache, Tier.DISK)
    assert (stats.counters.corrupt_shards, stats.quarantined_files) == (1, 1)
    engine.store(engine.sequence(THREE))
    written(engine)
    setup.close(engine)
    engine = setup.open()
    assert engine.load(engine.match(engine.sequence(THREE))).outcome.end_token == 3 * CHUNK


def test_quarantine_keeps_few_files(setup: CacheSetup) -> None:
    engine = setup.on_disk(range(CHUNK))
    for turn in range(QUARANTINE_FILES_MAX + 4):
        sequence = engine.sequence(range(turn, turn + CHUNK))
        engine.store(sequence)
        written(engine)
        setup.close(engine)
        engine = setup.open()
        match = engine.match(engine.sequence(range(turn, turn + CHUNK)))
        setup.files.inject(BitFlip(offset=5000))
        assert engine.load(match).outcome.end_token == 0
        setup.files.inject()
    settle(engine)
    folder = setup.folder / "disk" / "quarantine"
    wait_until(lambda: len(list(folder.iterdir())) <= QUARANTINE_FILES_MAX, "quarantine grows")
    assert len(list(folder.iterdir())) == QUARANTINE_FILES_MAX


# Reads that hang


def test_b80_what_came_in_time_counts(setup: CacheSetup) -> None:
    engine = setup.on_disk(THREE)
    sequence = engine.sequence(THREE)
    gate = FileGate(operations=READ, path=sequence.chunk_keys[1].hex())
    match = engine.match(sequence)
    setup.files.inject(gate)
    loading = engine.begin_load(match, deadline=soon(LATER_S))
    assert loading is not None
    outcome = engine.drive(loading)
    assert (outcome.end_token, outcome.tokens_by_tier) == (CHUNK, {Tier.DISK: CHUNK})
    assert outcome.misses == (Miss(Tier.DISK, MissReason.DEADLINE, 2 * CHUNK),)
    engine.check(loading)
    wait_until(lambda: engine.cache.stats().late_jobs == 1, "the read is not overdue")
    gate.open()
    settle(engine)
    assert engine.load(engine.match(sequence)).outcome.end_token == 3 * CHUNK


def test_a_slot_is_not_reused_while_a_read_may_write_to_it(setup: CacheSetup) -> None:
    """Late reads come after DRAM has been filled with other chunks, which must stay whole."""
    engine = setup.on_disk(THREE, dram_chunks=8)
    match = engine.match(engine.sequence(THREE))
    gate = FileGate(operations=READ)
    setup.files.inject(gate)
    loading = engine.begin_load(match, deadline=soon())
    assert loading is not None
    outcome = engine.drive(loading)
    assert outcome.misses == (Miss(Tier.DISK, MissReason.DEADLINE, 3 * CHUNK),)
    wait_until(lambda: engine.cache.stats().late_jobs == 3, "the reads are not overdue")
    stats = tier_stats(engine.cache, Tier.DRAM)
    assert (stats.chunks, stats.pinned_chunks, stats.used_bytes) == (0, 3, 3 * CHUNK_BYTES)

    others = [engine.sequence(range(start, start + CHUNK)) for start in range(100, 108)]
    for other in others:
        engine.store(other)
    held = [each for each in others if [hit.tier for hit in engine.match(each).hits] == [Tier.DRAM]]
    assert len(held) == 5, "three slots are not to be had"
    gate.open()
    wait_until(lambda: engine.cache.stats().late_jobs == 0, "late reads do not end")
    for other in held:
        assert engine.load(engine.match(other)).outcome.end_token == CHUNK
    settle(engine)
    assert engine.store(engine.sequence(range(500, 500 + 8 * CHUNK))), "now all are free"


def test_the_blocks_of_a_load_that_is_over_are_never_written(setup: CacheSetup) -> None:
    engine = setup.on_disk(THREE)
    match = engine.match(engine.sequence(THREE))
    gate = FileGate(operations=READ)
    setup.files.inject(gate)
    loading = engine.begin_load(match, deadline=soon())
    assert loading is not None
    engine.drive(loading)
    gate.open()
    settle(engine)
    engine.finish()
    engine.ranks[0].check_untouched(Blocks(0, ((),), 4))


def test_many_hung_reads_close_the_disk_without_waiting(setup: CacheSetup) -> None:
    clock = FakeClock()
    many = range(2 * LATE_JOBS_MAX * CHUNK)
    engine = setup.on_disk(many, clock=clock, dram_chunks=64)
    match = engine.match(engine.sequence(many))
    gate = FileGate(operations=READ)
    setup.files.inject(gate)
    for turn in range(LATE_JOBS_MAX // LOAD_CHUNKS_INFLIGHT_MAX):
        tokens = range(turn * LOAD_CHUNKS_INFLIGHT_MAX * CHUNK, many.stop)
        loading = engine.begin_load(match, tokens, deadline=clock.now() + SOON_S)
        assert loading is not None
        engine.drive(loading)
        clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until(lambda: engine.cache.stats().late_jobs == LATE_JOBS_MAX, "too few are overdue")
    assert engine.match(engine.sequence(many)).tokens == 0, "the disk is left out"
    loading = engine.begin_load(match)
    assert loading is not None
    assert loading.load.poll() == []
    assert loading.outcome.misses == (Miss(Tier.DISK, MissReason.UNAVAILABLE, many.stop),)
    gate.open()
    settle(engine)
    clock.advance(HEALTH_BACKOFF_S_MAX)
    assert engine.load(engine.match(engine.sequence(many))).outcome.end_token == many.stop
    settle(engine)
    assert tier_stats(engine.cache, Tier.DISK).state == "ok"


def test_a_load_outlives_another_that_was_in_a_hurry(setup: CacheSetup) -> None:
    engine = setup.on_disk(range(CHUNK))
    match = engine.match(engine.sequence(range(CHUNK)))
    gate = FileGate(operations=READ)
    setup.files.inject(gate)
    patient = engine.begin_load(match)
    hasty = engine.begin_load(match, deadline=soon())
    assert patient is not None
    assert hasty is not None
    hasty.load.poll()
    patient.load.poll()
    assert engine.drive(hasty).end_token == 0
    setup.files.inject()
    gate.open()
    assert engine.drive(patient).end_token == CHUNK
    engine.check(patient)


def test_a_chunk_whose_second_shard_is_late_is_not_ready(setup: CacheSetup) -> None:
    engine = setup.open(WINDOWED)
    sequence = engine.sequence(range(CHUNK))
    engine.store(sequence)
    written(engine)
    setup.close(engine)
    engine = setup.open(WINDOWED)
    sequence = engine.sequence(range(CHUNK))
    match = engine.match(sequence)
    gate = FileGate(operations=READ, path=f"{sequence.chunk_keys[0].hex()}0001")
    setup.files.inject(gate)
    loading = engine.begin_load(match, deadline=soon(LATER_S))
    assert loading is not None
    plans: list[Plan] = []

    def ordered() -> bool:
        plans.extend(loading.load.poll())
        return bool(plans)

    wait_until(ordered, "the first shard is not ordered")
    wait_until(lambda: engine.cache.stats().late_jobs == 1, "the read is not overdue")
    assert loading.load.poll() == []
    assert loading.load.outcome is None, "the workers have not answered"
    for plan in plans:
        engine.run(plan)
    assert loading.outcome.end_token == 0
    gate.open()
    settle(engine)


# Every call once


def written_or_ill(engine: EngineDouble) -> bool:
    stats = engine.cache.stats()
    return stats.degraded or stats.writes_queued == 0


def scenario(engine: EngineDouble) -> None:
    """Stores, evictions on both tiers and loads; whatever counts is checked byte by byte."""
    for start in (0, 100, 0, 200):
        sequence = engine.sequence(range(start, start + 3 * CHUNK))
        engine.store(sequence)
        match = engine.match(sequence)
        if match.hits:
            engine.load(match)
        wait_until(lambda: written_or_ill(engine), "neither written nor ill")
        engine.cache.check_integrity()


def test_b66_a_crash_at_any_call_leaves_a_disk_that_serves(setup: CacheSetup) -> None:
    for nth in range(1, 100):
        nbytes = (None, 4096, 12_288)[nth % 3]
        setup.files.inject(FileCrash(nth=nth, nbytes=nbytes))
        engine = setup.open(dram_chunks=4, disk_chunks=6)
        scenario(engine)
        setup.engines.remove(engine)
        engine.close()
        engine.cache.close(timeout_s=1.0)
        crashed = setup.files.crashed
        setup.files.restart()
        engine = setup.open(dram_chunks=4, disk_chunks=6)
        for start in (0, 100, 200):
            match = engine.match(engine.sequence(range(start, start + 3 * CHUNK)))
            if match.hits:
                assert engine.load(match).outcome.end_token == match.tokens
        scenario(engine)
        setup.close(engine)
        assert setup.disk_bytes() <= 6 * CHUNK_BYTES
        assert not list((setup.folder / "disk" / "incoming").iterdir())
        shutil.rmtree(setup.folder / "disk")
        if not crashed:
            return
    pytest.fail("the scenario makes more calls than were tried")
