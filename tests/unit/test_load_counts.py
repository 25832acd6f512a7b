"""What is counted of lookups and loads, and many threads that share a cache."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.testing.fault_files import FileFailure, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import (
    CHUNK,
    NAMESPACE,
    CacheSetup,
    cache_setup,
    idle,
    tier_stats,
    written,
)

FIVE = range(5 * CHUNK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


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
    engine = setup.on_disk(FIVE)
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
        # An assertion in a thread would go unheard.
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
