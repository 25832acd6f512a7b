"""What a worker or a disk owes too late: the store is given up, the write is waited for apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import STORE_DEADLINE_S, WRITE_DEADLINE_S
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import CHUNK, CacheSetup, cache_setup, tier_stats, written


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def test_a_store_that_is_begun_too_late_is_given_up(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = setup.open(disk_chunks=None, clock=clock)
    sequence = engine.sequence(range(CHUNK))
    plan = engine.begin_store(sequence, range(1))
    assert plan is not None
    assert plan.deadline == clock.now() + STORE_DEADLINE_S
    clock.advance(STORE_DEADLINE_S)
    engine.run(plan)
    assert engine.match(sequence).tokens == 0
    dram = tier_stats(engine.cache, Tier.DRAM)
    assert (dram.used_bytes, dram.counters.refused_chunks) == (0, {MissReason.DEADLINE: 1})


def test_a_write_that_hangs_makes_the_disk_slow_until_it_ends(
    setup: CacheSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cache.below.writeout.WRITE_DEADLINE_S", WRITE_DEADLINE_S / 200)
    gate = FileGate(operations=(FileOperation.CREATE,), path="incoming")
    setup.files.inject(gate)
    engine = setup.open()
    sequence = engine.sequence(range(CHUNK))
    engine.store(sequence)
    wait_until(lambda: tier_stats(engine.cache, Tier.DISK).state == "slow", "nobody notices")
    assert engine.load(engine.match(sequence)).outcome.tokens_by_tier == {Tier.DRAM: CHUNK}
    gate.open()
    written(engine)
    disk = tier_stats(engine.cache, Tier.DISK)
    assert (disk.chunks, disk.state) == (1, "ok")


def test_a_close_waits_no_longer_than_it_may(setup: CacheSetup) -> None:
    """Not for a hanging index either, and the books are whole at the next start."""
    engine = setup.open()
    engine.store(engine.sequence(range(CHUNK)))
    written(engine)
    engine.match(engine.sequence(range(CHUNK)))
    gate = FileGate(operations=(FileOperation.APPEND,))
    setup.files.inject(gate)
    engine.store(engine.sequence(range(100, 100 + CHUNK)))
    gate.wait_for_arrivals()
    setup.engines.remove(engine)
    engine.close()
    started = time.monotonic()
    engine.cache.close(timeout_s=0.2)
    assert time.monotonic() - started < WRITE_DEADLINE_S / 2
    gate.open()
    setup.files.inject()
    engine = setup.open()
    sequence = engine.sequence(range(CHUNK))
    assert engine.load(engine.match(sequence)).outcome.end_token == CHUNK
