"""The tiers below DRAM together: what comes to DRAM is offered to each, what is due is started."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.cache.below.disk_room import DiskRoom
from kvtier.cache.below.opener import save_epochs_everywhere
from kvtier.cache.below.remote_room import RemoteRoom
from kvtier.cache.below.writeout import Writeout
from kvtier.errors import TierUnavailableError
from kvtier.obs.stats import TierCounters
from kvtier.tiers.disk.tier import DiskTier
from kvtier.types import ChunkKey, Features, KVLayout

_FEATURES = Features()


def _nothing() -> None:
    """Do nothing."""


class Rooms:
    """Holds what there is of them; empty at first. Used under the cache's lock."""

    def __init__(self, dram_counters: TierCounters) -> None:
        self._dram_counters = dram_counters
        self.disk: DiskRoom | None = None
        self.remote: RemoteRoom | None = None
        #: What is done whenever something may have come to where it belongs.
        self.sweep: Callable[[], None] = _nothing
        self.closed = False

    @property
    def disk_tier(self) -> DiskTier | None:
        """The disk's books, if there is a disk."""
        return self.disk.tier if self.disk is not None else None

    @property
    def writeout(self) -> Writeout | None:
        """What goes to disk, if there is a disk."""
        return self.disk.writeout if self.disk is not None else None

    def await_epochs(self) -> None:
        """Block until the epochs below are known, for a bounded time; without the lock."""
        if self.remote is not None:
            self.remote.await_epochs()
        for opener in self.disk.openers if self.disk is not None else ():
            opener.wait_for_epochs()

    def save_epochs(self) -> None:
        """Have the present epochs kept by every directory, then by every remote; blocks.

        Without the lock. Raises ``TierUnavailableError``, which tells all who could not, once all
        have been tried.
        """
        problems: list[TierUnavailableError] = []
        for save in (self._save_to_disk, self._tell_remotes):
            try:
                save()
            except TierUnavailableError as error:
                problems.append(error)
        if problems:
            raise TierUnavailableError("; ".join(map(str, problems))) from problems[0]

    def _save_to_disk(self) -> None:
        if self.disk is not None:
            save_epochs_everywhere(self.disk.openers)

    def _tell_remotes(self) -> None:
        if self.remote is not None:
            self.remote.tell()

    def spread(self, key: ChunkKey, layout: KVLayout) -> None:
        """Offer a chunk that has come up to every tier that may lack it."""
        if self.disk is not None:
            self.disk.writeout.note(key, layout, _FEATURES)
        if self.remote is not None:
            self.remote.note(key, layout, _FEATURES)
        self.pump()

    def waits(self, key: ChunkKey) -> bool:
        """Tell whether a tier below is still to be given a chunk, now or when it is well again."""
        disk, remote = self.writeout, self.remote
        on_disk = disk is not None and disk.waits(key)
        return on_disk or (remote is not None and remote.waits(key))

    def owes(self, key: ChunkKey) -> bool:
        """Tell whether one that takes writes is still to be given it."""
        disk, remote = self.disk, self.remote
        on_disk = disk is not None and disk.tier.writable() and disk.writeout.waits(key)
        return on_disk or (remote is not None and remote.owes(key))

    def left_dram(self, key: ChunkKey) -> None:
        """Note that a chunk leaves DRAM."""
        self._dram_counters.evicted_chunks += 1
        if self.disk is not None:
            self.disk.writeout.drop(key)
        if self.remote is not None:
            self.remote.left_dram(key)

    def pump(self) -> None:
        """Start as many writes as may be out."""
        if self.closed:
            return
        if self.disk is not None:
            self.disk.writeout.pump()
        if self.remote is not None:
            self.remote.pump()
        self.sweep()

    def tick(self) -> list[str]:
        """Start what is due; return what is to be logged."""
        lines = [room.tick() for room in (self.disk, self.remote) if room is not None]
        self.sweep()
        return [line for line in lines if line is not None]

    def flush(self) -> None:
        """Write everything, whatever the mode, and begin nothing else."""
        self.closed = True
        if self.disk is not None:
            self.disk.writeout.flush()
        if self.remote is not None:
            self.remote.flush()

    def close(self, timeout_s: float) -> None:
        """End what still holds something; without the lock, when nothing is under way any more."""
        if self.remote is not None:
            self.remote.close(timeout_s)
        if self.disk is not None:
            self.disk.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        for room in (self.disk, self.remote):
            if room is not None:
                room.check_integrity()
