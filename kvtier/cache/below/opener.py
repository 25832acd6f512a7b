"""Opening a directory of the disk tier, again and again until it works, and its upkeep."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

from kvtier.cache.executor import Executor, Fault
from kvtier.cache.tenancy.epochs import Epochs
from kvtier.cache.tenancy.roots import RootRow, Roots
from kvtier.config import Durability
from kvtier.constants import EPOCHS_WAIT_S_MAX, GROUP_COMMIT_S, ROOTS_SAVE_S, SWEEP_LOCK_FILES
from kvtier.errors import DeadlineError, TierUnavailableError
from kvtier.interfaces import Clock
from kvtier.obs.stats import TierCounters
from kvtier.tiers.disk.cold import ColdTable
from kvtier.tiers.disk.epoch_file import load_epochs, save_epochs
from kvtier.tiers.disk.files import FileInfo
from kvtier.tiers.disk.root_file import load_roots, save_roots
from kvtier.tiers.disk.scan import Scanned
from kvtier.tiers.disk.shard_files import DirectoryLostError, Found
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.volume import Volume

_log = logging.getLogger("kvtier.disk")


class VolumeOpener:
    """Brings one directory up and keeps it in order. ``tick`` under the cache's lock.

    One thing at a time, the most urgent first: open, epochs, after an open a sweep for files that
    the index at rest did not know, group commit. Beside these a probe where reads have failed.
    """

    def __init__(
        self,
        disk: DiskTier,
        volume: Volume,
        executor: Executor,
        lock: threading.Lock,
        counters: TierCounters,
        epochs: Epochs,
        roots: Roots,
        clock: Clock,
        durability: Durability,
        on_open: Callable[[], None],
    ) -> None:
        """``on_open`` is called under the cache's lock each time the directory has come up."""
        self._disk = disk
        self._volume = volume
        self._files = volume.files
        self._executor = executor
        self._lock = lock
        self._counters = counters
        self._epochs = epochs
        self._roots = roots
        self._clock = clock
        self._groups = durability is Durability.BATCH
        self._on_open = on_open
        self._saving = threading.Lock()
        self._epochs_known = threading.Event()
        self._busy = False
        self._probing = False
        self._next_commit = clock.now()
        self._next_roots = clock.now()
        self._unswept: list[str] = []

    def tick(self) -> None:
        """Start what is due."""
        volume = self._volume
        self._disk.trim()
        for blame in tuple(volume.overdue):  # One that hangs for ever has no end to tell it.
            blame()
        if self._busy:
            return
        if volume.open_due:
            self._write(self._open, self._settle_open)
        elif volume.opened and self._epochs.unsaved(volume.number) and volume.writable:
            self._write(self._save, self._settle_save)
        elif volume.writable and self._unswept:
            self._write(self._sweep, self._settle_sweep)
        elif volume.writable and self._roots_due():
            self._write(self._save_roots, self._settle_save)
        elif self._groups and volume.opened and self._clock.now() >= self._next_commit:
            self._write(self._files.commit_group, self._settle_commit)
        elif volume.read_probe_due and not self._probing:
            self._probing = True
            deadline = self._clock.now() + EPOCHS_WAIT_S_MAX
            probe, settle = self._files.probe, self._settle_probe
            self._executor.read(volume.number, probe, settle, deadline=deadline, late=settle)

    def wait_for_epochs(self) -> None:
        """Block until the first open has read the epochs or failed, for a bounded time."""
        self._epochs_known.wait(EPOCHS_WAIT_S_MAX)

    def save_epochs(self) -> None:
        """Write the present epochs; blocks. Raises ``TierUnavailableError``."""
        with self._lock:
            opened = self._volume.opened
        if not opened:
            raise TierUnavailableError("the disk tier is not open; the epoch is kept in memory")
        try:
            self._save()
        except OSError as error:
            raise TierUnavailableError(f"the epoch is kept in memory: {error}") from error

    def finish(self) -> None:
        """Make the last epochs, chores and group durable; in the writing thread, as its last."""
        steps = [self._last_epochs, self._last_chores, self._last_roots]
        if self._groups:
            steps.append(self._files.commit_group)
        for step in steps:
            try:
                step()
            except OSError as error:
                _log.warning("not everything was synced at the end: %s", error)

    def close(self) -> None:
        """Let another process have the directory."""
        self._files.close()

    def _last_epochs(self) -> None:
        if self._epochs.unsaved(self._volume.number):
            self._save()

    def _last_chores(self) -> None:
        if self._volume.opened:
            self._volume.do(self._volume.take_chores())

    def _last_roots(self) -> None:
        if self._volume.opened and self._roots.unsaved(self._volume.number):
            self._save_roots()

    def _roots_due(self) -> bool:
        due = self._clock.now() >= self._next_roots
        return due and self._roots.unsaved(self._volume.number)

    def _write(self, work: Callable[[], object], settle: Callable[..., None]) -> None:
        self._busy = True
        self._executor.write(self._volume.number, work, settle, deadline=math.inf, late=settle)

    def _save(self) -> None:
        # Not the cache's lock: that is never held over I/O. A later snapshot is never overtaken.
        with self._saving:
            with self._lock:
                snapshot = self._epochs.snapshot()
            if not self._files.attached():
                raise DirectoryLostError(self._files.root)
            save_epochs(self._files.root, snapshot.epochs, snapshot.floor, snapshot.owed)
            with self._lock:
                self._epochs.saved(self._volume.number, snapshot)

    def _save_roots(self) -> None:
        with self._lock:
            self._next_roots = self._clock.now() + ROOTS_SAVE_S
            held = {*self._disk.index.namespaces, *self._disk.cold.namespaces}
            rows, version = self._roots.snapshot(held)
        if not self._files.attached():
            raise DirectoryLostError(self._files.root)
        save_roots(self._files.root, rows)
        with self._lock:
            self._roots.saved(self._volume.number, version)

    def _open(self) -> tuple[Found, ColdTable]:
        # Before the index is read: sequences that begin meanwhile need the epoch.
        number = self._volume.number
        early = load_epochs(self._files.root)
        with self._lock:
            self._epochs.owe(early.owed)
            self._epochs.merge(number, early.epochs, early.floor)
        self._epochs_known.set()
        found = self._files.open()
        with self._saving:
            # Now nobody else writes here.
            stored = load_epochs(self._files.root)
            with self._lock:
                self._epochs.owe(stored.owed)
                self._epochs.merge(number, stored.epochs, stored.floor)
                snapshot = self._epochs.snapshot()
                unsaved = self._epochs.unsaved(number)
            if unsaved or stored.damaged:
                save_epochs(self._files.root, snapshot.epochs, snapshot.floor, snapshot.owed)
            with self._lock:
                self._epochs.saved(number, snapshot)
        roots = load_roots(self._files.root)
        with self._lock:
            self._roots.merge({root: RootRow(*row) for root, row in roots.items()})
        return found, self._disk.cold_table(number, found)

    def _settle_open(self, outcome: tuple[Found, ColdTable] | Fault) -> None:
        self._epochs_known.set()
        with self._lock:
            self._busy = False
            if not isinstance(outcome, tuple):
                self._volume.open_failed(outcome)
                return
            found, table = outcome
            self._counters.corrupt_shards += len(found.scanned.corrupt) if found.scanned else 0
            self._disk.adopt(self._volume.number, found, table)
            self._unswept = list(found.unswept)
            _log.info("disk tier open: %d chunks in %s", len(found.rows), self._files.root)
            self._on_open()

    def _settle_save(self, outcome: Fault | None) -> None:
        with self._lock:
            self._busy = False
            if outcome is not None:
                self._volume.write_failed(outcome)

    def _settle_commit(self, outcome: Fault | None) -> None:
        self._next_commit = self._clock.now() + GROUP_COMMIT_S
        self._settle_save(outcome)

    def _settle_probe(self, outcome: Fault | None) -> None:
        with self._lock:
            # An overdue one is still out, and none is sent after it.
            self._probing = isinstance(outcome, DeadlineError)
            if outcome is None:
                self._volume.read_succeeded()
            else:
                self._volume.read_failed(outcome)

    def _sweep(self) -> Scanned:
        return self._files.sweep(self._unswept[-1], self._unknown)

    def _unknown(self, files: Sequence[FileInfo]) -> list[FileInfo]:
        """Ask the books for the files that they do not know, a few at a time under the lock."""
        unknown: list[FileInfo] = []
        for start in range(0, len(files), SWEEP_LOCK_FILES):
            with self._lock:
                some = files[start : start + SWEEP_LOCK_FILES]
                unknown += self._disk.unknown(self._volume.number, some)
        return unknown

    def _settle_sweep(self, outcome: Scanned | Fault) -> None:
        with self._lock:
            self._busy = False
            if isinstance(outcome, Scanned):
                self._unswept.pop()
                self._counters.corrupt_shards += len(outcome.corrupt)
                self._disk.take_in(self._volume.number, outcome)
                self._volume.swept = not self._unswept
                self.tick()  # Writes wait until all parts are done.
            else:
                self._volume.write_failed(outcome)


def save_epochs_everywhere(openers: Sequence[VolumeOpener]) -> None:
    """Write the present epochs to every directory; blocks.

    One that is away keeps none of the others from knowing. Raises ``TierUnavailableError``, the
    first one, once all have been tried.
    """
    problems: list[TierUnavailableError] = []
    for opener in openers:
        try:
            opener.save_epochs()
        except TierUnavailableError as error:
            problems.append(error)
    if problems:
        raise problems[0]
