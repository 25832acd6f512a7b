"""A load comes up while its engine computes, which may take seconds between two polls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.constants import LOAD_CHUNKS_INFLIGHT_MAX
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import (
    CHUNK,
    CHUNK_BYTES,
    CacheSetup,
    begun,
    cache_setup,
    pins,
    settle,
    tier_stats,
)

#: More than is on its way at a time.
MANY = range((LOAD_CHUNKS_INFLIGHT_MAX + 4) * CHUNK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def test_a_load_that_is_not_polled_comes_up_whole(setup: CacheSetup) -> None:
    engine = setup.on_disk(MANY)
    loading = begun(engine, MANY)
    wait_until(
        lambda: tier_stats(engine.cache, Tier.DRAM).chunks == len(MANY) // CHUNK,
        "only a poll brings it up",
    )
    assert loading.load.outcome is None
    engine.drive(loading)
    engine.check(loading)
    assert loading.outcome.tokens_by_tier == {Tier.DISK: len(MANY)}


def test_no_more_of_it_waits_in_dram_than_is_allowed(
    setup: CacheSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a gibibyte would be ``LOAD_BYTES_AHEAD``; here it is four chunks."""
    monkeypatch.setattr("kvtier.cache.load.LOAD_BYTES_AHEAD", 4 * CHUNK_BYTES)
    many = range(20 * CHUNK)
    engine = setup.on_disk(many, dram_chunks=32)
    loading = begun(engine, many)
    limit = 4 + LOAD_CHUNKS_INFLIGHT_MAX
    wait_until(lambda: tier_stats(engine.cache, Tier.DRAM).chunks == limit, "too few come up")
    assert pins(engine)[0] == limit, "no other one has been begun"
    engine.drive(loading)
    engine.check(loading)


def test_one_that_is_cancelled_brings_nothing_more(setup: CacheSetup) -> None:
    engine = setup.on_disk(MANY)
    gate = FileGate(operations=(FileOperation.READ,))
    setup.files.inject(gate)
    loading = begun(engine, MANY)
    gate.wait_for_arrivals()
    loading.load.cancel()
    gate.open()
    engine.drive(loading)
    settle(engine)
    assert loading.outcome.misses[0].reason is MissReason.CANCELLED
    assert tier_stats(engine.cache, Tier.DRAM).chunks <= LOAD_CHUNKS_INFLIGHT_MAX


def test_one_that_is_overdue_blames_no_tier_for_what_it_would_begin(setup: CacheSetup) -> None:
    engine = setup.on_disk(MANY)
    reads = setup.files.count(FileOperation.READ)
    loading = begun(engine, MANY, deadline=SystemClock().now())
    assert pins(engine) == (0, len(MANY) // CHUNK), "room was made in DRAM for what is too late"
    engine.drive(loading)
    assert [miss.reason for miss in loading.outcome.misses] == [MissReason.DEADLINE]
    settle(engine)
    assert setup.files.count(FileOperation.READ) == reads
    assert tier_stats(engine.cache, Tier.DISK).state == "ok"
