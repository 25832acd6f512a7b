"""DRAM and disk together, for thousands of random steps: what is held is right, or it is a miss.

One seed decides everything; KVTIER_SEED replays a run and KVTIER_SCALE makes it longer. The
canaries at the end break one rule each and must be caught.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.policies.lru import LRU
from kvtier.tiers.disk.journal import Changes, Journal
from kvtier.tiers.disk.tier import DiskRecord, DiskTier, PolicyFactory
from kvtier.types import ChunkKey, Entry
from tests.lib.soak_report import report
from tests.lib.tier_simulation import Simulation

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
STEPS = 1000
#: With a scale of 20 these are a thousand seeds and a million steps.
RUNS = 50
CANARY_RUNS = 12
#: What has to happen in some run, or the simulation proves nothing.
EVENTS = (
    "evicted from dram",
    "evicted from disk",
    "no room in dram",
    "not admitted",
    "written",
    "write failed",
    "filled",
    "corrupt",
    "read failed",
    "restart",
    "crash",
    "index lost",
    "cold",
    "displaced",
    "in quarantine",
)


@pytest.fixture
def root() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="kvtier-simulation-", dir=MEMORY)
    yield made
    shutil.rmtree(made)


def run_all(root: str, seeds: range, policy: PolicyFactory | None = None) -> Counter[str]:
    """Run one simulation per seed; the first one has every kind of step."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        folder = tempfile.mkdtemp(dir=root)
        every = seed == seeds.start
        simulation = Simulation(folder, seed, policy, every_step=every)
        try:
            simulation.run(STEPS)
        except AssertionError as error:
            error.add_note(f"simulation of seed {seed}: {simulation.swarm}")
            error.add_note(f"replay: Simulation(folder, {seed}, every_step={every}).run({STEPS})")
            raise
        shutil.rmtree(folder)
        seen += simulation.seen
    return seen


def test_b43_tiers_hold_what_they_say_whatever_happens(root: str, seed: int, scale: int) -> None:
    start = time.perf_counter()
    seen = run_all(root, range(seed, seed + RUNS * scale))
    assert not set(EVENTS) - set(seen), f"some things never happened: {seen}"
    seconds = time.perf_counter() - start
    figures = {event.replace(" ", "_"): seen[event] for event in EVENTS}
    report(
        "tier simulation",
        scale,
        seeds=RUNS * scale,
        steps=STEPS * RUNS * scale,
        steps_per_s=STEPS * RUNS * scale / seconds,
        **figures,
    )


def test_a_seed_replays(root: str, seed: int) -> None:
    first, again = (Simulation(tempfile.mkdtemp(dir=root), seed, every_step=True) for _ in range(2))
    first.run(STEPS)
    again.run(STEPS)
    assert first.seen == again.seen
    assert first.draws.getstate() == again.draws.getstate()


class EvictsPinned(LRU):
    def __init__(self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]) -> None:
        del pinned
        super().__init__(capacity_bytes, lambda _: False)


class NeverForgets(LRU):
    def remove(self, key: ChunkKey) -> None:
        del key


class AnyOrder(LRU):
    """Evicts a parent before its children."""

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        return super().admit(Entry(entry.key, None, entry.nbytes, 0), now)


class NamesTwice(LRU):
    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        victims = super().admit(entry, now)
        return victims * 2 if victims else victims


@pytest.mark.parametrize("policy", [EvictsPinned, NeverForgets, AnyOrder, NamesTwice])
def test_the_canary_policy_dies(root: str, seed: int, policy: type[LRU]) -> None:
    with pytest.raises(AssertionError):
        run_all(root, range(seed, seed + CANARY_RUNS), policy)


def test_the_canary_index_dies(root: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index at rest that forgets removals names chunks without files, or has no room."""
    append = Journal.append

    def forgetful(self: Journal, changes: Changes) -> None:
        append(self, replace(changes, removed=()))

    monkeypatch.setattr(Journal, "append", forgetful)
    with pytest.raises(AssertionError, match=r"has no files|not found again"):
        run_all(root, range(seed, seed + CANARY_RUNS))


def test_the_canary_tier_dies(root: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that lets readers have what is only being written."""
    ready = DiskTier.ready

    def careless(self: DiskTier, key: ChunkKey) -> DiskRecord | None:
        return ready(self, key) or self.index.get(key)

    monkeypatch.setattr(DiskTier, "ready", careless)
    with pytest.raises(AssertionError, match="may be read"):
        run_all(root, range(seed, seed + CANARY_RUNS))


def test_the_canary_sweep_dies(root: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that finds nothing loses what was written while the index was not."""
    monkeypatch.setattr(DiskTier, "take_in", lambda *_: None)
    with pytest.raises(AssertionError):
        run_all(root, range(seed, seed + CANARY_RUNS))
