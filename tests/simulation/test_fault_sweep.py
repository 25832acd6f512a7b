"""One scripted day, again and again: each time another call of a disk, remote or worker fails.

Whichever it is, once or from then on: nothing wrong is loaded, every load ends in time, nothing is
left over, and every tier is well again afterwards. Swept as SQLite does it, see "How SQLite Is
Tested", section "Anomaly tests".
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config import WriteMode
from kvtier.errors import ConnectorError, ConnectorTimeoutError
from kvtier.testing.fault_files import EVER, FileFailure, FileOperation
from kvtier.types import Tier
from tests.lib.cache_simulation import CacheSimulation
from tests.lib.cache_world import CHUNK, NAMESPACES, World, prompt
from tests.lib.simulation_swarm import CacheSwarm, RemoteSwarm
from tests.lib.soak_report import report
from tests.lib.virtual_time import VirtualTime, virtual_time

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
SERVED_S = 60.0
#: Of so many calls one is made to fail in a run of normal size; a soak sweeps all of them.
STRIDES = {"disk": 8, "remote": 4, "worker": 2}
SWARM = CacheSwarm(
    workers=2,
    dram_chunks=6,
    directories=1,
    disk_chunks=12,
    disk_mode=WriteMode.THROUGH,
    byte_codec=None,
    policy="lru",
    admission="everything",
    remotes=(
        RemoteSwarm(
            capacity_chunks=0,
            ttl_s=0.5,
            absent_s=0.05,
            mode=WriteMode.THROUGH,
            connections=2,
            deadline_s=0.2,
            byte_codec="zstd",
        ),
    ),
    namespaces=NAMESPACES[:1],
    weights={},
)


class Script(CacheSimulation):
    """A day on which every tier is used: stores, evictions, a restart, loads from each tier."""

    def __init__(self, root: str, world_time: VirtualTime) -> None:
        self.calls = self.plans_done = 0
        self.fail_at = self.failing_plans = range(0)
        super().__init__(root, 1, world_time, swarm=SWARM)
        self.remotes[0].fail = self.remote_call

    def remote_call(self, operation: str) -> ConnectorError | None:
        """Count a call of the remote; fail it if it is its turn."""
        self.calls += 1
        if self.calls in self.fail_at:
            return ConnectorTimeoutError(f"{operation} on purpose")
        return None

    def open(self) -> World:
        world = super().open()
        world.fails = self.plan
        world.weighs = lambda: False
        world.patience_s = lambda: 2.0
        return world

    def meanwhile(self) -> None:
        """Do nothing while a thread reads."""

    def close_s(self) -> float:
        return 5.0

    def heal(self) -> None:
        super().heal()
        self.fail_at = self.failing_plans = range(0)

    def plan(self) -> bool:
        """Count a rank's plan; tell whether it fails."""
        self.plans_done += 1
        return self.plans_done in self.failing_plans

    def serve(self, family: int, chunks: int = 4, start_token: int = 0) -> None:
        """Serve one request to its end."""
        self.world.arrive(NAMESPACES[0], prompt(family, 0, chunks), start_token)

        def served() -> bool:
            self.engine()
            self.check()
            return not self.world.requests

        assert self.time.loop.pump(served, SERVED_S), "a request does not end"

    def day(self) -> None:
        self.serve(0)
        self.serve(0, 5, CHUNK // 2)
        self.serve(1)
        self.serve(2)
        self.serve(0, 6)
        self.restart()
        self.serve(0, 6)
        self.serve(2)
        self.invalidate()
        self.serve(0)
        self.swarm = replace(self.swarm, directories=0)  # The machine is another one.
        self.restart()
        for family in (0, 1, 2):
            self.serve(family)
        self.finish()


@pytest.fixture
def root() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="kvtier-sweep-", dir=MEMORY)
    yield made
    shutil.rmtree(made)


def run(
    root: str, *, disk: int = 0, remote: int = 0, worker: int = 0, ever: bool = False
) -> Script:
    """Live the day with one fault, or with one that stays."""
    with virtual_time(lambda _: 0.0) as world_time:
        script = Script(tempfile.mkdtemp(dir=root), world_time)
        if disk:
            last = EVER if ever else None
            every = tuple(FileOperation)
            script.files.inject(FileFailure(operations=every, nth=disk, last=last))
        if remote:
            script.fail_at = range(remote, remote + (10**9 if ever else 1))
        if worker:
            script.failing_plans = range(worker, worker + (10 if ever else 1))
        with script.listening():
            script.day()
    return script


def test_the_day_uses_every_tier(root: str) -> None:
    seen = run(root).seen
    for tier in (Tier.DRAM, Tier.DISK, Tier.REMOTE):
        assert seen[f"loaded from {tier}"], f"nothing came from {tier}: {seen}"
    assert not any(event.startswith("missed: ") for event in seen), seen


@pytest.mark.parametrize("ever", [False, True])
@pytest.mark.parametrize("kind", ["disk", "remote", "worker"])
def test_whichever_call_fails_the_day_goes_well(
    root: str, kind: str, scale: int, *, ever: bool
) -> None:
    start = time.perf_counter()
    whole = run(root)
    total = {
        "disk": len(whole.files.calls),
        "remote": whole.calls,
        "worker": whole.plans_done,
    }[kind]
    assert total > 20, "the day does too little"
    step = STRIDES[kind] if scale == 1 else 1
    failed = range(1, total + 1, step)
    for nth in failed:
        try:
            if kind == "disk":
                run(root, disk=nth, ever=ever)
            elif kind == "remote":
                run(root, remote=nth, ever=ever)
            else:
                run(root, worker=nth, ever=ever)
        except AssertionError as error:
            error.add_note(f"{kind} call {nth} of {total} failed" + (", and all after" * ever))
            raise
    seconds = time.perf_counter() - start
    name = f"fault sweep, {kind}, " + ("from the nth on" if ever else "the nth alone")
    report(name, scale, calls=total, runs=len(failed), runs_per_s=len(failed) / seconds)
