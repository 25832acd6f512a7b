"""A whole cache for thousands of random steps: what a load gives is right, in time, and all of it.

One seed decides everything; KVTIER_SEED replays a run and KVTIER_SCALE makes it longer. The
canaries at the end break one rule each and must be caught.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cache.load import Load
from kvtier.cache.plans import Answered, OpenPlans
from kvtier.cache.sequence import Sequence
from kvtier.cache.tenancy.roots import Roots
from kvtier.tiers.arrival import Arrival
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.tiers.index import Lease
from kvtier.tiers.remote.breaker import Breaker
from kvtier.types import Plan
from tests.lib.cache_simulation import CacheSimulation
from tests.lib.fresh_python import run_python
from tests.lib.soak_report import report
from tests.lib.virtual_time import virtual_time

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
STEPS = 1000
#: With a scale of 100 these are a thousand seeds and a million steps.
RUNS = 10
CANARY_RUNS = 20
#: What differs between two runs of one seed is seldom seen in all of them.
REPLAYED = 4
ABANDON = DramTier.abandon
#: What has to happen in some run, or the simulation proves nothing.
EVENTS = (
    "served",
    "stored",
    "loaded from dram",
    "loaded from disk",
    "loaded from remote",
    "missed: deadline",
    "missed: corrupt",
    "missed: cancelled",
    "missed: worker",
    "pending",
    "nested",
    "cancelled",
    "worker died",
    "worker failed",
    "invalidated",
    "removed",
    "spoiled",
    "disk failed",
    "remote lying",
    "remote hung",
    "encoded in a remote",
    "restart",
    "crash",
)


@pytest.fixture
def root() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="kvtier-simulation-", dir=MEMORY)
    yield made
    shutil.rmtree(made)


def run_one(root: str, seed: int, *, every_step: bool = False) -> CacheSimulation:
    with virtual_time(lambda _: 0.0) as world_time:
        simulation = CacheSimulation(
            tempfile.mkdtemp(dir=root), seed, world_time, every_step=every_step
        )
        try:
            simulation.run(STEPS)
        except AssertionError as error:
            error.add_note(f"simulation of seed {seed}: {simulation.swarm}")
            error.add_note(f"replay: run_one(root, {seed}, every_step={every_step})")
            raise
    return simulation


def run_all(root: str, seeds: range, *, every: int) -> Counter[str]:
    """Run one simulation per seed; the first ``every`` have every kind of tier and of step."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += run_one(root, seed, every_step=seed < seeds.start + every).seen
    return seen


def test_whatever_happens_loads_are_right_and_end_in_time(root: str, seed: int, scale: int) -> None:
    start = time.perf_counter()
    seen = run_all(root, range(seed, seed + RUNS * scale), every=3)
    assert not set(EVENTS) - set(seen), f"some things never happened: {seen}"
    seconds = time.perf_counter() - start
    steps = STEPS * RUNS * scale
    figures = {event.replace(": ", " ").replace(" ", "_"): seen[event] for event in EVENTS}
    report(
        "cache simulation",
        scale,
        seeds=RUNS * scale,
        steps=steps,
        steps_per_s=steps / seconds,
        **figures,
    )


@pytest.mark.parametrize("number", range(REPLAYED))
def test_a_day_replays(root: str, seed: int, number: int) -> None:
    first, again = (run_one(root, seed + number, every_step=True) for _ in range(2))
    assert first.seen == again.seen
    assert first.draws.getstate() == again.draws.getstate()


def told(root: str, seed: int) -> str:
    """Run a day; what came of it tells it from one that differs anywhere."""
    day = run_one(root, seed, every_step=True)
    return f"{sorted(day.seen.items())} {day.draws.random()}"


def test_a_day_replays_in_another_process(root: str, seed: int) -> None:
    """Where sets of bytes have another order, and the clocks say something else."""
    code = f"from {__name__} import told; print(told({root!r}, {seed}))"
    assert run_python(code) == told(root, seed)


def takes_anything(self: Arrival, step: Any) -> None:
    """Verify nothing."""
    del self, step


def answers_early(self: OpenPlans, plan: Plan, answered: Answered) -> None:
    """Take a plan for done as soon as it is made."""
    del self, plan
    answered(None)


def never_ends(self: Load) -> None:
    """Leave a load alone that nobody polls."""
    del self


def always_current(self: Roots, sequence: Sequence) -> bool:
    """Go on with a sequence of an epoch that is over."""
    del self, sequence
    return True


def gives_slots_away(self: DramTier, record: DramRecord) -> None:
    """Let go of what a late read still writes to."""
    ABANDON(self, record)
    self.index.unpin(record)
    self.index.pin(record)


def keeps_pins(self: Lease[Any]) -> None:
    """Release nothing."""
    del self


def stays_open(self: Breaker, *, probe: bool = False) -> None:
    """Never trust a remote again."""
    del self, probe


CANARIES: list[tuple[type, str, Callable[..., Any]]] = [
    (Arrival, "take", takes_anything),
    (OpenPlans, "open", answers_early),
    (Load, "keep_deadline", never_ends),
    (Roots, "current", always_current),
    (DramTier, "abandon", gives_slots_away),
    (Lease, "release", keeps_pins),
    (Breaker, "success", stays_open),
]


@pytest.mark.parametrize(("where", "name", "broken"), CANARIES)
def test_the_canary_dies(
    root: str,
    seed: int,
    where: type,
    name: str,
    broken: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, name, broken)
    with pytest.raises((AssertionError, KeyError)):
        run_all(root, range(seed, seed + CANARY_RUNS), every=CANARY_RUNS)
