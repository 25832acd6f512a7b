"""A disk that is not there, goes away, fills up or lets nobody write: state, service, recovery."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.constants import HEALTH_BACKOFF_S_MAX
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import EVER, FileFailure, FileGate, FileOperation
from kvtier.types import Miss, MissReason, Tier
from tests.lib.cache_setup import (
    CHUNK,
    CHUNK_BYTES,
    CacheSetup,
    cache_setup,
    recovered,
    settle,
    tier_stats,
    written,
)
from tests.lib.mounts import Disk, removable_disk

THREE = range(3 * CHUNK)
FIVE = range(5 * CHUNK)
ROOM_BYTES = 64 * CHUNK_BYTES


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


def lose(setup: CacheSetup) -> Path:
    """Take the directory away; returns where it is."""
    away = setup.folder / "away"
    (setup.folder / "disk").rename(away)
    return away


def test_b119_a_disk_that_is_missing_at_the_start_is_taken_up_later(setup: CacheSetup) -> None:
    clock = FakeClock()
    (setup.folder / "disk").write_text("in the way")
    engine = setup.open(clock=clock)
    sequence = engine.sequence(FIVE)
    assert engine.match(sequence).tokens == 0
    assert engine.cache.stats().degraded
    assert tier_stats(engine.cache, Tier.DISK).state != "opening"
    engine.store(sequence)
    assert engine.load(engine.match(sequence)).outcome.tokens_by_tier == {Tier.DRAM: 40}
    engine.cache.note_admission(engine.match(engine.sequence(range(999, 1010))), 0, CHUNK)
    missed = tier_stats(engine.cache, Tier.DISK).counters.miss_tokens
    assert missed == {MissReason.UNAVAILABLE: CHUNK}

    (setup.folder / "disk").unlink()
    clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until(lambda: recovered(engine, clock), "the disk is not taken up")
    written(engine)
    assert tier_stats(engine.cache, Tier.DISK).chunks == 5


def test_b119_a_disk_that_vanishes_and_returns_serves_again(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.on_disk(FIVE, clock=clock)
    match = engine.match(engine.sequence(FIVE))
    away = lose(setup)
    outcome = engine.load(match).outcome
    assert outcome.end_token == 0
    assert outcome.misses[0].reason in {MissReason.IO_ERROR, MissReason.UNAVAILABLE}
    assert tier_stats(engine.cache, Tier.DISK).state == "missing"
    assert engine.cache.stats().degraded

    other = engine.sequence(range(100, 100 + 3 * CHUNK))
    engine.store(other)
    assert engine.load(engine.match(other)).outcome.tokens_by_tier == {Tier.DRAM: 24}
    if (setup.folder / "disk").exists():
        shutil.rmtree(setup.folder / "disk")
    away.rename(setup.folder / "disk")
    clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until(lambda: recovered(engine, clock), "the disk is not taken up again")
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == 40
    written(engine)
    assert tier_stats(engine.cache, Tier.DISK).chunks == 8


def test_b119_a_disk_that_was_emptied_is_forgotten(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.on_disk(FIVE, clock=clock)
    match = engine.match(engine.sequence(FIVE))
    shutil.rmtree(setup.folder / "disk")
    assert engine.load(match).outcome.end_token == 0
    clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until(lambda: recovered(engine, clock), "the disk is not taken up again")
    assert engine.match(engine.sequence(FIVE)).tokens == 0
    wait_until(lambda: tier_stats(engine.cache, Tier.DISK).used_bytes == 0, "it is still counted")
    settle(engine)
    engine.store(engine.sequence(FIVE))
    written(engine)
    setup.close(engine)
    engine = setup.open()
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == 40


def test_a_file_that_somebody_removed_is_a_miss_once(setup: CacheSetup) -> None:
    engine = setup.on_disk(THREE, clock=FakeClock())
    sequence = engine.sequence(THREE)
    match = engine.match(sequence)
    (path,) = [p for p in setup.shard_files() if p.name.startswith(sequence.chunk_keys[1].hex())]
    path.unlink()
    outcome = engine.load(match).outcome
    assert outcome.end_token == CHUNK
    assert outcome.misses == (Miss(Tier.DISK, MissReason.ABSENT, 2 * CHUNK),)
    assert engine.match(sequence).tokens == CHUNK
    assert tier_stats(engine.cache, Tier.DISK).state == "ok"
    engine.store(sequence)
    assert engine.load(engine.match(sequence)).outcome.end_token == 3 * CHUNK


@pytest.mark.parametrize(
    ("number", "word"), [(errno.ENOSPC, "full"), (errno.EROFS, "read_only"), (errno.EIO, "failing")]
)
def test_b119_a_disk_that_takes_no_writes_is_still_read(
    setup: CacheSetup, number: int, word: str
) -> None:
    clock = FakeClock()
    engine = setup.on_disk(FIVE, clock=clock)
    writes = (FileOperation.CREATE, FileOperation.REPLACE, FileOperation.REMOVE)
    setup.files.inject(FileFailure(operations=writes, errno=number, last=EVER))
    other = engine.sequence(range(100, 100 + 3 * CHUNK))
    engine.store(other)
    wait_until(lambda: engine.cache.stats().degraded, "nothing is noticed")
    assert tier_stats(engine.cache, Tier.DISK).state == word
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == 40
    settle(engine)
    assert tier_stats(engine.cache, Tier.DISK).state == word, "a good read heals no write"
    setup.files.inject()
    clock.advance(HEALTH_BACKOFF_S_MAX)
    written(engine)
    assert not engine.cache.stats().degraded
    assert tier_stats(engine.cache, Tier.DISK).chunks == 8


# A disk of its own: the same with a real file system, where the machine lets us mount one


class RealDisk:
    """Makes the file system under a cache's directory ill, by mounts."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def harm(self, word: str) -> None:
        if word == "full":
            self._disk.leave_room(CHUNK_BYTES)
        elif word == "read_only":
            self._disk.write_protect()
        else:
            self._disk.pull_out()

    def heal(self, word: str) -> None:
        if word == "full":
            self._disk.resize(ROOM_BYTES)
        elif word == "read_only":
            self._disk.pull_out()
        else:
            self._disk.plug_in(ROOM_BYTES)


class FalseDisk:
    """The same by the seam's faults and by renaming, for those who may not mount."""

    def __init__(self, setup: CacheSetup) -> None:
        self._setup = setup

    def harm(self, word: str) -> None:
        if word == "missing":
            shutil.rmtree(self._setup.folder / "disk")
            (self._setup.folder / "disk").write_text("in the way")
            return
        number = {"full": errno.ENOSPC, "read_only": errno.EROFS}[word]
        writes = (FileOperation.CREATE, FileOperation.REPLACE, FileOperation.REMOVE)
        self._setup.files.inject(FileFailure(operations=writes, errno=number, last=EVER))

    def heal(self, word: str) -> None:
        self._setup.files.inject()
        if word == "missing":
            (self._setup.folder / "disk").unlink()


@contextmanager
def disk_of(setup: CacheSetup) -> Iterator[RealDisk | FalseDisk]:
    """Give the cache's folder a disk of its own, or one that can be told to be ill."""
    setup.folder = setup.folder / "mount"
    setup.folder.mkdir()
    if os.geteuid() != 0:
        yield FalseDisk(setup)
        return
    with removable_disk(setup.folder) as disk:
        disk.plug_in(ROOM_BYTES)
        yield RealDisk(disk)
        setup.close_all()


@pytest.mark.parametrize("word", ["full", "read_only", "missing"])
def test_b119_a_real_disk_that_fails_and_recovers(setup: CacheSetup, word: str) -> None:
    clock = FakeClock()
    with disk_of(setup) as disk:
        engine = setup.on_disk(FIVE, clock=clock)
        disk.harm(word)
        other = engine.sequence(range(100, 100 + 3 * CHUNK))
        engine.store(other)
        wait_until(lambda: engine.cache.stats().degraded, "nothing is noticed")
        assert tier_stats(engine.cache, Tier.DISK).state == word
        assert engine.load(engine.match(other)).outcome.tokens_by_tier == {Tier.DRAM: 24}
        if word != "missing":
            held = engine.match(engine.sequence(FIVE))
            assert engine.load(held).outcome.tokens_by_tier == {Tier.DISK: 40}
        disk.heal(word)
        clock.advance(HEALTH_BACKOFF_S_MAX)
        wait_until(lambda: recovered(engine, clock), "it does not recover")
        written(engine)
        assert tier_stats(engine.cache, Tier.DISK).chunks == (3 if word == "missing" else 8)
        setup.close(engine)
        engine = setup.open()
        match = engine.match(engine.sequence(range(100, 100 + 3 * CHUNK)))
        assert engine.load(match).outcome.tokens_by_tier == {Tier.DISK: 24}
        setup.close(engine)


def test_b41_what_waits_behind_a_failed_removal_is_not_written(plain: CacheSetup) -> None:
    """A write that was given the room of files that could not be removed would break the bound."""
    clock = FakeClock()
    engine = plain.on_disk(range(CHUNK), dram_chunks=2, disk_chunks=3, clock=clock)
    chunks = [engine.sequence(range(start, start + CHUNK)) for start in range(5)]
    for chunk in chunks[1:3]:
        engine.store(chunk)
        written(engine)
    removals = FileFailure(operations=(FileOperation.REMOVE,), last=EVER)
    plain.files.inject(removals)
    engine.store(chunks[3])
    wait_until(lambda: engine.cache.stats().degraded, "nothing is noticed")
    for chunk in chunks[1:3]:
        engine.load(engine.match(chunk))  # These drive the fourth out: nothing waits to be written.
    settle(engine)
    assert engine.cache.stats().writes_queued == 0

    gate = FileGate(operations=(FileOperation.REMOVE,))
    plain.files.inject(gate, removals)
    clock.advance(HEALTH_BACKOFF_S_MAX)
    gate.wait_for_arrivals()
    engine.store(chunks[4])
    wait_until(lambda: engine.cache.stats().writes_queued == 1, "the store does not go to disk")
    gate.open()
    settle(engine)
    assert plain.disk_bytes() <= 3 * CHUNK_BYTES
    plain.files.inject()
    clock.advance(HEALTH_BACKOFF_S_MAX)
    written(engine)
    settle(engine)
    assert plain.disk_bytes() == 3 * CHUNK_BYTES
