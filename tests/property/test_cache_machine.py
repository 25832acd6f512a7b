"""A cache under everything at once: what a load says is valid is right, byte by byte.

The KV of a chunk follows from its key, so no model of what is held is needed: whatever comes must
be the pattern of its key, and nothing else may have been touched. How much comes is the cache's
affair; that it drains, keeps its books and never goes quiet is checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.config import WriteMode
from kvtier.constants import HEALTH_BACKOFF_S_MAX
from kvtier.errors import TierUnavailableError
from kvtier.obs.stats import TierCounters
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble, Loading, wait_until
from kvtier.testing.fault_files import (
    EVER,
    FileFailure,
    FileFault,
    FileOperation,
)
from kvtier.types import KVLayout, MissReason, Namespace, Plan, Result, Tier
from tests.lib.cache_setup import (
    CHUNK,
    LATENT,
    LAYOUT,
    SPLIT,
    WINDOWED,
    CacheSetup,
    ranks,
    settle,
    tier_stats,
)
from tests.lib.disk_faults import DISK_FAULTS

ENGINES = 3
#: How often a load is polled before it is taken to wait for another engine.
PATIENCE = 60
LAYOUTS: tuple[tuple[KVLayout, int], ...] = ((LAYOUT, 1), (WINDOWED, 1), (LATENT, 2), (SPLIT, 2))
FAULTS: dict[str, FileFault] = {
    **DISK_FAULTS,
    "rename": FileFailure(operations=(FileOperation.REPLACE,), nth=1),
    "remove": FileFailure(operations=(FileOperation.REMOVE,), last=EVER),
}
engines = st.integers(0, ENGINES - 1)
families = st.sampled_from([0, 0, 1, 2])


def prompt(family: int, branch: int, chunks: int) -> list[int]:
    """Prompts of a family share two chunks; those of a branch share all that both have."""
    shared = list(range(1000 * family, 1000 * family + 2 * CHUNK))
    own = range(1000 * family + 100 * (branch + 1), 1000 * family + 100 * (branch + 1) + 8 * CHUNK)
    return (shared + list(own))[: chunks * CHUNK]


@dataclass
class Work:
    """What one engine has under way: a load or a store, and plans that it has not executed."""

    loading: Loading | None = None
    store: Plan | None = None
    held: list[Plan] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Three engines on one cache."""

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        dram=st.integers(2, 8),
        disk=st.sampled_from([None, 3, 12]),
        mode=st.sampled_from(WriteMode),
    )
    def start(
        self, layout: tuple[KVLayout, int], dram: int, disk: int | None, mode: WriteMode
    ) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.setup = CacheSetup(Path(self.temporary.name))
        self.clock = FakeClock()
        self.shape = (layout, dram, disk, mode)
        self.seen: dict[Tier, TierCounters] = {}
        self.robbed = False
        self.open()
        for family in range(3):
            self.doubles[0].store(self.doubles[0].sequence(prompt(family, 0, 4)))

    def open(self) -> None:
        (layout, size), dram, disk, mode = self.shape
        self.namespace = Namespace("weights", layout)
        first = self.setup.open(
            layout,
            dram_chunks=dram,
            disk_chunks=disk,
            mode=mode,
            placements=ranks(size),
            clock=self.clock,
        )
        others = [
            EngineDouble(
                first.cache, first.namespace, placements=ranks(size), clock=self.clock, seed=seed
            )
            for seed in range(1, ENGINES)
        ]
        self.doubles = [first, *others]
        self.works = [Work() for _ in self.doubles]
        self.cache = first.cache
        self.seen.clear()

    @rule(
        engine=engines,
        family=families,
        branch=st.integers(0, 1),
        chunks=st.integers(1, 6),
        skip=st.sampled_from([0, 0, 0, 1, 3]),
        run=st.sampled_from([True, True, False]),
    )
    def store(
        self, engine: int, family: int, branch: int, chunks: int, skip: int, *, run: bool
    ) -> None:
        double, work = self.doubles[engine], self.works[engine]
        if work.loading is not None or work.store is not None:
            return
        sequence = double.sequence(prompt(family, branch, chunks))
        double.poison()
        work.store = double.begin_store(sequence, range(min(skip, chunks), chunks))
        if work.store is not None and run:
            double.run(work.store)
            work.store = None

    @rule(engine=engines, how=st.sampled_from(["run", "fail", "lose"]))
    def end_store(self, engine: int, how: str) -> None:
        double, work = self.doubles[engine], self.works[engine]
        if work.store is None:
            return
        plan, work.store = work.store, None
        if how == "run":
            double.run(plan)
        elif how == "fail":
            self.fail(plan)
        else:
            for place in double.ranks:
                if place.placement.worker in plan.workers:
                    self.lose_worker(place.placement.worker)
        assert self.cache.store_done(plan.plan_id)

    @rule(
        engine=engines,
        family=families,
        branch=st.integers(0, 1),
        chunks=st.integers(1, 6),
        start=st.sampled_from([0, 0, 1, 4]),
        blocks=st.sampled_from([12, 5, 2, 9]),
        drive=st.booleans(),
    )
    def load(
        self,
        engine: int,
        family: int,
        branch: int,
        chunks: int,
        start: int,
        blocks: int,
        *,
        drive: bool,
    ) -> None:
        double, work = self.doubles[engine], self.works[engine]
        if work.loading is not None or work.store is not None:
            return
        match = double.match(double.sequence(prompt(family, branch, chunks)))
        first = start * double.block_tokens
        tokens = range(first, first + blocks * double.block_tokens)
        work.loading = double.begin_load(match, tokens)
        if work.loading is not None and drive:
            self.drive(engine)

    @rule(engine=engines, how=st.sampled_from(["step", "hold", "cancel", "drive", "fail"]))
    def go_on(self, engine: int, how: str) -> None:
        double, work = self.doubles[engine], self.works[engine]
        if work.loading is None:
            return
        if how == "hold":
            work.held += work.loading.load.poll()
        elif how == "fail":
            for plan in [*work.held, *work.loading.load.poll()]:
                self.fail(plan)
            work.held.clear()
        elif how == "cancel":
            work.loading.load.cancel()
        elif how == "step":
            self.release(engine)
            double.step(work.loading)
        else:
            self.drive(engine)

    # No rule has a precondition: what a cache does depends on its threads, and what is drawn
    # next must not.
    @rule(fault=st.sampled_from(sorted(FAULTS)), heal=st.booleans())
    def harm(self, fault: str, *, heal: bool) -> None:
        self.setup.files.inject(*[] if heal else [FAULTS[fault]])
        if heal:
            self.clock.advance(HEALTH_BACKOFF_S_MAX)

    @rule(
        what=st.sampled_from(["wait", "wait", "remove", "spoil", "pass", "invalidate", "restart"]),
        number=st.integers(0, 50),
    )
    def upset(self, what: str, number: int) -> None:
        if what in {"remove", "spoil"}:
            self.harm_file(what, number)
        elif what == "pass":
            self.clock.advance((0.1, 6.0)[number % 2])
        elif what == "wait" and not any(work.loading or work.store for work in self.works):
            settle(self.doubles[0])
        elif what == "restart":
            self.close()
            self.open()
        elif what == "invalidate" and number % 3 == 0:
            self.invalidate()

    def harm_file(self, what: str, number: int) -> None:
        paths = self.setup.shard_files()
        if not paths:
            return
        path = paths[number % len(paths)]
        if what == "remove":
            path.unlink(missing_ok=True)
            self.robbed = True
            return
        # Never made anew: it may be unlinked at this moment.
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            file.seek(4096 + number * 60)
            file.write(b"spoiled")

    def invalidate(self) -> None:
        try:
            self.cache.invalidate(self.namespace)
        except TierUnavailableError:
            assert self.cache.stats().degraded

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        for tier in self.cache.stats().tiers:
            if tier.tier is Tier.DISK:
                wait_until(self.within_bound, "more lies on disk than its bound allows")
            before = self.seen.get(tier.tier, TierCounters())
            for each in dataclasses.fields(TierCounters):
                old, new = getattr(before, each.name), getattr(tier.counters, each.name)
                if isinstance(new, int):
                    assert old <= new, f"{each.name} went from {old} to {new}"
                elif isinstance(new, Counter):
                    assert all(count <= new[reason] for reason, count in old.items())
            self.seen[tier.tier] = tier.counters

    def within_bound(self) -> bool:
        """A file that moves while the folders are listed may be counted twice: ask again."""
        return self.setup.disk_bytes() <= tier_stats(self.cache, Tier.DISK).capacity_bytes

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.setup.files.inject()
        self.clock.advance(HEALTH_BACKOFF_S_MAX)
        self.finish_all()
        if self.shape[2] is not None and not self.robbed:
            wait_until(self.disk_is_told, "what is told of the disk is not what lies there")
        self.close()
        self.temporary.cleanup()

    def disk_is_told(self) -> bool:
        self.clock.advance(1.0)
        return tier_stats(self.cache, Tier.DISK).used_bytes == self.setup.disk_bytes()

    def close(self) -> None:
        """Let everything end, look that nothing is pinned, and close."""
        self.finish_all()
        for double in self.doubles[1:]:
            double.close()
        self.setup.close(self.doubles[0], timeout_s=2.0)

    def finish_all(self) -> None:
        for engine, work in enumerate(self.works):
            if work.loading is not None:
                self.drive(engine)
            if work.store is not None:
                self.fail(work.store)
                work.store = None

    def drive(self, engine: int) -> None:
        """End an engine's load and check every byte of its pools."""
        double, work = self.doubles[engine], self.works[engine]
        loading, work.loading = work.loading, None
        assert loading is not None
        self.release(engine)
        tries = iter(range(PATIENCE))
        wait_until(lambda: double.step(loading) or next(tries, None) is None, "a load hangs")
        if loading.load.outcome is None:
            # It waits for room that another engine's store holds, until its deadline.
            self.clock.advance(5.0)
        double.drive(loading)
        double.check(loading)

    def release(self, engine: int) -> None:
        """Execute the plans that were held back."""
        work = self.works[engine]
        for plan in work.held:
            self.doubles[engine].execute(plan)
        work.held.clear()

    def fail(self, plan: Plan) -> None:
        self.cache.finish(
            Result(plan.plan_id, worker, ok=False, reason=MissReason.WORKER)
            for worker in plan.workers
        )

    def lose_worker(self, worker: int) -> None:
        """A worker dies, with all that it owes to anyone, and another takes its place."""
        for double, work in zip(self.doubles, self.works, strict=True):
            work.held.clear()
            double.replace_worker(worker)
        self.cache.lose_worker(worker)


TestCacheMachine = CacheMachine.TestCase
EXAMPLES = settings.default.max_examples * 2 // 5 if settings.default else 40
TestCacheMachine.settings = settings(stateful_step_count=30, max_examples=EXAMPLES)
