"""Opening the disk tier in the background, again and again until it works, and its upkeep."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

from kvtier.cache.epochs import Epochs
from kvtier.cache.executor import Executor, Fault
from kvtier.config import Durability
from kvtier.constants import EPOCHS_WAIT_S_MAX, GROUP_COMMIT_S
from kvtier.errors import TierUnavailableError
from kvtier.interfaces import Clock
from kvtier.obs.stats import TierCounters
from kvtier.tiers.disk.epoch_file import load_epochs, save_epochs
from kvtier.tiers.disk.shard_files import DirectoryLostError, Found, ShardFiles
from kvtier.tiers.disk.tier import DiskTier

_log = logging.getLogger("kvtier.disk")


class DiskOpener:
    """Brings the disk tier up and keeps its group commits. ``tick`` under the cache's lock."""

    def __init__(
        self,
        disk: DiskTier,
        files: ShardFiles,
        executor: Executor,
        lock: threading.Lock,
        counters: TierCounters,
        epochs: Epochs,
        clock: Clock,
        durability: Durability,
        on_open: Callable[[], None],
    ) -> None:
        """``on_open`` is called under the cache's lock each time the disk has come up."""
        self._disk = disk
        self._files = files
        self._executor = executor
        self._lock = lock
        self._counters = counters
        self._epochs = epochs
        self._clock = clock
        self._groups = durability is Durability.BATCH
        self._on_open = on_open
        self._saving = threading.Lock()
        self._epochs_known = threading.Event()
        self._busy = False
        self._next_commit = clock.now()

    def tick(self) -> None:
        """Start an open, a save of epochs or a group commit when one is due."""
        if self._busy:
            return
        if self._disk.open_due():
            self._busy = True
            self._executor.write(
                self._open, self._settle_open, deadline=math.inf, late=self._settle_open
            )
        elif self._disk.opened and self._epochs.unsaved and self._disk.writable():
            self._busy = True
            self._executor.write(
                self._save, self._settle_save, deadline=math.inf, late=self._settle_save
            )
        elif self._groups and self._disk.opened and self._clock.now() >= self._next_commit:
            self._busy = True
            self._executor.write(
                self._files.commit_group,
                self._settle_commit,
                deadline=math.inf,
                late=self._settle_commit,
            )

    def wait_for_epochs(self) -> None:
        """Block until the first open has read the epochs or failed, for a bounded time."""
        self._epochs_known.wait(EPOCHS_WAIT_S_MAX)

    def save_epochs(self) -> None:
        """Write the present epochs; blocks. Raises ``TierUnavailableError``."""
        with self._lock:
            opened = self._disk.opened
        if not opened:
            raise TierUnavailableError("the disk tier is not open; the epoch is kept in memory")
        try:
            self._save()
        except OSError as error:
            raise TierUnavailableError(f"the epoch is kept in memory: {error}") from error

    def close(self) -> None:
        """Make the last group and epoch durable and let go; after the executor has ended."""
        try:
            if self._groups:
                self._files.commit_group()
            if self._epochs.unsaved:
                self._save()
        except OSError as error:
            _log.warning("not everything was synced at the end: %s", error)
        self._files.close()

    def _save(self) -> None:
        # Not the cache's lock: that is never held over I/O. A later snapshot is never overtaken.
        with self._saving:
            with self._lock:
                epochs, floor = self._epochs.snapshot()
            if not self._files.attached():
                raise DirectoryLostError(self._files.root)
            save_epochs(self._files.root, epochs, floor)
            with self._lock:
                self._epochs.saved(epochs)

    def _open(self) -> Found:
        # Before the headers of all shards are read: sequences that begin meanwhile need the epoch.
        early = load_epochs(self._files.root)
        with self._lock:
            self._epochs.merge(early.epochs, early.floor)
        self._epochs_known.set()
        found = self._files.open()
        with self._saving:
            # Now nobody else writes here.
            stored = load_epochs(self._files.root)
            with self._lock:
                newer_here = self._epochs.merge(stored.epochs, stored.floor)
                epochs, floor = self._epochs.snapshot()
            if newer_here or stored.damaged:
                save_epochs(self._files.root, epochs, floor)
            with self._lock:
                self._epochs.saved(epochs)
        return found

    def _settle_open(self, outcome: Found | Fault) -> None:
        self._epochs_known.set()
        with self._lock:
            self._busy = False
            if isinstance(outcome, Found):
                self._counters.corrupt_shards += outcome.corrupt_count
                self._disk.adopt(outcome)
                _log.info("disk tier open: %d chunks", len(self._disk.index))
                self._on_open()
            else:
                self._disk.open_failed(outcome)

    def _settle_save(self, outcome: Fault | None) -> None:
        with self._lock:
            self._busy = False
            if outcome is not None:
                self._disk.write_failed(outcome)

    def _settle_commit(self, outcome: Fault | None) -> None:
        with self._lock:
            self._busy = False
            self._next_commit = self._clock.now() + GROUP_COMMIT_S
            if outcome is not None:
                self._disk.write_failed(outcome)
