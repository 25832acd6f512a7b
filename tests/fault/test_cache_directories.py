"""A cache over two directories: what one costs that fails, hangs, goes away and comes back."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import (
    HEALTH_BACKOFF_S_MAX,
    IO_THREADS_DEFAULT,
    LATE_JOBS_MAX,
    READ_FAILURES_MAX,
)
from kvtier.errors import TierUnavailableError
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import Loading, wait_until
from kvtier.testing.fault_files import EVER, FileFailure, FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import (
    CHUNK,
    NAMESPACE,
    CacheSetup,
    begun,
    cache_setup,
    recovered,
    settle,
    tier_stats,
    written,
)
from tests.lib.two_directories import (
    NAMES,
    check_each_shard_once,
    disk_state,
    files_of,
    loads,
    lying_in,
    on_disk_alone,
    one_by_one,
    open_both,
    store,
    tokens_of,
)

WRITES = (FileOperation.CREATE, FileOperation.REPLACE, FileOperation.APPEND)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def test_both_are_filled_and_read(setup: CacheSetup) -> None:
    engine = on_disk_alone(setup, 12)
    assert [len(files_of(setup, name)) for name in NAMES] == [6, 6]
    assert [loads(engine, number) for number in range(12)] == [Tier.DISK] * 12
    settle(engine)
    sequence = engine.sequence(range(500, 500 + 9 * CHUNK))
    engine.store(sequence)
    written(engine)
    assert [len(files_of(setup, name)) for name in NAMES] in ([11, 10], [10, 11])
    check_each_shard_once(setup, engine)


def test_the_share_of_each_is_kept_whatever_is_stored(setup: CacheSetup) -> None:
    engine = open_both(setup, disk_chunks=8)
    for number in range(40):
        store(engine, number)
        written(engine)
        assert all(len(files_of(setup, name)) <= 4 for name in NAMES)
    check_each_shard_once(setup, engine)
    assert tier_stats(engine.cache, Tier.DISK).chunks == 8


@pytest.mark.parametrize("ill", NAMES)
def test_b119_one_that_does_not_open_costs_its_share_alone(setup: CacheSetup, ill: str) -> None:
    clock = FakeClock()
    setup.close(on_disk_alone(setup, 8))
    (setup.folder / ill).rename(setup.folder / "away")
    (setup.folder / ill).write_text("in the way")
    engine = open_both(setup, clock=clock, both_are_well=False)
    wait_until(lambda: any(loads(engine, each) for each in range(8)), "the other one does not open")
    found = [loads(engine, number) for number in range(8)]
    assert found.count(None) == 4, "those of the ill one"
    state, detail = disk_state(engine)
    assert state not in {"ok", "opening"}
    assert detail.startswith(str(setup.folder / ill))
    store(engine, *range(8))
    written(engine)
    settle(engine)
    assert tier_stats(engine.cache, Tier.DISK).chunks == 8

    (setup.folder / ill).unlink()
    (setup.folder / "away").rename(setup.folder / ill)
    clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until(lambda: recovered(engine, clock), "it is not taken up")
    check_each_shard_once(setup, engine)
    assert tier_stats(engine.cache, Tier.DISK).chunks == 8
    setup.close(engine)
    engine = open_both(setup)
    assert [loads(engine, number) for number in range(8)] == [Tier.DISK] * 8


@pytest.mark.parametrize("ill", NAMES)
@pytest.mark.parametrize(
    ("number", "word"), [(errno.ENOSPC, "full"), (errno.EROFS, "read_only"), (errno.EIO, "failing")]
)
def test_b119_one_that_takes_no_writes_leaves_them_to_the_other(
    setup: CacheSetup, ill: str, number: int, word: str
) -> None:
    clock = FakeClock()
    engine = on_disk_alone(setup, 6, clock)
    path = str(setup.folder / ill)
    setup.files.inject(FileFailure(operations=WRITES, path=path, errno=number, last=EVER))
    store(engine, *range(10, 18))
    written(engine)
    settle(engine)
    assert disk_state(engine)[0] == word
    assert disk_state(engine)[1].startswith(path)
    assert len(files_of(setup, ill)) == 3
    assert tier_stats(engine.cache, Tier.DISK).chunks == 14
    assert [loads(engine, each) for each in range(6)] == [Tier.DISK] * 6
    settle(engine)
    setup.files.inject()
    clock.advance(HEALTH_BACKOFF_S_MAX)
    one_by_one(engine, range(20, 26))
    assert not engine.cache.stats().degraded
    assert len(files_of(setup, ill)) == 9, "it has most room"
    check_each_shard_once(setup, engine)


def test_b119_one_that_cannot_be_read_costs_its_chunks_alone(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = on_disk_alone(setup, 16, clock)
    ill, well = (lying_in(setup, engine, name, 16) for name in NAMES)
    path = str(setup.folder / NAMES[0])
    setup.files.inject(FileFailure(operations=(FileOperation.READ,), path=path, last=EVER))
    for number in ill[:READ_FAILURES_MAX]:
        assert loads(engine, number) is None
    misses = tier_stats(engine.cache, Tier.DISK).counters.miss_tokens
    assert misses == {MissReason.IO_ERROR: READ_FAILURES_MAX * CHUNK}
    assert [loads(engine, number) for number in well] == [Tier.DISK] * len(well)
    assert not any(engine.match(engine.sequence(tokens_of(number))).hits for number in ill)

    settle(engine)
    store(engine, *ill[:4])
    written(engine)
    again = lying_in(setup, engine, NAMES[1], 16)
    assert set(again) == {*well, *ill[:4]}, "what is stored again goes where it can be read"
    setup.files.inject()
    clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until(lambda: not engine.cache.stats().degraded, "reads are not tried again")
    assert all(loads(engine, number) for number in range(16))
    check_each_shard_once(setup, engine)


def test_b96_one_whose_reads_hang_holds_up_no_read_of_the_other(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = on_disk_alone(setup, 12, clock)
    ill, well = (lying_in(setup, engine, name, 12) for name in NAMES)
    gate = FileGate(operations=(FileOperation.READ,), path=str(setup.folder / NAMES[0]))
    setup.files.inject(gate)
    hung = begun(engine, tokens_of(ill[0]), deadline=clock.now() + 0.05)
    assert engine.drive(hung).tokens_by_tier == {}
    assert hung.outcome.misses[0].reason is MissReason.DEADLINE
    assert [loads(engine, number) for number in well] == [Tier.DISK] * len(well)
    gate.open()
    settle(engine)
    assert [loads(engine, number) for number in ill] == [Tier.DISK] * len(ill)


def test_b96_however_many_reads_of_one_hang_the_other_is_read(setup: CacheSetup) -> None:
    """More than there are threads, and more than may be overdue."""
    clock = FakeClock()
    count = 2 * LATE_JOBS_MAX + 4
    engine = on_disk_alone(setup, count, clock, dram_chunks=2 * count)
    ill, well = (lying_in(setup, engine, name, count) for name in NAMES)
    assert len(ill) >= LATE_JOBS_MAX > IO_THREADS_DEFAULT
    gate = FileGate(operations=(FileOperation.READ,), path=str(setup.folder / NAMES[0]))
    setup.files.inject(gate)
    matches = [engine.match(engine.sequence(tokens_of(number))) for number in ill]
    hung: list[Loading] = []
    for match in matches:
        loading = engine.begin_load(match, deadline=clock.now() + 1.0)
        assert loading is not None
        engine.step(loading)
        hung.append(loading)
    for loading in hung:
        assert engine.drive(loading).tokens_by_tier == {}
    assert engine.cache.stats().late_jobs >= IO_THREADS_DEFAULT
    assert [loads(engine, number) for number in well] == [Tier.DISK] * len(well)
    gate.open()
    settle(engine)
    clock.advance(HEALTH_BACKOFF_S_MAX)
    assert [loads(engine, number) for number in ill] == [Tier.DISK] * len(ill)


def test_b96_one_whose_writes_hang_holds_up_no_write_of_the_other(setup: CacheSetup) -> None:
    engine = open_both(setup, dram_chunks=64)
    store(engine, 100, 101)
    written(engine)
    gate = FileGate(operations=(FileOperation.CREATE,), path=str(setup.folder / NAMES[0]))
    setup.files.inject(gate)
    store(engine, *range(16))
    wait_until(lambda: len(files_of(setup, NAMES[1])) >= 1 + 12, "the other one waits too")
    assert len(files_of(setup, NAMES[0])) == 1
    gate.open()
    written(engine)
    assert tier_stats(engine.cache, Tier.DISK).chunks == 18
    check_each_shard_once(setup, engine)


@pytest.mark.parametrize("ill", NAMES)
def test_b119_one_that_is_pulled_out_comes_back_and_nothing_is_there_twice(
    setup: CacheSetup, ill: str
) -> None:
    clock = FakeClock()
    engine = on_disk_alone(setup, 12, clock)
    lost = lying_in(setup, engine, ill, 12)
    away = (setup.folder / ill).rename(setup.folder / "away")
    assert loads(engine, lost[0]) is None
    assert disk_state(engine)[0] == "missing"
    assert disk_state(engine)[1].startswith(str(setup.folder / ill))
    found = {number: loads(engine, number) for number in range(12)}
    assert [number for number in range(12) if found[number] is None] == lost

    store(engine, *lost[:3], *range(20, 24))
    written(engine)
    settle(engine)
    assert not (setup.folder / ill).exists(), "nothing is written where it was"
    assert loads(engine, lost[0]) is Tier.DRAM
    away.rename(setup.folder / ill)
    clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until(lambda: recovered(engine, clock), "it is not taken up again")
    check_each_shard_once(setup, engine)
    assert tier_stats(engine.cache, Tier.DISK).chunks == 16
    assert all(loads(engine, number) for number in (*range(12), *range(20, 24)))
    setup.close(engine)
    engine = open_both(setup)
    assert all(loads(engine, number) is Tier.DISK for number in (*range(12), *range(20, 24)))
    check_each_shard_once(setup, engine)


# Epochs


@pytest.mark.parametrize("lost", NAMES)
def test_b11_epochs_outlive_either_directory(setup: CacheSetup, lost: str) -> None:
    engine = on_disk_alone(setup, 6)
    assert engine.cache.invalidate(NAMESPACE) == 1
    setup.close(engine)
    shutil.rmtree(setup.folder / lost)
    engine = open_both(setup)
    assert [loads(engine, number) for number in range(6)] == [None] * 6
    store(engine, *range(6))
    written(engine)
    setup.close(engine)
    (other,) = (name for name in NAMES if name != lost)
    shutil.rmtree(setup.folder / other)
    engine = open_both(setup)
    assert Tier.DISK in [loads(engine, number) for number in range(6)], "the new epoch's"
    assert engine.cache.invalidate(NAMESPACE) == 2


def test_b11_an_epoch_reaches_a_directory_that_was_away(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = on_disk_alone(setup, 6, clock)
    (setup.folder / NAMES[1]).rename(setup.folder / "away")
    lost = [number for number in range(6) if loads(engine, number) is None]
    assert lost
    with pytest.raises(TierUnavailableError, match="kept in memory"):
        engine.cache.invalidate(NAMESPACE)
    (setup.folder / "away").rename(setup.folder / NAMES[1])
    clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until(lambda: recovered(engine, clock), "it is not taken up again")
    assert [loads(engine, number) for number in range(6)] == [None] * 6
    setup.close(engine)
    shutil.rmtree(setup.folder / NAMES[0])
    engine = open_both(setup)
    assert [loads(engine, number) for number in range(6)] == [None] * 6


# Upkeep


def test_an_index_that_is_lost_in_one_costs_nothing(setup: CacheSetup) -> None:
    setup.close(on_disk_alone(setup, 8))
    shutil.rmtree(setup.folder / NAMES[1] / "index")
    engine = open_both(setup)
    assert [loads(engine, number) for number in range(8)] == [Tier.DISK] * 8
    check_each_shard_once(setup, engine)


def test_b119_failed_reads_are_tried_again_without_any_traffic(setup: CacheSetup) -> None:
    """Else a server that nobody asks would call itself degraded for ever."""
    clock = FakeClock()
    engine = on_disk_alone(setup, 12, clock)
    setup.files.inject(FileFailure(operations=(FileOperation.READ,), last=EVER))
    for number in range(2 * READ_FAILURES_MAX):
        loads(engine, number)
    wait_until(lambda: engine.cache.stats().degraded, "nothing is noticed")
    calls = setup.files.count(FileOperation.READ)
    clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until(lambda: setup.files.count(FileOperation.READ) > calls, "no read is tried")
    assert engine.cache.stats().degraded
    setup.files.inject()
    wait_until(lambda: recovered(engine, clock), "it is not tried again")
    assert [loads(engine, number) for number in range(12)] == [Tier.DISK] * 12


def test_the_index_costs_little_and_is_counted(setup: CacheSetup) -> None:
    engine = open_both(setup, dram_chunks=64)
    store(engine, *range(24))
    written(engine)
    stats = tier_stats(engine.cache, Tier.DISK)
    on_medium = sum(
        path.stat().st_size for name in NAMES for path in (setup.folder / name / "index").iterdir()
    )
    assert stats.index_bytes == on_medium
    assert stats.index_bytes > 0
    assert stats.write_amplification == 1 + stats.index_bytes / stats.counters.written_bytes
    assert stats.write_amplification < 1.1
    assert tier_stats(engine.cache, Tier.DRAM).write_amplification == 1.0
