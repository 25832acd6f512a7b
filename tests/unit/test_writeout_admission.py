"""What is worth a write: admissions and budgets under a cache, and how accesses reach them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache.below import disk_choices
from kvtier.cache.below import opener as opener_module
from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, DiskConfig, Durability, WriteMode
from kvtier.constants import SWEEP_LOCK_FILES, USED_NOTE_S
from kvtier.interfaces import Clock
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.tiers.disk.files import FileInfo
from kvtier.tiers.disk.tier import DiskTier
from kvtier.types import ChunkKey, Entry, Features, Hint, MissReason, Result, Tier
from tests.lib.cache_setup import (
    BLOCK,
    CHUNK,
    CHUNK_BYTES,
    NAMESPACE,
    CacheSetup,
    cache_setup,
    settle,
    tier_stats,
    written,
)

DAY_S = 86_400
BURST_S = 600


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def open_with(
    setup: CacheSetup,
    admission: str,
    *,
    bytes_per_day: int = 0,
    clock: Clock | None = None,
    dram_chunks: int = 32,
    disk_chunks: int = 64,
) -> EngineDouble:
    """Open a cache whose disk takes what an admission says, and wait until it is open."""
    disk = DiskConfig(
        str(setup.folder / "disk"),
        disk_chunks * CHUNK_BYTES,
        Durability.NONE,
        WriteMode.THROUGH,
        admission=admission,
        write_bytes_per_day=bytes_per_day,
    )
    config = CacheConfig(dram_bytes=dram_chunks * CHUNK_BYTES, disk=disk, slab_bytes=4096)
    cache = Cache(config, clock=clock, files=setup.files)
    engine = EngineDouble(cache, NAMESPACE, block_tokens=BLOCK, clock=clock)
    setup.engines.append(engine)
    wait_until(lambda: not cache.stats().degraded, "the disk does not open")
    return engine


def on_disk(engine: EngineDouble) -> int:
    written(engine)
    settle(engine)
    return tier_stats(engine.cache, Tier.DISK).chunks


def ask(engine: EngineDouble, tokens: range) -> None:
    """One request: looked up, admitted, loaded."""
    match = engine.match(engine.sequence(tokens))
    engine.cache.note_admission(match, 0, len(tokens))
    engine.load(match)


class Recording:
    """An ``AdmissionPolicy`` that writes down what it is told and says what it is told to say."""

    def __init__(self) -> None:
        self.answer = False
        self.told: list[tuple[str, ChunkKey]] = []
        self.features: list[Features] = []

    def load(self, name: str) -> Recording:
        """Stand in for the registry."""
        assert name == "recording"
        return self

    def __call__(self, capacity_bytes: int) -> Recording:
        assert capacity_bytes == 64 * CHUNK_BYTES
        return self

    def offer(self, entry: Entry, now: float) -> bool:
        del now
        self.told.append(("offer", entry.key))
        self.features.append(entry.features)
        return self.answer

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        del now
        self.told.append(("touch", key))
        self.features.append(features)

    def left(self, key: ChunkKey, now: float) -> None:
        del now
        self.told.append(("left", key))

    def take(self) -> list[tuple[str, ChunkKey]]:
        """Return what was told since the last call."""
        told, self.told = self.told, []
        return told


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    made = Recording()
    monkeypatch.setattr(disk_choices, "admissions", made)
    return made


# How accesses reach an admission


def test_each_access_to_what_is_not_on_disk_is_an_offer_parents_first(
    setup: CacheSetup, recording: Recording
) -> None:
    engine = open_with(setup, "recording")
    tokens = range(3 * CHUNK)
    keys = engine.sequence(tokens).chunk_keys
    engine.store(engine.sequence(tokens))
    assert recording.take() == [("offer", key) for key in keys]
    assert on_disk(engine) == 0
    ask(engine, tokens)
    assert recording.take() == [("offer", key) for key in keys]
    assert on_disk(engine) == 0
    recording.answer = True
    ask(engine, tokens)
    assert recording.take() == [("offer", key) for key in keys]
    assert on_disk(engine) == 3
    ask(engine, tokens)
    assert recording.take() == [("touch", key) for key in keys]
    assert on_disk(engine) == 3


def test_a_request_is_one_access_however_often_it_is_noted(
    setup: CacheSetup, recording: Recording
) -> None:
    engine = open_with(setup, "recording")
    tokens = range(2 * CHUNK)
    engine.store(engine.sequence(tokens))
    recording.take()
    match = engine.match(engine.sequence(tokens))
    engine.cache.note_admission(match, 0, len(tokens))
    assert len(recording.take()) == 2
    engine.cache.note_admission(match, 0, len(tokens))
    engine.load(match)
    engine.load(engine.match(match.sequence))
    assert recording.take() == []
    engine.load(engine.match(engine.sequence(tokens)))
    assert len(recording.take()) == 2, "another request"


def test_a_lookup_is_no_access(setup: CacheSetup, recording: Recording) -> None:
    engine = open_with(setup, "recording")
    engine.store(engine.sequence(range(CHUNK)))
    recording.take()
    for _ in range(3):
        assert engine.match(engine.sequence(range(CHUNK))).tokens == CHUNK
    assert recording.take() == []


def test_an_offer_has_the_features_of_its_access(setup: CacheSetup, recording: Recording) -> None:
    engine = open_with(setup, "recording")
    engine.store(engine.sequence(range(CHUNK)))
    features = Features(turn=4, hint=Hint.WILL_CONTINUE)
    sequence = engine.cache.sequence(NAMESPACE, features=features)
    sequence.append(list(range(CHUNK)))
    engine.load(engine.match(sequence))
    assert recording.features == [Features(), features]


def test_what_the_disk_gives_up_or_refuses_has_left(
    setup: CacheSetup, recording: Recording
) -> None:
    recording.answer = True
    engine = open_with(setup, "recording")
    sequence = engine.sequence(range(2 * CHUNK))
    first = engine.begin_store(sequence, range(1))
    rest = engine.begin_store(sequence, range(1, 2))
    assert first is not None
    assert rest is not None
    engine.run(rest)
    failed = Result(first.plan_id, 0, ok=False, reason=MissReason.WORKER)
    engine.cache.finish([failed])
    assert on_disk(engine) == 0
    child = sequence.chunk_keys[1]
    assert recording.take() == [("offer", child), ("left", child)], "its parent is not there"
    for number in range(1, 66):
        engine.store(engine.sequence(range(1000 * number, 1000 * number + CHUNK)))
        written(engine)
    oldest = engine.sequence(range(1000, 1000 + CHUNK)).chunk_keys[0]
    assert ("left", oldest) in recording.take()


# Second touch, budgets


def test_only_what_is_asked_for_again_is_written(setup: CacheSetup) -> None:
    engine = open_with(setup, "second-touch")
    for start in (0, 1000, 2000):
        engine.store(engine.sequence(range(start, start + 2 * CHUNK)))
    assert on_disk(engine) == 0
    ask(engine, range(1000, 1000 + 2 * CHUNK))
    assert on_disk(engine) == 2
    assert tier_stats(engine.cache, Tier.DISK).counters.written_bytes == 2 * CHUNK_BYTES
    setup.close(engine)
    engine = open_with(setup, "second-touch")
    assert engine.match(engine.sequence(range(1000, 1000 + 2 * CHUNK))).tokens == 2 * CHUNK
    assert engine.match(engine.sequence(range(2 * CHUNK))).tokens == 0


def test_what_was_read_from_disk_is_not_written_again(setup: CacheSetup) -> None:
    engine = open_with(setup, "everything")
    engine.store(engine.sequence(range(2 * CHUNK)))
    assert on_disk(engine) == 2
    setup.close(engine)
    engine = open_with(setup, "everything")
    for _ in range(3):
        ask(engine, range(2 * CHUNK))
    assert on_disk(engine) == 2
    assert tier_stats(engine.cache, Tier.DISK).counters.written_bytes == 0


def test_a_budget_bounds_what_is_written(setup: CacheSetup) -> None:
    """A burst of four chunks, then one in each hundred and fifty seconds."""
    clock = FakeClock()
    per_day = 4 * CHUNK_BYTES * DAY_S // BURST_S
    engine = open_with(setup, "everything", bytes_per_day=per_day, clock=clock)
    for start in range(10):
        engine.store(engine.sequence(range(1000 * start, 1000 * start + CHUNK)))
    assert on_disk(engine) == 4
    for start in range(10):
        ask(engine, range(1000 * start, 1000 * start + CHUNK))
    assert on_disk(engine) == 4
    clock.advance(2 * BURST_S / 4 + 1)
    for start in range(10):
        ask(engine, range(1000 * start, 1000 * start + CHUNK))
    assert on_disk(engine) == 6
    assert tier_stats(engine.cache, Tier.DISK).counters.written_bytes == 6 * CHUNK_BYTES


# The index at rest under a cache


def test_accesses_outlive_a_close_and_are_noted_meanwhile(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = open_with(setup, "everything", clock=clock)
    for start in range(6):
        engine.store(engine.sequence(range(1000 * start, 1000 * start + CHUNK)))
        written(engine)
    settle(engine)
    before = tier_stats(engine.cache, Tier.DISK).index_bytes
    ask(engine, range(CHUNK))
    settle(engine)
    assert tier_stats(engine.cache, Tier.DISK).index_bytes == before, "not for each access"
    clock.advance(USED_NOTE_S)
    wait_until(lambda: tier_stats(engine.cache, Tier.DISK).index_bytes > before, "it is not noted")
    ask(engine, range(1000, 1000 + CHUNK))
    setup.close(engine)
    engine = open_with(setup, "everything", disk_chunks=2)
    held = [
        start
        for start in range(6)
        if engine.match(engine.sequence(range(1000 * start, 1000 * start + CHUNK))).hits
    ]
    assert held == [0, 1], "those that were used last"


def test_a_sweep_asks_a_few_files_at_a_time(
    setup: CacheSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question holds the cache's lock."""
    engine = open_with(setup, "everything")
    for start in range(7):
        engine.store(engine.sequence(range(1000 * start, 1000 * start + CHUNK)))
    assert on_disk(engine) == 7
    setup.close(engine)
    assert SWEEP_LOCK_FILES > 3
    monkeypatch.setattr(opener_module, "SWEEP_LOCK_FILES", 3)
    asked: list[int] = []
    unknown = DiskTier.unknown

    def counted(self: DiskTier, number: int, files: list[FileInfo]) -> list[FileInfo]:
        asked.append(len(files))
        return unknown(self, number, files)

    monkeypatch.setattr(DiskTier, "unknown", counted)
    engine = open_with(setup, "everything")
    wait_until(lambda: sum(asked) == 7, "the directory is not swept")
    assert asked == [3, 3, 1]
