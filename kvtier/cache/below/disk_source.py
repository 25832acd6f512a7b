"""A chunk on disk, as a fill reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from kvtier.cache.below.fill import Arriving, Origin, UnwantedError
from kvtier.cache.executor import Executor, Fault
from kvtier.constants import READ_FIRST_BYTES
from kvtier.errors import DeadlineError, MissingExtraError, RegistryError, ShardError
from kvtier.tiers.disk.shard_files import DirectoryLostError
from kvtier.tiers.disk.tier import DiskRecord, DiskTier
from kvtier.tiers.disk.volume import DiskPlace
from kvtier.tiers.health import is_slow
from kvtier.tiers.index import Lease
from kvtier.types import MissReason, ShardId, Tier


class DiskSource:
    """A ``Source`` over one record of the disk tier."""

    def __init__(self, disk: DiskTier, record: DiskRecord, executor: Executor) -> None:
        self._disk = disk
        self._record = record
        self._executor = executor
        self._volume = disk.volume_of(record)
        self._failed: ShardId | None = None
        self._begun: float | None = None  # When a thread took it up.
        self._blamed = False

    @cached_property
    def origin(self) -> Origin:
        """What the record says."""
        record, entry = self._record, self._record.entry
        return Origin(
            Tier.DISK,
            "disk",
            entry.key,
            entry.parent,
            entry.position,
            record.namespace,
            record.codec,
            record.places.keys(),
            entry.nbytes,
        )

    def hold(self) -> Lease[DiskPlace]:
        """Pin the record."""
        return self._disk.index.lease([self._record])

    def fetch(
        self,
        arriving: Arriving,
        done: Callable[[Fault | None], None],
        *,
        deadline: float,
        late: Callable[[Fault | None], None],
    ) -> None:
        """Read shard after shard in one of the directory's threads."""
        self._executor.read(
            self._volume.number, self.reading(arriving), done, deadline=deadline, late=late
        )

    @property
    def lane(self) -> int:
        """The directory's number."""
        return self._volume.number

    def reading(
        self, arriving: Arriving, *, first_bytes: int = READ_FIRST_BYTES
    ) -> Callable[[], None]:
        """Return what reads and verifies shard after shard; it blocks, and raises a ``Fault``.

        ``first_bytes`` is as in ``ShardFiles.read``.
        """
        files = self._volume.files
        places = {shard: self._record.places[shard] for shard in arriving.slots}

        def read_shards() -> None:
            self._begun = self._executor.now()
            for shard, place in places.items():
                path = place.path
                if not arriving.wanted():
                    raise UnwantedError(f"nobody waits for {path}")

                def progress(sections: int, shard: ShardId = shard) -> None:
                    arriving.progress(shard, sections)

                expected = arriving.expected[shard]
                if place.nbytes != expected.geometry.shard_bytes:
                    expected = replace(expected, stored_bytes=place.nbytes)
                try:
                    slot = arriving.slots[shard]
                    files.read(path, slot, expected, progress, first_bytes=first_bytes)
                except ShardError:
                    self._failed = shard
                    raise

        return read_shards

    def settle(self, outcome: Fault | None) -> MissReason | None:
        """Tell the directory how it did; condemn or forget what was not as it should be."""
        volume = self._volume
        held = self._disk.index.get(self._record.entry.key) is self._record
        if outcome is None:
            volume.read_succeeded()
            return None
        if isinstance(outcome, DeadlineError):
            volume.overdue.add(self._blame)
            self._blame()
            return MissReason.DEADLINE
        if isinstance(outcome, ShardError):
            volume.read_succeeded()
            if held and self._failed is not None:
                self._disk.condemn(self._record, self._failed)
            return MissReason.CORRUPT
        if isinstance(outcome, MissingExtraError | RegistryError):  # What encoded it is not here.
            volume.read_succeeded()
            return MissReason.CODEC
        # A directory that is gone may come back with all that it holds.
        lost = isinstance(outcome, DirectoryLostError)
        if isinstance(outcome, FileNotFoundError) and not lost:
            if held:
                self._disk.forget(self._record)
            return MissReason.ABSENT
        volume.read_failed(outcome)
        return MissReason.IO_ERROR

    def end_late(self) -> None:
        """One overdue read less; how long it took is known now."""
        self._volume.overdue.discard(self._blame)
        self._blame()

    def _blame(self) -> None:
        """Have an overdue read count against the directory, once, if that was slow with it."""
        if self._begun is None or self._blamed:
            return
        if is_slow(self._executor.now() - self._begun, self._record.entry.nbytes):
            self._blamed = True
            self._volume.read_failed(DeadlineError("no answer in time"))
