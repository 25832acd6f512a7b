"""Invalidation: at once, in every tier, and for good, whatever happens to the disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.constants import EPOCHS_WAIT_S_MAX, HEALTH_BACKOFF_S_MAX
from kvtier.errors import TierUnavailableError
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.testing.fault_files import FileGate, FileOperation
from kvtier.types import Miss, MissReason, Namespace, Tier
from tests.lib.cache_setup import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    CacheSetup,
    cache_setup,
    recovered,
    settle,
    tier_stats,
    written,
)

FIVE = range(5 * CHUNK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def stored(setup: CacheSetup, *, clock: FakeClock | None = None) -> EngineDouble:
    """An engine whose five chunks lie in both tiers."""
    engine = setup.open(clock=clock)
    engine.match(engine.sequence([]))
    engine.store(engine.sequence(FIVE))
    written(engine)
    return engine


def found(engine: EngineDouble) -> int:
    return engine.match(engine.sequence(FIVE)).tokens


def gate_the_open(setup: CacheSetup) -> FileGate:
    gate = FileGate(operations=(FileOperation.LIST,))
    setup.files.inject(gate)
    return gate


# While the cache lives


def test_b11_what_was_stored_before_is_unreachable_at_once(setup: CacheSetup) -> None:
    engine = stored(setup)
    begun_before = engine.sequence(FIVE)
    match = engine.match(begun_before)
    assert engine.cache.invalidate(NAMESPACE) == 1
    assert found(engine) == 0
    assert engine.match(begun_before).tokens == 0
    assert engine.begin_load(match) is None
    assert not engine.store(begun_before), "a sequence of old weights is not stored any more"
    settle(engine)
    assert engine.store(engine.sequence(FIVE))
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == 40


def test_other_namespaces_keep_theirs(setup: CacheSetup) -> None:
    engine = stored(setup)
    engine.cache.invalidate(Namespace("weights", LAYOUT, tenant_salt="other"))
    assert found(engine) == 40


def test_b11_a_load_under_way_comes_to_nothing(setup: CacheSetup) -> None:
    engine = stored(setup)
    loading = engine.begin_load(engine.match(engine.sequence(FIVE)))
    assert loading is not None
    plans = loading.load.poll()
    engine.cache.invalidate(NAMESPACE)
    assert loading.load.outcome is None, "the workers have not answered"
    for plan in plans:
        engine.run(plan)
    assert loading.outcome.end_token == 0
    assert loading.outcome.misses == (Miss(Tier.DRAM, MissReason.ABSENT, 40),)


def test_b11_a_store_under_way_is_not_found_afterwards(setup: CacheSetup) -> None:
    engine = setup.open()
    sequence = engine.sequence(FIVE)
    plan = engine.begin_store(sequence, range(5))
    assert plan is not None
    wait_until(lambda: not engine.cache.stats().degraded, "the disk does not open")
    engine.cache.invalidate(NAMESPACE)
    engine.run(plan)
    assert found(engine) == 0
    assert engine.match(sequence).tokens == 0
    written(engine)


def test_epochs_count_up(setup: CacheSetup) -> None:
    engine = stored(setup)
    assert [engine.cache.invalidate(NAMESPACE) for _ in range(3)] == [1, 2, 3]
    setup.close(engine)
    engine = setup.open()
    engine.match(engine.sequence([]))
    assert engine.cache.invalidate(NAMESPACE) == 4


def test_a_cache_without_a_disk_invalidates_too(setup: CacheSetup) -> None:
    engine = setup.open(disk_chunks=None)
    engine.store(engine.sequence(FIVE))
    engine.cache.invalidate(NAMESPACE)
    assert found(engine) == 0


# Over restarts


def test_b11_a_restart_does_not_bring_it_back(setup: CacheSetup) -> None:
    engine = stored(setup)
    engine.cache.invalidate(NAMESPACE)
    engine.store(engine.sequence(range(3 * CHUNK)))
    written(engine)
    setup.close(engine)
    engine = setup.open()
    match = engine.match(engine.sequence(FIVE))
    assert match.tokens == 3 * CHUNK, "what was stored since"
    assert engine.load(match).outcome.end_token == 3 * CHUNK


KILLED = """
import sys
from pathlib import Path
from tests.lib.cache_setup import CHUNK, NAMESPACE, CacheSetup, written

engine = CacheSetup(Path(sys.argv[1])).open()
engine.match(engine.sequence([]))
engine.store(engine.sequence(range(5 * CHUNK)))
written(engine)
engine.cache.invalidate(NAMESPACE)
print("invalidated", flush=True)
sys.stdin.read()
"""


def test_b11_kill_9_after_the_call_does_not_bring_it_back(setup: CacheSetup) -> None:
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(setup.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"invalidated\n"
        process.send_signal(signal.SIGKILL)
    assert len(setup.shard_files()) == 5
    engine = setup.open()
    assert found(engine) == 0
    settle(engine)


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "foreign"])
def test_b11_a_damaged_record_of_epochs_makes_everything_old(setup: CacheSetup, harm: str) -> None:
    engine = stored(setup)
    engine.cache.invalidate(Namespace("weights", LAYOUT, tenant_salt="other"))
    setup.close(engine)
    path = setup.folder / "disk" / "epochs"
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[-1] ^= 1
    elif harm == "cut":
        del data[-3:]
    path.write_bytes({"empty": b"", "foreign": b"x" * 100}.get(harm, bytes(data)))
    engine = setup.open()
    assert found(engine) == 0
    engine.store(engine.sequence(FIVE))
    written(engine)
    setup.close(engine)
    damaged = path.read_bytes()
    engine = setup.open()
    assert found(engine) == 40, "what was stored since outlives a restart"
    assert path.read_bytes() == damaged
    epoch = engine.cache.invalidate(NAMESPACE)
    assert epoch > 1
    setup.close(engine)
    engine = setup.open()
    assert found(engine) == 0


# While the disk is away


def test_b11_an_epoch_raised_before_the_disk_is_there_is_above_what_it_knew(
    setup: CacheSetup,
) -> None:
    """The disk knows epoch 2 and chunks of it; this process has seen nothing of that yet."""
    clock = FakeClock()
    engine = setup.open()
    assert found(engine) == 0
    engine.cache.invalidate(NAMESPACE)
    engine.cache.invalidate(NAMESPACE)
    engine.store(engine.sequence(FIVE))
    written(engine)
    setup.close(engine)

    disk, away = setup.folder / "disk", setup.folder / "away"
    disk.rename(away)
    disk.write_text("in the way")
    engine = setup.open(clock=clock)
    with pytest.raises(TierUnavailableError, match="kept in memory"):
        engine.cache.invalidate(NAMESPACE)
    disk.unlink()
    away.rename(disk)
    clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until(lambda: recovered(engine, clock), "the disk does not open")
    assert found(engine) == 0
    assert engine.cache.invalidate(NAMESPACE) == 4
    setup.close(engine)
    engine = setup.open()
    assert found(engine) == 0


def test_b11_an_epoch_raised_while_the_disk_opens_is_kept(setup: CacheSetup) -> None:
    setup.close(stored(setup))
    gate = gate_the_open(setup)
    engine = setup.open()
    gate.wait_for_arrivals()
    with pytest.raises(TierUnavailableError, match="kept in memory"):
        engine.cache.invalidate(NAMESPACE)
    gate.open()
    assert found(engine) == 0
    setup.close(engine)
    engine = setup.open()
    assert found(engine) == 0


def test_a_sequence_that_begins_while_the_disk_opens_finds_what_it_holds(
    setup: CacheSetup,
) -> None:
    """The first requests after a restart are those that a disk is for."""
    engine = stored(setup)
    engine.cache.invalidate(NAMESPACE)
    engine.store(engine.sequence(FIVE))
    written(engine)
    setup.close(engine)
    gate = gate_the_open(setup)
    engine = setup.open()
    sequence = engine.sequence(FIVE)
    gate.open()
    assert engine.load(engine.match(sequence)).outcome.tokens_by_tier == {Tier.DISK: 40}


def test_a_start_waits_only_so_long_for_the_epochs(setup: CacheSetup) -> None:
    """A pipe in the epochs' place, which nobody writes to, blocks whoever opens it."""
    (setup.folder / "disk").mkdir()
    epochs = setup.folder / "disk" / "epochs"
    os.mkfifo(epochs)
    before = SystemClock().now()
    engine = setup.open(pending_deadline_s=0.1)
    assert SystemClock().now() - before < 5 * EPOCHS_WAIT_S_MAX
    assert engine.store(engine.sequence(FIVE))
    assert found(engine) == 40
    writer = os.open(epochs, os.O_WRONLY | os.O_NONBLOCK)
    epochs.unlink()
    os.close(writer)
    written(engine)


def test_b11_an_epoch_that_could_not_be_written_is_written_later(setup: CacheSetup) -> None:
    clock = FakeClock()
    engine = stored(setup, clock=clock)
    # Whoever is root writes to read-only files too, but not to a directory.
    obstacle = setup.folder / "disk" / "epochs.new"
    obstacle.mkdir()
    with pytest.raises(TierUnavailableError, match="kept in memory"):
        engine.cache.invalidate(NAMESPACE)
    assert found(engine) == 0, "it holds for this process"
    obstacle.rmdir()
    clock.advance(HEALTH_BACKOFF_S_MAX)
    epochs = setup.folder / "disk" / "epochs"
    wait_until(epochs.exists, "the epoch is not written")
    wait_until(lambda: recovered(engine, clock), "the disk does not recover")
    shutil.copytree(setup.folder / "disk", setup.folder / "killed" / "disk")
    killed = CacheSetup(setup.folder / "killed")
    restarted = killed.open()
    assert found(restarted) == 0
    killed.close_all()


def test_b11_an_epoch_that_could_not_be_written_is_written_at_close(setup: CacheSetup) -> None:
    engine = stored(setup, clock=FakeClock())
    obstacle = setup.folder / "disk" / "epochs.new"
    obstacle.mkdir()
    with pytest.raises(TierUnavailableError):
        engine.cache.invalidate(NAMESPACE)
    wait_until(lambda: engine.cache.stats().degraded, "the failed save shows in no state")
    obstacle.rmdir()
    setup.close(engine)
    engine = setup.open()
    assert found(engine) == 0


def test_b11_an_epoch_is_never_written_to_another_disk(setup: CacheSetup) -> None:
    """The directory is unmounted and what lies beneath it takes writes; then it comes back."""
    clock = FakeClock()
    engine = stored(setup, clock=clock)
    away = setup.folder / "away"
    (setup.folder / "disk").rename(away)
    (setup.folder / "disk").mkdir()
    with pytest.raises(TierUnavailableError):
        engine.cache.invalidate(NAMESPACE)
    assert not (setup.folder / "disk" / "epochs").exists()
    shutil.rmtree(setup.folder / "disk")
    away.rename(setup.folder / "disk")
    clock.advance(HEALTH_BACKOFF_S_MAX)
    wait_until((setup.folder / "disk" / "epochs").exists, "the epoch is not written")
    wait_until(lambda: recovered(engine, clock), "the disk does not recover")
    setup.close(engine)
    engine = setup.open()
    assert found(engine) == 0


# While the disk opens


def test_b161_lookups_are_pending_while_the_disk_opens(setup: CacheSetup) -> None:
    clock = FakeClock()
    setup.close(stored(setup))
    gate = gate_the_open(setup)
    engine = setup.open(clock=clock, pending_deadline_s=2.0)
    sequence = engine.sequence(FIVE)
    for _ in range(3):
        pending = engine.cache.match(sequence)
        assert not hasattr(pending, "hits")
    assert tier_stats(engine.cache, Tier.DISK).state == "opening"
    clock.advance(2.0)
    match = engine.match(sequence)
    assert match.tokens == 0, "the disk is left out"
    engine.cache.note_admission(match, 0, 40)
    counters = {tier: tier_stats(engine.cache, tier).counters for tier in (Tier.DRAM, Tier.DISK)}
    assert counters[Tier.DRAM].miss_tokens == {MissReason.ABSENT: 40}
    assert counters[Tier.DISK].miss_tokens == {MissReason.UNAVAILABLE: 40}
    gate.open()
    wait_until(lambda: found(engine) == 40, "the disk does not open")
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == 40


def test_stores_and_loads_go_on_while_the_disk_opens(setup: CacheSetup) -> None:
    clock = FakeClock()
    gate = gate_the_open(setup)
    engine = setup.open(clock=clock, pending_deadline_s=1.0)
    clock.advance(1.0)
    sequence = engine.sequence(FIVE)
    assert engine.store(sequence)
    assert engine.load(engine.match(sequence)).outcome.tokens_by_tier == {Tier.DRAM: 40}
    gate.open()
    written(engine)
    assert tier_stats(engine.cache, Tier.DISK).chunks == 5
