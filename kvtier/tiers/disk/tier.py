"""The disk tier's books: what lies on disk, where, and what must leave.

Decides under the cache's lock; ``ShardFiles`` does, without it. Bytes in a directory never exceed
its share of the bound: what a write displaces is unlinked before the write starts, by the same
single thread. A chunk is written only where its parent is on disk already; what is cut off later
(a damaged file, a lost device) leaves first, or comes back to use when its parent is stored again.

Most chunks that a directory holds at the start are never asked for again. They stay columns in a
``ColdTable`` until they are used; only then they become records that the policy ranks::

    open ──► cold table ──used──► index and policy ──► evicted
                  └───────── coldest first, before any record ──► evicted
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from kvtier.constants import DIGEST_BYTES, TRIM_CHUNKS_MAX
from kvtier.interfaces import Clock, EvictionPolicy
from kvtier.tiers.disk.cold import ColdTable
from kvtier.tiers.disk.files import FileInfo
from kvtier.tiers.disk.room import ROOM, has_place, make_room
from kvtier.tiers.disk.rows import Kind, Row
from kvtier.tiers.disk.scan import Scanned, parse_name
from kvtier.tiers.disk.shard_files import Found
from kvtier.tiers.disk.volume import DiskPlace, Volume, wall_clock_ms
from kvtier.tiers.index import Record, State, TierIndex
from kvtier.types import ChunkKey, Entry, Features, ShardId

PolicyFactory = Callable[[int, Callable[[ChunkKey], bool]], EvictionPolicy]

DiskRecord = Record[DiskPlace]


class DiskTier:
    """Owns the index and the policy over all directories. Used under the cache's lock.

    ``index`` holds the chunks that were used since the start, ``cold`` the others; ``ready``
    brings them in.
    """

    def __init__(
        self,
        volumes: Sequence[Volume],
        policy: PolicyFactory,
        clock: Clock,
        on_evict: Callable[[ChunkKey], None],
    ) -> None:
        """``on_evict`` is called with the key of every chunk that leaves to make room."""
        self.volumes = tuple(volumes)
        self.capacity_bytes = sum(volume.capacity_bytes for volume in volumes)
        self.index: TierIndex[DiskPlace] = TierIndex(self._reclaim)
        self._policy = policy(self.capacity_bytes, self._pinned)
        self._clock = clock
        self._on_evict = on_evict
        self.cold = ColdTable((), self._is_hot)
        self._condemned: set[str] = set()
        self._ranked_bytes = 0  # What the policy holds.
        self._placing: ChunkKey | None = None  # Ranked, and not in the index yet.

    def __len__(self) -> int:
        return len(self.index) + len(self.cold)

    @property
    def opened(self) -> bool:
        """True when any of the directories is open."""
        return any(volume.opened for volume in self.volumes)

    @property
    def used_bytes(self) -> int:
        """Bytes on disk: shards, quarantine, and what waits to be unlinked."""
        return sum(volume.used_bytes for volume in self.volumes)

    @property
    def quarantined_count(self) -> int:
        """Files that failed verification and are kept."""
        return sum(volume.quarantined_count for volume in self.volumes)

    @property
    def state(self) -> tuple[str, str]:
        """One word for how the first directory in trouble is doing, ``ok`` when all are well."""
        for volume in self.volumes:
            word, detail = volume.state
            if word != "ok":
                return word, f"{volume.files.root}: {detail}" if len(self.volumes) > 1 else detail
        return "ok", ""

    def readable(self) -> bool:
        """Tell whether a load may ask any directory now."""
        return any(volume.readable for volume in self.volumes)

    def writable(self) -> bool:
        """Tell whether a write may be started anywhere now."""
        return any(volume.accepts for volume in self.volumes)

    def find(self, key: ChunkKey) -> tuple[str, Collection[ShardId]] | None:
        """Return codec and shards of a chunk that may be read now; a lookup changes nothing."""
        record = self.index.get(key)
        if record is not None:
            readable = record.state is State.READY and self.volume_of(record).answers
            return (record.codec, record.places.keys()) if readable else None
        cold = self.cold.kind(key)
        if cold is None or not self.volumes[cold[0]].answers:
            return None
        return cold[1].codec, cold[1].shard_ids

    def holds(self, key: ChunkKey) -> bool:
        """Tell whether a chunk is there, being written included, readable or not."""
        return self.index.get(key) is not None or key in self.cold

    def ready(self, key: ChunkKey) -> DiskRecord | None:
        """Return the record of a chunk that may be read now, bringing it in from the cold."""
        self._bring(key)
        record = self.index.ready(key)
        return record if record is not None and self.volume_of(record).readable else None

    def volume_of(self, record: DiskRecord) -> Volume:
        """Return the directory in which a chunk lies."""
        return self.volumes[_first(record).volume]

    def cold_table(self, number: int, found: Found) -> ColdTable:
        """Prepare what ``adopt`` takes. Takes time in proportion, and no lock."""
        return ColdTable([(number, found.rows)], self._is_hot)

    def adopt(self, number: int, found: Found, table: ColdTable) -> None:
        """Take in what the open of a directory found and forget what is gone from there.

        A directory that was away may come back with chunks that others have again: those of its
        chunks that are newer count.
        """
        volume = self.volumes[number]
        known = [record for record in self.index if _first(record).volume == number]
        for record in known:
            row = table.peek(record.entry.key)
            gone = row is None or row[1].generation != _first(record).generation
            if gone and not record.pins:
                self.forget(record)
        volume.held_bytes -= self.cold.held_bytes(number)
        if len(self.volumes) > 1:
            others = [part for part in self.cold.parts() if part[0] != number]
            table = ColdTable([*others, (number, found.rows)], self._is_hot)
        self.cold = table
        volume.held_bytes += table.held_bytes(number)
        for record in list(self.index):
            self._drop_twin(record)
        leaving = [(r.entry.key, _first(r).generation) for r in self.index.leaving]
        for key, generation in (*volume.unnoted, *leaving):
            cold = table.peek(key)
            if cold is not None and (cold[0], cold[1].generation) == (number, generation):
                table.take(key)
                volume.held_bytes -= cold[1].nbytes
        volume.take_up(found)
        for record in list(self.index):
            self._bring(record.entry.parent)  # What is cold leaves first, so no parent may be.
        self.trim()

    def take_in(self, number: int, scanned: Scanned) -> None:
        """Take in what a sweep found in a directory beside what is known."""
        volume = self.volumes[number]
        volume.condemn(scanned.corrupt)
        volume.discard(scanned.useless)
        for row in scanned.rows:
            welcome = not self.holds(row.key) and row.nbytes <= volume.room_bytes
            volume.held_bytes += row.nbytes
            if not welcome:
                volume.let_go(row)  # The index may know it, where it was misread.
            else:
                volume.note_added(row)
                self._bring(row.parent)
                self._enter(number, row)

    def unknown(self, number: int, files: Sequence[FileInfo]) -> list[FileInfo]:
        """Return those of a directory's files that no record names and nothing removes."""
        return [file for file in files if not self._known(number, file)]

    def reserve(
        self, entry: Entry, namespace: bytes, codec: str, sizes: Mapping[ShardId, int]
    ) -> DiskRecord | None:
        """Make room for a chunk and return its filling record, pinned once for the writer.

        None refuses: no room beside what is pinned or still read, the parent is not on disk, or
        no directory can be written to.
        """
        assert not self.holds(entry.key), "reserved twice"
        if not has_place(self.volumes, entry.nbytes):
            return None
        if entry.parent is not None:
            self._bring(entry.parent)
            if self.index.get(entry.parent) is None:
                return None
        free = sum(volume.room_bytes for volume in self.volumes)
        for _ in range(TRIM_CHUNKS_MAX):
            if free >= entry.nbytes or not (left := self._drop_coldest()):
                break
            free += left
        victims = self._policy.admit(entry, self._clock.now())
        if victims is None:
            return None
        self._ranked_bytes += entry.nbytes
        self._evict_all(victims)
        self._placing = entry.key
        volume = make_room(self.volumes, entry.nbytes, self._evict_more)
        self._placing = None
        if volume is None:
            self._unrank(entry)
            return None
        generation = volume.files.new_generations(len(sizes))
        places = volume.places(entry.key, generation, sizes.items())
        record = DiskRecord(entry, namespace, codec, places)
        self.index.add(record)
        volume.held_bytes += entry.nbytes
        volume.writing_count += 1
        self.index.pin(record)
        return record

    def row(self, record: DiskRecord) -> Row:
        """Return what the index at rest keeps of a chunk, used now."""
        sizes = tuple((shard, place.nbytes) for shard, place in record.places.items())
        kind = Kind(record.namespace, record.codec, sizes)
        entry, generation = record.entry, _first(record).generation
        used_ms = wall_clock_ms()
        return Row(entry.key, entry.parent, entry.position, kind, generation, used_ms)

    def commit(self, record: DiskRecord) -> None:
        """Let readers have a written record, and drop the writer's pin."""
        volume = self.volume_of(record)
        volume.writing_count -= 1
        volume.write_succeeded()
        self.index.set_ready(record)
        self.index.unpin(record)

    def abort(self, record: DiskRecord) -> None:
        """Give up a record that could not be written, and drop the writer's pin."""
        self.volume_of(record).writing_count -= 1
        self.forget(record)
        self.index.unpin(record)

    def forget(self, record: DiskRecord) -> None:
        """Take a record out of sight; its files are unlinked once nobody reads them."""
        self._unrank(record.entry)
        self.index.detach(record)

    def displace(self, key: ChunkKey, shards: Collection[ShardId]) -> None:
        """Forget a chunk whose place another may take: it lacks shards or cannot be read."""
        self._bring(key)
        record = self.index.ready(key)
        if record is not None and not record.pins:
            volume = self.volume_of(record)
            elsewhere = any(other.writable for other in self.volumes if other is not volume)
            if record.places.keys() != shards or (not volume.readable and elsewhere):
                self.forget(record)

    def condemn(self, record: DiskRecord, shard: ShardId) -> None:
        """Take a record out of sight because one of its shards failed verification."""
        self._condemned.add(record.places[shard].path)
        self.forget(record)

    def touch(self, keys: Iterable[ChunkKey], features: Features) -> None:
        """Note an access to chunks of one sequence, given from its last to its first."""
        used: dict[int, list[ChunkKey]] = {}
        now = self._clock.now()
        for key in keys:
            self._bring(key)
            record = self.index.get(key)
            if record is not None:
                self._policy.touch(key, now, features)
                used.setdefault(_first(record).volume, []).append(key)
        for number, touched in used.items():
            self.volumes[number].note_used(touched)

    def trim(self) -> bool:
        """Let the coldest go, some at a time, where a bound has shrunk; True: more to do."""
        over = [volume for volume in self.volumes if volume.room_bytes < 0]
        for volume in over:
            # What left before is unlinked before more leaves.
            while volume.room_bytes < 0 and len(volume.unnoted) < TRIM_CHUNKS_MAX:
                if not self._evict_more():
                    return False
        return bool(over)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        self.index.check_integrity()
        for volume in self.volumes:
            records = [*self.index, *self.index.leaving]
            held = sum(r.entry.nbytes for r in records if _first(r).volume == volume.number)
            cold = self.cold.held_bytes(volume.number)
            if held + cold != volume.held_bytes:
                raise AssertionError(f"{volume.held_bytes} bytes counted, {held} + {cold} held")
        if any(record.entry.key in self.cold for record in self.index):
            raise AssertionError("a record is cold too")
        ranked = sum(record.entry.nbytes for record in self.index)
        if ranked != self._ranked_bytes:
            raise AssertionError(f"{self._ranked_bytes} bytes ranked, {ranked} held")

    def _pinned(self, key: ChunkKey) -> bool:
        return key == self._placing or self.index.pinned(key)

    def _is_hot(self, key: ChunkKey) -> bool:
        return self.index.get(key) is not None

    def _bring(self, above: ChunkKey | None) -> None:
        """Make records of a chunk and its ancestors that are cold, the first one first."""
        line: list[tuple[int, Row]] = []
        while above is not None and (taken := self.cold.take(above)) is not None:
            line.append(taken)
            above = taken[1].parent
        for number, row in reversed(line):
            self._enter(number, row)

    def _enter(self, number: int, row: Row) -> None:
        """Make a record of a chunk that lies in a directory and is counted there."""
        entry = Entry(row.key, row.parent, row.nbytes, row.position)
        places = self.volumes[number].row_places(row)
        victims = self._policy.admit(entry, self._clock.now())
        if victims is None:
            self.volumes[number].let_go(row)
            return
        self._ranked_bytes += entry.nbytes
        self._evict_all(victims)
        record = DiskRecord(entry, row.kind.namespace, row.kind.codec, places)
        self.index.add(record)
        self.index.set_ready(record)

    def _evict_more(self) -> bool:
        """Let at least one chunk go, from whichever directory; False: none may."""
        if self._drop_coldest():
            return True
        more_than_room = self.capacity_bytes - self._ranked_bytes + 1
        victims = self._policy.admit(Entry(ROOM, None, more_than_room, 0), self._clock.now())
        if not victims:
            return False
        self._policy.remove(ROOM)
        self._evict_all(victims)
        return True

    def _drop_coldest(self) -> int:
        """Let the chunk go that was not used for longest before the start; return its bytes."""
        coldest = self.cold.pop_coldest()
        if coldest is None:
            return 0
        number, row = coldest
        self.volumes[number].let_go(row)
        self._on_evict(row.key)
        return row.nbytes

    def _drop_twin(self, record: DiskRecord) -> None:
        """Take what is known already, or stored again meanwhile, out of the cold."""
        taken = self.cold.take(record.entry.key)
        if taken is None:
            return
        number, row = taken
        place = _first(record)
        if (place.volume, place.generation) == (number, row.generation):
            self.volumes[number].held_bytes -= row.nbytes  # The record's own, counted twice.
        else:
            self.volumes[number].let_go(row)

    def _unrank(self, entry: Entry) -> None:
        self._policy.remove(entry.key)
        self._ranked_bytes -= entry.nbytes

    def _known(self, number: int, file: FileInfo) -> bool:
        volume = self.volumes[number]
        named = parse_name(file.path)
        if volume.going(file.path) or named is None:
            return named is not None
        key = ChunkKey(named[0][:DIGEST_BYTES])
        cold, record = self.cold.peek(key), self.index.get(key)
        places = [] if cold is None else [*self.volumes[cold[0]].row_places(cold[1]).values()]
        for each in (*self.index.leaving, *((record,) if record is not None else ())):
            places += each.places.values()
        return any(place.path == file.path for place in places)

    def _evict_all(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            record = self.index.get(key)
            assert record is not None, "the policy holds what the index does not"
            assert record.pins == 0, "a pinned chunk never leaves"
            self._ranked_bytes -= record.entry.nbytes
            self.index.detach(record)
            self._on_evict(key)

    def _reclaim(self, record: DiskRecord) -> None:
        volume = self.volume_of(record)
        volume.held_bytes -= record.entry.nbytes
        volume.note_removed(record.entry.key, _first(record).generation)
        for place in record.places.values():
            if place.path in self._condemned:
                self._condemned.discard(place.path)
                volume.put_away(place)
            else:
                volume.remove([place])


def _first(record: DiskRecord) -> DiskPlace:
    """Return the place of a chunk's first shard; all of them lie in one directory."""
    return next(iter(record.places.values()))
