"""What one tier holds: records by chunk, their state and who has them pinned.

A record passes through ``absent → filling → ready → leaving``. Absent is no record; what is not
ready is never given to a reader; what is leaving has no key any more and keeps its place until
the last pin is gone. This module alone changes pin counts.

::

    add ──► FILLING ──ready──► READY ──detach──► LEAVING ──last unpin──► reclaimed
               └────────────────detach──────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvtier.obs.events import EventLog
from kvtier.types import ChunkKey, Entry, ShardId, Tier

PlaceT = TypeVar("PlaceT")


class State(StrEnum):
    """Where a record stands between being reserved and being reclaimed."""

    FILLING = "filling"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Record(Generic[PlaceT]):
    """One chunk in one tier. ``places`` says where each of its shards lies."""

    entry: Entry
    namespace: bytes
    codec: str
    places: dict[ShardId, PlaceT]
    state: State = State.FILLING
    pins: int = 0


class Lease(Generic[PlaceT]):
    """Pins records until ``release``. The holder releases it exactly as often as it likes."""

    def __init__(self, index: TierIndex[PlaceT], records: Iterable[Record[PlaceT]]) -> None:
        self._index = index
        self.records = tuple(records)
        self._held = True
        for record in self.records:
            index.pin(record)

    def release(self) -> None:
        """Unpin. A second call does nothing, so that every path of an owner may call it."""
        if self._held:
            self._held = False
            for record in self.records:
                self._index.unpin(record)


class TierIndex(Generic[PlaceT]):
    """Records of one tier. Owned by the tier, used under the cache's lock.

    ``reclaim`` is called with a record that has left and that nobody reads or writes any more;
    it gives the record's places back to the medium.
    """

    def __init__(self, reclaim: Callable[[Record[PlaceT]], None]) -> None:
        self._reclaim = reclaim
        self._records: dict[ChunkKey, Record[PlaceT]] = {}
        self._leaving: set[Record[PlaceT]] = set()
        self._pinned_count = 0
        self._bytes: dict[bytes, int] = {}  # By namespace.
        self._events: EventLog | None = None
        self._tier = Tier.DRAM

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record[PlaceT]]:
        return iter(self._records.values())

    @property
    def pinned_count(self) -> int:
        """Chunks with at least one pin, those that are leaving included."""
        return self._pinned_count

    @property
    def leaving_count(self) -> int:
        """Chunks without a key that still occupy their place."""
        return len(self._leaving)

    @property
    def leaving(self) -> Iterator[Record[PlaceT]]:
        """Chunks without a key that still occupy their place."""
        return iter(self._leaving)

    def watch(self, events: EventLog | None, tier: Tier) -> None:
        """From now on note in ``events``, if any, what comes and goes. The index is empty."""
        assert not self._records, "watched from the start"
        self._events, self._tier = events, tier

    @property
    def namespaces(self) -> Collection[bytes]:
        """The namespaces of which it holds something."""
        return self._bytes.keys()

    def bytes_of(self, namespace: bytes) -> int:
        """Return the bytes of a namespace's chunks, those that are filling or leaving included."""
        return self._bytes.get(namespace, 0)

    def get(self, key: ChunkKey) -> Record[PlaceT] | None:
        """Return the record under a key in whatever state; a lookup prolongs nothing."""
        return self._records.get(key)

    def ready(self, key: ChunkKey) -> Record[PlaceT] | None:
        """Return the record under a key if it may be read."""
        record = self._records.get(key)
        return record if record is not None and record.state is State.READY else None

    def pinned(self, key: ChunkKey) -> bool:
        """Tell whether a chunk must stay: it is read, written or not filled yet."""
        record = self._records.get(key)
        return record is not None and (record.pins > 0 or record.state is State.FILLING)

    def add(self, record: Record[PlaceT]) -> None:
        """Take in a record that is filling."""
        assert record.state is State.FILLING, "a record starts by being filled"
        assert record.entry.key not in self._records, "a key is added once"
        self._records[record.entry.key] = record
        self._bytes[record.namespace] = self.bytes_of(record.namespace) + record.entry.nbytes
        if self._events is not None:
            self._events.added(record.entry.key)

    def set_ready(self, record: Record[PlaceT]) -> None:
        """Let readers have a record whose every byte is in place."""
        assert record.state is State.FILLING, f"ready from {record.state}"
        record.state = State.READY
        if self._events is not None:
            self._events.ready(record.entry.key, self._tier)

    def lease(self, records: Iterable[Record[PlaceT]]) -> Lease[PlaceT]:
        """Pin records together."""
        return Lease(self, records)

    def pin(self, record: Record[PlaceT]) -> None:
        """Count one more reader or writer."""
        record.pins += 1
        if record.pins == 1:
            self._pinned_count += 1

    def unpin(self, record: Record[PlaceT]) -> None:
        """Count one reader or writer less; the last one out reclaims a record that has left."""
        assert record.pins > 0, "unpinned more often than pinned"
        record.pins -= 1
        if record.pins > 0:
            return
        self._pinned_count -= 1
        if record.state is State.LEAVING:
            self._leaving.remove(record)
            self._give_back(record)

    def detach(self, record: Record[PlaceT]) -> None:
        """Take a record's key away; its place is reclaimed once nobody has it pinned."""
        assert record.state is not State.LEAVING, "detached twice"
        del self._records[record.entry.key]
        record.state = State.LEAVING
        if self._events is not None:
            self._events.removed(record.entry.key, self._tier)
        if record.pins:
            self._leaving.add(record)
        else:
            self._give_back(record)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        for key, record in self._records.items():
            if record.entry.key != key or record.state is State.LEAVING or record.pins < 0:
                raise AssertionError(f"record of {key.hex()} is {record.state}, {record.pins} pins")
        for record in self._leaving:
            if record.state is not State.LEAVING or record.pins <= 0:
                raise AssertionError("a record that has left is kept for nobody")
        pinned = sum(r.pins > 0 for r in self._records.values()) + len(self._leaving)
        if pinned != self._pinned_count:
            raise AssertionError(f"{self._pinned_count} pinned chunks counted, {pinned} found")
        nbytes: dict[bytes, int] = {}
        for record in (*self._records.values(), *self._leaving):
            nbytes[record.namespace] = nbytes.get(record.namespace, 0) + record.entry.nbytes
        if nbytes != self._bytes:
            raise AssertionError(f"bytes by namespace: {self._bytes} counted, {nbytes} found")

    def _give_back(self, record: Record[PlaceT]) -> None:
        """Have a place reclaimed that nobody uses any more."""
        left = self._bytes[record.namespace] - record.entry.nbytes
        if left:
            self._bytes[record.namespace] = left
        else:
            del self._bytes[record.namespace]
        self._reclaim(record)
