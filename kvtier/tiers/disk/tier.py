"""The disk tier's books: what lies on disk, what must leave, how the disk is doing.

Decides under the cache's lock; ``ShardFiles`` does, without it. Bytes on disk never exceed the
bound: what a write displaces is unlinked before the write starts, by the same single thread.
Every chunk's parent is on disk too, so nothing lies there that no lookup could reach.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtier.config import DiskConfig
from kvtier.constants import QUARANTINE_FILES_MAX, READ_FAILURES_MAX
from kvtier.errors import DeadlineError, KVTierError
from kvtier.interfaces import Clock, EvictionPolicy
from kvtier.tiers.disk.shard_files import DirectoryLostError, Found, FoundShard, ShardFiles
from kvtier.tiers.health import Health
from kvtier.tiers.index import Record, TierIndex
from kvtier.types import ChunkKey, Entry, Features, ShardId

PolicyFactory = Callable[[int, Callable[[ChunkKey], bool]], EvictionPolicy]

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
_NEUTRAL = Features()


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """One shard's file."""

    path: str
    nbytes: int


DiskRecord = Record[DiskPlace]


@dataclass(frozen=True, slots=True)
class Chores:
    """What the writing thread has to do before its next write."""

    remove: tuple[DiskPlace, ...]
    quarantine: tuple[DiskPlace, ...]


class DiskTier:
    """Owns the index, the policy and the state of one directory. Used under the cache's lock."""

    def __init__(
        self,
        config: DiskConfig,
        files: ShardFiles,
        policy: PolicyFactory,
        clock: Clock,
        on_evict: Callable[[DiskRecord], None],
    ) -> None:
        self.capacity_bytes = config.capacity_bytes
        self.index: TierIndex[DiskPlace] = TierIndex(self._reclaim)
        self.opened = False
        self._files = files
        self._policy = policy(config.capacity_bytes, self.index.pinned)
        self._clock = clock
        self._on_evict = on_evict
        self._open_health = Health()
        self._read_health = Health(READ_FAILURES_MAX)
        self._write_health = Health()
        self._held_bytes = 0
        self._condemned: set[str] = set()
        self._remove: list[DiskPlace] = []
        self._quarantine: list[DiskPlace] = []
        self._quarantined: dict[str, DiskPlace] = {}  # by path, oldest first

    @property
    def used_bytes(self) -> int:
        """Bytes on disk: shards, quarantine, and what waits to be unlinked."""
        waiting = sum(place.nbytes for place in self._remove)
        return self._held_bytes + waiting + self._quarantine_bytes

    @property
    def quarantined_count(self) -> int:
        """Files that failed verification and are kept."""
        return len(self._quarantined) + len(self._quarantine)

    @property
    def state(self) -> tuple[str, str]:
        """One word for how the disk is doing, ``ok`` when well, and the latest fault."""
        for health in (self._open_health, self._write_health, self._read_health):
            if not health.ok:
                return health.word, health.detail
        return ("ok", "") if self.opened else ("opening", "reading the index")

    def open_due(self) -> bool:
        """Tell whether the directory is to be opened (again) now."""
        return not self.opened and self._open_health.allows(self._clock.now())

    def readable(self) -> bool:
        """Tell whether a load may ask the disk now."""
        return self.opened and self._read_health.allows(self._clock.now())

    def writable(self) -> bool:
        """Tell whether a write may be tried now."""
        return self.opened and self._write_health.allows(self._clock.now())

    def probe_due(self) -> bool:
        """Tell whether writes have failed and one should be tried again now."""
        return not self._write_health.ok and self.writable()

    def adopt(self, found: Found) -> None:
        """Take in what an open found and forget what is gone.

        Chunks whose parent is not on disk, and what does not fit any more, become chores.
        """
        present = {shard.path for shard in found.shards}
        for record in list(self.index):
            if not record.pins and any(p.path not in present for p in record.places.values()):
                self.forget(record)
        known = {place.path for record in self.index for place in record.places.values()}
        known |= {place.path for record in self.index.leaving for place in record.places.values()}
        known |= {place.path for place in (*self._remove, *self._quarantine)}
        chunks: dict[ChunkKey, list[FoundShard]] = {}
        for shard in found.shards:
            if shard.path not in known:
                chunks.setdefault(shard.header.chunk, []).append(shard)
        self._adopt_quarantine(found)
        # Oldest first, so that the order of leaving survives the restart; parents before children.
        in_order = sorted(chunks.values(), key=lambda s: (s[0].modified_s, -s[0].header.position))
        fitting = self._fitting(chunks, in_order)
        for shards in sorted(chunks.values(), key=lambda s: s[0].header.position):
            if shards[0].header.chunk in fitting:
                self._adopt_chunk(shards)
            else:
                self._remove += [DiskPlace(shard.path, shard.nbytes) for shard in shards]
        for shards in in_order:
            self._policy.touch(shards[0].header.chunk, self._clock.now(), _NEUTRAL)
        self.opened = True
        self._open_health.success()
        self._write_health.success()
        self._read_health.success()

    def reserve(
        self, entry: Entry, namespace: bytes, codec: str, sizes: Mapping[ShardId, int]
    ) -> DiskRecord | None:
        """Make room for a chunk and return its filling record, pinned once for the writer.

        None refuses: no room beside what is pinned or still read, or the parent is not on disk.
        """
        assert self.index.get(entry.key) is None, "reserved twice"
        if entry.parent is not None and self.index.get(entry.parent) is None:
            return None
        victims = self._policy.admit(entry, self._clock.now())
        if victims is None:
            return None
        for victim in victims:
            self._evict(victim)
        if self._held_bytes + entry.nbytes > self.capacity_bytes:
            # The policy has forgotten what has left, but while it is read it still lies there.
            self._policy.remove(entry.key)
            return None
        places = {
            shard: DiskPlace(self._files.new_path(entry.key, shard), nbytes)
            for shard, nbytes in sizes.items()
        }
        record = DiskRecord(entry, namespace, codec, places)
        self._add(record)
        self.index.pin(record)
        return record

    def take_chores(self) -> Chores:
        """Hand over what the writing thread unlinks and moves before its next write."""
        while self.quarantined_count > QUARANTINE_FILES_MAX or (
            self._quarantine_bytes
            and self._held_bytes + self._quarantine_bytes > self.capacity_bytes
        ):
            self._drop_oldest()
        chores = Chores(tuple(self._remove), tuple(self._quarantine))
        for place in self._quarantine:
            path = self._files.quarantine_path(place.path)
            # An open may have found it damaged before its last reader was done.
            self._quarantined.setdefault(path, DiskPlace(path, place.nbytes))
        self._remove, self._quarantine = [], []
        return chores

    def return_chores(self, chores: Chores) -> None:
        """Take back what could not be done, for another try."""
        self._remove += chores.remove
        for place in chores.quarantine:
            self._quarantined.pop(self._files.quarantine_path(place.path), None)
        self._quarantine += chores.quarantine

    def commit(self, record: DiskRecord) -> None:
        """Let readers have a written record, and drop the writer's pin."""
        self.index.set_ready(record)
        self.index.unpin(record)
        self._write_health.success()

    def abort(self, record: DiskRecord) -> None:
        """Give up a record that could not be written, and drop the writer's pin."""
        self.forget(record)
        self.index.unpin(record)

    def forget(self, record: DiskRecord) -> None:
        """Take a record out of sight; its files are unlinked once nobody reads them."""
        self._policy.remove(record.entry.key)
        self.index.detach(record)

    def condemn(self, record: DiskRecord, shard: ShardId) -> None:
        """Take a record out of sight because one of its shards failed verification."""
        self._condemned.add(record.places[shard].path)
        self.forget(record)

    def touch(self, keys: list[ChunkKey], features: Features) -> None:
        """Note an access to chunks of one sequence, given from its last to its first."""
        for key in keys:
            self._policy.touch(key, self._clock.now(), features)

    def open_failed(self, error: OSError | KVTierError) -> None:
        """Note that the directory could not be taken; it is tried again later."""
        self._open_health.failure(_word(error, "unavailable"), str(error), self._clock.now())

    def write_failed(self, error: OSError | KVTierError) -> None:
        """Note a failed write; writes pause, reads go on."""
        self._write_health.failure(_word(error, "failing"), str(error), self._clock.now())
        self._lose_directory(error)

    def read_failed(self, error: OSError | KVTierError) -> None:
        """Note a failed or late read; several in a row pause reads."""
        self._read_health.failure(_word(error, "failing"), str(error), self._clock.now())
        self._lose_directory(error)

    def read_succeeded(self) -> None:
        """Note that the disk answered, whatever it answered."""
        self._read_health.success()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        self.index.check_integrity()
        held = sum(p.nbytes for r in self.index for p in r.places.values())
        leaving = sum(p.nbytes for r in self.index.leaving for p in r.places.values())
        if held + leaving != self._held_bytes:
            raise AssertionError(f"{self._held_bytes} bytes counted, {held} + {leaving} held")
        if held > self.capacity_bytes:
            raise AssertionError(f"{held} bytes of {self.capacity_bytes}")

    @property
    def _quarantine_bytes(self) -> int:
        return sum(place.nbytes for place in (*self._quarantined.values(), *self._quarantine))

    def _drop_oldest(self) -> None:
        """Let the oldest file go that failed verification."""
        if self._quarantined:
            self._remove.append(self._quarantined.pop(next(iter(self._quarantined))))
            return
        place = self._quarantine.pop(0)
        # Chores that failed half-way may have moved it already.
        self._remove += [place, DiskPlace(self._files.quarantine_path(place.path), 0)]

    def _lose_directory(self, error: OSError | KVTierError) -> None:
        if isinstance(error, DirectoryLostError):
            self.opened = False
            self._open_health.failure("missing", str(error), self._clock.now())

    def _add(self, record: DiskRecord) -> None:
        self.index.add(record)
        self._held_bytes += sum(place.nbytes for place in record.places.values())

    def _fitting(
        self, chunks: Mapping[ChunkKey, list[FoundShard]], in_order: list[list[FoundShard]]
    ) -> set[ChunkKey]:
        """Return the newest chunks that fit, each with all of its ancestors."""
        room = self.capacity_bytes - self._held_bytes
        fitting: set[ChunkKey] = set()
        for shards in reversed(in_order):
            line: list[ChunkKey] = []
            key: ChunkKey | None = shards[0].header.chunk
            # Forged parents may form a ring, which is never longer than all there is.
            while (
                key is not None and key in chunks and key not in fitting and len(line) < len(chunks)
            ):
                line.append(key)
                key = chunks[key][0].header.parent
            nbytes = sum(shard.nbytes for each in line for shard in chunks[each])
            reachable = key is None or key in fitting or self.index.get(key) is not None
            if reachable and nbytes <= room:
                fitting.update(line)
                room -= nbytes
        return fitting

    def _adopt_quarantine(self, found: Found) -> None:
        """Take in what was put away, except what is to be removed from there."""
        going = {place.path for place in self._remove}
        self._quarantined = {
            file.path: DiskPlace(file.path, file.nbytes)
            for file in found.quarantined
            if file.path not in going
        }
        self._quarantine = [
            place
            for place in self._quarantine
            if self._files.quarantine_path(place.path) not in self._quarantined
        ]

    def _adopt_chunk(self, shards: list[FoundShard]) -> None:
        header = shards[0].header
        places = {s.header.shard: DiskPlace(s.path, s.nbytes) for s in shards}
        entry = Entry(header.chunk, header.parent, sum(s.nbytes for s in shards), header.position)
        reachable = header.parent is None or self.index.get(header.parent) is not None
        if not reachable or self.index.get(header.chunk) is not None:
            self._remove += places.values()
            return
        victims = self._policy.admit(entry, self._clock.now())
        if victims is None:
            self._remove += places.values()
            return
        for victim in victims:
            self._evict(victim)
        record = DiskRecord(entry, header.namespace, header.codec, places)
        self._add(record)
        self.index.set_ready(record)

    def _evict(self, key: ChunkKey) -> None:
        record = self.index.get(key)
        assert record is not None, "the policy holds what the index does not"
        assert record.pins == 0, "a pinned chunk never leaves"
        self.index.detach(record)
        self._on_evict(record)

    def _reclaim(self, record: DiskRecord) -> None:
        for place in record.places.values():
            self._held_bytes -= place.nbytes
            if place.path in self._condemned:
                self._condemned.discard(place.path)
                self._quarantine.append(place)
            else:
                self._remove.append(place)


def _word(error: OSError | KVTierError, otherwise: str) -> str:
    if isinstance(error, DeadlineError):
        return "slow"
    if isinstance(error, OSError) and error.errno is not None:
        return _FAULT_WORDS.get(error.errno, otherwise)
    return otherwise
