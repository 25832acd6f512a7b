"""Keeps a cache's measured costs beside its disk tier, without ever waiting for the disk."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvtier.cache.executor import Executor, Fault
from kvtier.cache.shapes import Shapes
from kvtier.cache.worth import cost_store
from kvtier.cache.worth.costs import Costs
from kvtier.config import CacheConfig
from kvtier.constants import COST_SAVE_S
from kvtier.interfaces import Clock
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.volume import Volume
from kvtier.types import Tier


class CostKeeper:
    """Reads once at the start, writes now and then and at the end, in the disk's own threads."""

    def __init__(
        self,
        costs: Costs,
        volume: Volume,
        executor: Executor,
        lock: threading.Lock,
        clock: Clock,
    ) -> None:
        """Keep it in the directory of ``volume``, once that is this process's."""
        self._costs = costs
        self._volume = volume
        self._path = Path(volume.files.root) / cost_store.FILE
        self._executor = executor
        self._lock = lock
        self._clock = clock
        self._saved_s = clock.now()
        self._saving = False

    def start(self) -> None:
        """Begin to read what was kept."""
        lane = self._volume.number
        work = partial(cost_store.load, self._path)
        self._executor.read(lane, work, self._adopt, deadline=math.inf, late=self._adopt)

    def tick(self) -> None:
        """Begin to write if it is time; under the lock."""
        now = self._clock.now()
        if self._saving or not self._volume.opened or now - self._saved_s < COST_SAVE_S:
            return
        self._saving, self._saved_s = True, now
        lane = self._volume.number
        self._executor.write(lane, self._save, self._saved, deadline=math.inf, late=self._saved)

    def finish(self, after: Callable[[], None]) -> Callable[[], None]:
        """Return ``after`` with the writing of what is known then before it."""

        def save_first() -> None:
            self._save()
            after()

        return save_first

    def _save(self) -> None:
        """Write; in the directory's writing thread."""
        with self._lock:
            kept = self._costs.kept()
        if self._volume.opened and self._volume.files.attached():
            cost_store.save(self._path, kept)

    def _adopt(self, outcome: cost_store.Kept | Fault) -> None:
        with self._lock:
            if isinstance(outcome, cost_store.Kept):
                self._costs.adopt(outcome)

    def _saved(self, outcome: Fault | None) -> None:
        del outcome  # What could not be written was logged.
        with self._lock:
            self._saving = False


def make_costs(
    config: CacheConfig,
    disk: DiskTier | None,
    lock: threading.Lock,
    clock: Clock,
    shapes: Shapes,
    executor: Executor,
) -> tuple[Costs, CostKeeper | None]:
    """Return what measures a cache, and with a disk what keeps that over a restart."""
    places = {Tier.REMOTE: " ".join(remote.url for remote in config.remotes)}
    if config.disk is not None:
        places[Tier.DISK] = " ".join(config.disk.paths)
    costs = Costs(lock, clock, shapes, places, worth=config.gpu_time_worth)
    if disk is None:
        return costs, None
    return costs, CostKeeper(costs, disk.volumes[0], executor, lock, clock)
