"""What lies in a remote that nobody else writes to: an index and a policy within a bound.

The remote says what is there once, after a start; from then on everything that comes or goes does
so through here. Bytes are counted until their deletion was sent: what a write displaces is deleted
before it. A remote that lets chunks go by itself makes the books say more than there is, never
less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvtier.errors import KVTierError
from kvtier.interfaces import Clock, EvictionPolicy
from kvtier.keys import shard_key, split_shard_key
from kvtier.tiers.index import Record, State, TierIndex
from kvtier.types import ChunkKey, Entry, Features, KeyInfo, ShardId, ShardKey

PolicyFactory = Callable[[int, Callable[[ChunkKey], bool]], EvictionPolicy]


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """One shard's object."""

    key: ShardKey
    nbytes: int


RemoteRecord = Record[RemotePlace]


class Holdings:
    """Owns index, policy and what waits to be deleted. Used under the cache's lock.

    ``on_evict`` is called with the key of every chunk that leaves to make room.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: PolicyFactory,
        clock: Clock,
        on_evict: Callable[[ChunkKey], None],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.index: TierIndex[RemotePlace] = TierIndex(self._reclaim)
        self.listed = False
        self._policy = policy(capacity_bytes, self.index.pinned)
        self._clock = clock
        self._on_evict = on_evict
        self._held_bytes = 0
        self._going: list[RemotePlace] = []

    @property
    def used_bytes(self) -> int:
        """Bytes that lie there, those included that wait to be deleted."""
        return self._held_bytes + sum(place.nbytes for place in self._going)

    @property
    def deletions_due(self) -> bool:
        """True when something waits to be deleted."""
        return bool(self._going)

    def adopt(self, found: Iterable[KeyInfo]) -> None:
        """Take in a listing; what is no shard of ours, or beyond the bound, is deleted.

        Parents are not told by a listing: what it names leaves in any order.
        """
        chunks: dict[ChunkKey, dict[ShardId, RemotePlace]] = {}
        for info in found:
            place = RemotePlace(ShardKey(info.key), info.nbytes)
            try:
                chunk, shard = split_shard_key(info.key)
            except KVTierError:
                continue  # Somebody else's, and not ours to count or delete.
            chunks.setdefault(chunk, {})[shard] = place
        for key, places in chunks.items():
            if self.index.get(key) is not None:
                continue
            nbytes = sum(place.nbytes for place in places.values())
            entry = Entry(key, None, nbytes, 0)
            victims = self._policy.admit(entry, self._clock.now())
            if victims is None:
                self._going += places.values()
                continue
            self._evict_all(victims)
            record = RemoteRecord(entry, b"", "", places)
            self.index.add(record)
            self.index.set_ready(record)
            self._held_bytes += nbytes
        self.listed = True

    def reserve(
        self,
        entry: Entry,
        namespace: bytes,
        codec: str,
        sizes: Mapping[ShardId, int],
    ) -> RemoteRecord | None:
        """Make room for a chunk and return its filling record, pinned once for the writer.

        None refuses: no room beside what is pinned or still read.
        """
        assert self.index.get(entry.key) is None, "reserved twice"
        victims = self._policy.admit(entry, self._clock.now())
        if victims is None:
            return None
        self._evict_all(victims)
        if self._held_bytes + entry.nbytes > self.capacity_bytes:
            self._policy.remove(entry.key)
            return None
        places = {
            shard: RemotePlace(shard_key(entry.key, shard), size) for shard, size in sizes.items()
        }
        record = RemoteRecord(entry, namespace, codec, places)
        self.index.add(record)
        self.index.pin(record)
        self._held_bytes += entry.nbytes
        return record

    def commit(self, record: RemoteRecord) -> None:
        """Let readers have a written record, and drop the writer's pin."""
        self.index.set_ready(record)
        self.index.unpin(record)

    def abort(self, record: RemoteRecord) -> None:
        """Give up a record that could not be written, and drop the writer's pin."""
        self.forget(record)
        self.index.unpin(record)

    def forget(self, record: RemoteRecord) -> None:
        """Take a record out of sight; its objects are deleted once nobody reads them."""
        self._policy.remove(record.entry.key)
        self.index.detach(record)

    def touch(self, keys: Iterable[ChunkKey], features: Features) -> None:
        """Note an access to chunks of one sequence, given from its last to its first."""
        now = self._clock.now()
        for key in keys:
            if self.index.get(key) is not None:
                self._policy.touch(key, now, features)

    def take_deletions(self) -> list[RemotePlace]:
        """Hand over what is to be deleted before anything else is written.

        A place that was reserved again meanwhile is not among it: its write replaces it.
        """
        going, self._going = self._going, []
        return [place for place in going if not self._reserved_again(place)]

    def return_deletions(self, places: Iterable[RemotePlace]) -> None:
        """Take back what was not deleted, for another try."""
        self._going = [*places, *self._going]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        self.index.check_integrity()
        held = sum(record.entry.nbytes for record in (*self.index, *self.index.leaving))
        if held != self._held_bytes:
            raise AssertionError(f"{self._held_bytes} bytes counted, {held} held")

    def _reserved_again(self, place: RemotePlace) -> bool:
        record = self.index.get(split_shard_key(place.key)[0])
        return record is not None and place.key in {p.key for p in record.places.values()}

    def _evict_all(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            record = self.index.get(key)
            assert record is not None, "the policy holds what the index does not"
            assert record.state is State.READY, "only what is whole is evicted"
            self.index.detach(record)
            self._on_evict(key)

    def _reclaim(self, record: RemoteRecord) -> None:
        self._held_bytes -= record.entry.nbytes
        self._going += record.places.values()
