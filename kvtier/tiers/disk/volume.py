"""The books of one directory of the disk tier: how it does, what lies there, what is due there.

Used under the cache's lock; what is due is done without it, by the directory's one writing thread,
in the order in which it was handed over.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier.constants import (
    LATE_JOBS_MAX,
    QUARANTINE_FILES_MAX,
    READ_FAILURES_MAX,
    USED_KEYS_MAX,
    USED_NOTE_S,
    WRITES_INFLIGHT_MAX,
)
from kvtier.errors import DeadlineError, KVTierError
from kvtier.interfaces import Clock
from kvtier.tiers.disk.files import FileInfo
from kvtier.tiers.disk.journal import Changes
from kvtier.tiers.disk.rows import Row
from kvtier.tiers.disk.shard_files import DirectoryLostError, Found, ShardFiles
from kvtier.tiers.health import Health
from kvtier.types import ChunkKey, ShardId

_FAULT_WORDS = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.ESTALE: "missing",
}


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """One shard's file and the directory, by its number, in which it lies."""

    volume: int
    path: str
    nbytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class Chores:
    """What the writing thread has to note and to do before its next write."""

    remove: tuple[DiskPlace, ...]
    quarantine: tuple[DiskPlace, ...]
    added: tuple[Row, ...]
    removed: tuple[tuple[ChunkKey, int], ...]
    used: tuple[ChunkKey, ...]

    def changes(self) -> Changes:
        """Return what the index at rest has to learn before anything is done."""
        return Changes(self.added, self.removed, self.used, wall_clock_ms())

    @property
    def empty(self) -> bool:
        """True when there is nothing to do."""
        return not (self.remove or self.quarantine or self.added or self.removed or self.used)


class Volume:
    """Owns the state of one directory. ``capacity_bytes`` bounds all files in it."""

    def __init__(self, number: int, files: ShardFiles, capacity_bytes: int, clock: Clock) -> None:
        self.number = number
        self.files = files
        self.capacity_bytes = capacity_bytes
        self.opened = False
        self.swept = False  # Nothing is written before it is known what lies there.
        self.held_bytes = 0  # Of chunks, those included that are leaving or not written yet.
        self.writing_count = 0
        #: Reads that are overdue and have not ended: each counts against the directory when it is
        #: called once it has lasted too long.
        self.overdue: set[Callable[[], None]] = set()
        self.put_away_count = 0  # Files put into quarantine since the start.
        self._clock = clock
        self._open_health = Health()
        self._read_health = Health(READ_FAILURES_MAX)
        self._write_health = Health()
        self._remove: dict[str, DiskPlace] = {}
        self._removing: dict[str, DiskPlace] = {}  # Handed over and not done yet.
        self._quarantine: list[DiskPlace] = []
        self._moving: set[str] = set()  # Handed over to be put away, and not done yet.
        self._quarantined: dict[str, DiskPlace] = {}  # By path, oldest first.
        self._added: list[Row] = []
        self._removed: list[tuple[ChunkKey, int]] = []
        self._used: dict[ChunkKey, None] = {}
        self._used_since = 0.0

    @property
    def late_count(self) -> int:
        """Reads that are overdue and have not ended."""
        return len(self.overdue)

    @property
    def used_bytes(self) -> int:
        """Bytes that lie in the directory: shards, quarantine, and what waits to be unlinked."""
        waiting = sum(p.nbytes for p in (*self._remove.values(), *self._removing.values()))
        return self.held_bytes + waiting + self.quarantine_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that a new chunk may take; what waits is unlinked before it is written."""
        return self.capacity_bytes - self.held_bytes

    @property
    def quarantine_bytes(self) -> int:
        """Bytes of files that failed verification."""
        return sum(place.nbytes for place in (*self._quarantined.values(), *self._quarantine))

    @property
    def put_away_latest(self) -> str:
        """Where the latest of them lies; empty without one."""
        return next(reversed(self._quarantined), "")

    @property
    def quarantined_count(self) -> int:
        """Files that failed verification and are kept."""
        return len(self._quarantined) + len(self._quarantine)

    @property
    def state(self) -> tuple[str, str]:
        """One word for how the directory is doing, ``ok`` when well, and the latest fault."""
        for health in (self._open_health, self._write_health, self._read_health):
            if not health.ok:
                return health.word, health.detail
        return ("ok", "") if self.opened else ("opening", "reading the index")

    @property
    def open_due(self) -> bool:
        """True when the directory is to be opened (again) now."""
        return not self.opened and self._open_health.allows(self._clock.now())

    @property
    def readable(self) -> bool:
        """True when a load may ask now."""
        well = self._read_health.ok or self._read_health.allows(self._clock.now())
        return self.opened and well

    @property
    def answers(self) -> bool:
        """True when a load may begin a read now: it may ask, and few answers are overdue."""
        return self.readable and self.late_count < LATE_JOBS_MAX

    @property
    def read_probe_due(self) -> bool:
        """True when reads have failed and one should be tried again now."""
        return not self._read_health.ok and self.readable

    @property
    def writable(self) -> bool:
        """True when a write may be tried now."""
        return self.opened and self._write_health.allows(self._clock.now())

    @property
    def accepts(self) -> bool:
        """True when a write may be started now: it may be tried, and few are under way."""
        return self.writable and self.swept and self.writing_count < WRITES_INFLIGHT_MAX

    @property
    def write_probe_due(self) -> bool:
        """True when writes have failed and one should be tried again now."""
        return not self._write_health.ok and self.writable

    @property
    def unnoted(self) -> Sequence[tuple[ChunkKey, int]]:
        """Chunks that are gone, of which the index at rest has not heard."""
        return self._removed

    def take_up(self, found: Found) -> None:
        """Note that the directory is open, and what lies there beside whole chunks."""
        going = self._remove.keys() | self._removing.keys()
        self._quarantined = {
            file.path: DiskPlace(self.number, file.path, file.nbytes, 0)
            for file in found.quarantined
            if file.path not in going
        }
        self._quarantine = [
            place
            for place in self._quarantine
            if self.files.quarantine_path(place.path) not in self._quarantined
        ]
        if found.scanned is not None:
            self.condemn(found.scanned.corrupt)
            self.discard(found.scanned.useless)
        self.opened = True
        self.swept = not found.unswept
        for health in (self._open_health, self._write_health, self._read_health):
            health.success()

    def places(
        self, key: ChunkKey, generation: int, sizes: Iterable[tuple[ShardId, int]]
    ) -> dict[ShardId, DiskPlace]:
        """Return where the shards of a chunk lie here."""
        return {
            shard: DiskPlace(
                self.number, self.files.path(key, shard, generation + index), nbytes, generation
            )
            for index, (shard, nbytes) in enumerate(sizes)
        }

    def row_places(self, row: Row) -> dict[ShardId, DiskPlace]:
        """Return where the shards of a row lie here."""
        return self.places(row.key, row.generation, row.kind.shards)

    def let_go(self, row: Row) -> None:
        """Have the files of a chunk unlinked that no record stands for."""
        self.held_bytes -= row.nbytes
        self.remove(self.row_places(row).values())
        self.note_removed(row.key, row.generation)

    def discard(self, files: Sequence[FileInfo]) -> None:
        """Let files go that no record names."""
        self.remove(DiskPlace(self.number, file.path, file.nbytes, 0) for file in files)

    def condemn(self, files: Sequence[FileInfo]) -> None:
        """Put files away that no record names and that failed verification."""
        self._quarantine += [DiskPlace(self.number, f.path, f.nbytes, 0) for f in files]

    def remove(self, places: Iterable[DiskPlace]) -> None:
        """Have files unlinked."""
        self._remove.update((place.path, place) for place in places)

    def put_away(self, place: DiskPlace) -> None:
        """Have a file moved to the quarantine."""
        self._quarantine.append(place)

    def going(self, path: str) -> bool:
        """Tell whether a file is being removed or put away."""
        return (
            path in self._remove
            or path in self._removing
            or path in self._moving
            or any(place.path == path for place in self._quarantine)
        )

    def note_added(self, row: Row) -> None:
        """Have the index at rest learn of a chunk that it does not know."""
        self._added.append(row)

    def note_removed(self, key: ChunkKey, generation: int) -> None:
        """Have the index at rest forget a chunk."""
        self._removed.append((key, generation))

    def note_used(self, keys: Iterable[ChunkKey]) -> None:
        """Have the index at rest remember an access; the oldest are dropped beyond a limit."""
        if not self._used:
            self._used_since = self._clock.now()
        for key in keys:
            self._used.pop(key, None)
            self._used[key] = None
        while len(self._used) > USED_KEYS_MAX:
            del self._used[next(iter(self._used))]

    @property
    def chores_due(self) -> bool:
        """True when something waits that should not wait for a write."""
        waited_s = self._clock.now() - self._used_since
        return bool(
            self._remove
            or self._quarantine
            or self._added
            or self._removed
            or (self._used and waited_s >= USED_NOTE_S)
            or self._too_much_quarantined
        )

    def take_chores(self) -> Chores:
        """Hand over what the writing thread does before its next write."""
        while self._too_much_quarantined:
            self._drop_oldest()
        chores = Chores(
            tuple(self._remove.values()),
            tuple(self._quarantine),
            tuple(self._added),
            tuple(self._removed),
            tuple(self._used),
        )
        for place in self._quarantine:
            path = self.files.quarantine_path(place.path)
            # An open may have found it damaged before its last reader was done.
            self._quarantined.setdefault(
                path, DiskPlace(self.number, path, place.nbytes, place.generation)
            )
        self._removing |= self._remove
        self._moving.update(place.path for place in self._quarantine)
        self._remove, self._quarantine = {}, []
        self._added, self._removed, self._used = [], [], {}
        return chores

    def do(self, chores: Chores) -> None:
        """Unlink and put away; in the writing thread, without the lock. Raises ``OSError``.

        The index at rest forgets a chunk before its files go: cut off in between, a start finds
        files that it does not know, and not a chunk that has none.
        """
        if not chores.empty:
            self.files.note(chores.changes())
        for place in chores.quarantine:
            self.files.quarantine(place.path)
        for place in chores.remove:
            self.files.remove(place.path)

    def finish_chores(self, chores: Chores) -> None:
        """Note that chores were done."""
        self.put_away_count += len(chores.quarantine)
        self._hand_in(chores)

    def _hand_in(self, chores: Chores) -> None:
        for place in chores.remove:
            self._removing.pop(place.path, None)
        self._moving.difference_update(place.path for place in chores.quarantine)

    def return_chores(self, chores: Chores) -> None:
        """Take back what could not be done, for another try."""
        self._hand_in(chores)
        self.remove(chores.remove)
        for place in chores.quarantine:
            self._quarantined.pop(self.files.quarantine_path(place.path), None)
        self._quarantine = [*chores.quarantine, *self._quarantine]
        self._added = [*chores.added, *self._added]
        self._removed = [*chores.removed, *self._removed]
        later = tuple(self._used)
        self._used = {}
        self.note_used((*chores.used, *later))

    def open_failed(self, error: OSError | KVTierError) -> None:
        """Note that the directory could not be taken; it is tried again later."""
        self._open_health.failure(_word(error, "unavailable"), str(error), self._clock.now())

    def write_failed(self, error: OSError | KVTierError) -> None:
        """Note a failed write; writes pause, reads go on."""
        self._write_health.failure(_word(error, "failing"), str(error), self._clock.now())
        self._lose_directory(error)

    def write_succeeded(self) -> None:
        """Note that a write worked."""
        self._write_health.success()

    def read_failed(self, error: OSError | KVTierError) -> None:
        """Note a failed or late read; several in a row pause reads."""
        self._read_health.failure(_word(error, "failing"), str(error), self._clock.now())
        self._lose_directory(error)

    def read_succeeded(self) -> None:
        """Note that the disk answered, whatever it answered."""
        self._read_health.success()

    @property
    def _too_much_quarantined(self) -> bool:
        return self.quarantined_count > QUARANTINE_FILES_MAX or (
            self.quarantined_count > 0
            and self.held_bytes + self.quarantine_bytes > self.capacity_bytes
        )

    def _drop_oldest(self) -> None:
        """Let the oldest file go that failed verification."""
        if self._quarantined:
            self.remove([self._quarantined.pop(next(iter(self._quarantined)))])
            return
        place = self._quarantine.pop(0)
        # Chores that failed half-way may have moved it already.
        moved = DiskPlace(self.number, self.files.quarantine_path(place.path), 0, 0)
        self.remove([place, moved])

    def _lose_directory(self, error: OSError | KVTierError) -> None:
        if isinstance(error, DirectoryLostError):
            self.opened = False
            self._open_health.failure("missing", str(error), self._clock.now())


def written(row: Row) -> Changes:
    """Return what the index at rest learns of a chunk whose files are written."""
    return Changes((row,), (), (), row.used_ms)


def wall_clock_ms() -> int:
    """Return the time that outlives the process."""
    return time.time_ns() // 1_000_000


def _word(error: OSError | KVTierError, otherwise: str) -> str:
    if isinstance(error, DeadlineError):
        return "slow"
    if isinstance(error, OSError) and error.errno is not None:
        return _FAULT_WORDS.get(error.errno, otherwise)
    return otherwise
