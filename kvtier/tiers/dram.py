"""The DRAM tier: an arena, an index and a policy that evicts at the moment of need.

A reservation evicts synchronously or is refused; nothing waits, spins or runs behind the scenes.
When the policy has made room in bytes but no slab has a slot of the size that is needed, the
coldest slab, of another size if possible, is emptied and given over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvtier.interfaces import Clock, EvictionPolicy
from kvtier.tiers.arena import Arena, Slab
from kvtier.tiers.index import Record, State, TierIndex
from kvtier.types import ChunkKey, Entry, Features, ShardId, Slot

PolicyFactory = Callable[[int, Callable[[ChunkKey], bool]], EvictionPolicy]
DramRecord = Record[Slot]


class DramTier:
    """Owns slots, records and their order of leaving. Used under the cache's lock.

    ``on_evict`` is called with every record that leaves to make room.
    """

    def __init__(
        self,
        arena: Arena,
        policy: PolicyFactory,
        clock: Clock,
        on_evict: Callable[[DramRecord], None],
    ) -> None:
        self.arena = arena
        self.index: TierIndex[Slot] = TierIndex(self._reclaim)
        self._policy = policy(arena.capacity_bytes, self.index.pinned)
        self._clock = clock
        self._on_evict = on_evict
        self._owners: dict[int, DramRecord] = {}  # by slot offset
        self._touched: dict[ChunkKey, float] = {}

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the arena."""
        return self.arena.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in slots that hold something or are about to."""
        return self.arena.used_bytes

    def reserve(
        self, entry: Entry, namespace: bytes, codec: str, sizes: Mapping[ShardId, int]
    ) -> DramRecord | None:
        """Make room for a chunk and return its filling record, pinned once for the filler.

        ``sizes`` are the shards' slot sizes and add up to ``entry.nbytes``. None refuses: what is
        pinned leaves no room. The caller ends with ``commit`` or ``abort``.
        """
        assert self.index.get(entry.key) is None, "reserved twice"
        now = self._clock.now()
        victims = self._policy.admit(entry, now)
        if victims is None:
            return None
        for victim in victims:
            self._evict(victim)
        places: dict[ShardId, Slot] = {}
        for shard, nbytes in sizes.items():
            slot = self.arena.allocate(nbytes)
            while slot is None and self._empty_coldest_slab(nbytes, entry):
                slot = self.arena.allocate(nbytes)
            if slot is None:
                self._policy.remove(entry.key)
                for taken in places.values():
                    self.arena.free(taken)
                return None
            places[shard] = slot
        record = DramRecord(entry, namespace, codec, places)
        self.index.add(record)
        self.index.pin(record)
        self._touched[entry.key] = now
        for slot in places.values():
            self._owners[slot.offset] = record
        return record

    def commit(self, record: DramRecord) -> None:
        """Let readers have a filled record, and drop the filler's pin."""
        self.index.set_ready(record)
        self.index.unpin(record)

    def abort(self, record: DramRecord) -> None:
        """Give up a record that could not be filled, and drop the filler's pin."""
        self.abandon(record)
        self.index.unpin(record)

    def abandon(self, record: DramRecord) -> None:
        """Take a record out of sight now; its slots return when the last pin goes."""
        self._policy.remove(record.entry.key)
        self._touched.pop(record.entry.key, None)
        self.index.detach(record)

    def leave(self, record: DramRecord) -> None:
        """Let a ready record that nobody has pinned leave now, as if it were evicted."""
        self._policy.remove(record.entry.key)
        self._evict(record.entry.key)

    def give_way(self, keys: Iterable[ChunkKey], below: TierIndex[Any]) -> bool:
        """Let the first of ``keys`` leave that nobody has pinned and that ``below`` holds too.

        For one long sequence that fills the tier: no policy evicts the ancestors of what comes in,
        but those that a lower tier holds stay reachable. False: none of them could leave.
        """
        for key in keys:
            record = self.index.ready(key)
            if record is not None and not record.pins and below.ready(key) is not None:
                self.leave(record)
                return True
        return False

    def touch(self, keys: Iterable[ChunkKey], features: Features) -> None:
        """Note an access to chunks of one sequence, given from its last to its first."""
        now = self._clock.now()
        for key in keys:
            if key in self._touched:
                self._touched[key] = now
                self._policy.touch(key, now, features)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where index, arena and owners do not agree."""
        self.index.check_integrity()
        self.arena.check_integrity()
        held = {slot.offset for record in self.index for slot in record.places.values()}
        lost = [o for o in held if o not in self._owners]
        given = {o for slab in self.arena.slabs() for o in slab.used_offsets()}
        if lost or given != set(self._owners):
            raise AssertionError("slots given out are not those that records hold")
        if set(self._touched) != {record.entry.key for record in self.index}:
            raise AssertionError("touch times are kept for other chunks than those held")

    def _evict(self, key: ChunkKey) -> None:
        record = self.index.get(key)
        assert record is not None, "the policy holds what the index does not"
        assert record.pins == 0, "a pinned chunk never leaves"
        self._touched.pop(key, None)
        self.index.detach(record)
        self._on_evict(record)

    def _reclaim(self, record: DramRecord) -> None:
        for slot in record.places.values():
            del self._owners[slot.offset]
            self.arena.free(slot)

    def _empty_coldest_slab(self, slot_bytes: int, entry: Entry) -> bool:
        """Evict everything in one slab for an entry; False when none can be emptied.

        The coldest of the other sizes; one of ``slot_bytes`` itself when none of those may go.
        """
        stays: set[ChunkKey] = set()
        above = self.index.get(entry.parent) if entry.parent is not None else None
        while above is not None:
            stays.add(above.entry.key)
            parent = above.entry.parent
            above = self.index.get(parent) if parent is not None else None
        candidates = [
            (slab.slot_bytes == slot_bytes, heat, slab.offset, slab)
            for slab in self.arena.slabs()
            if (heat := self._heat(slab, stays)) is not None
        ]
        if not candidates:
            return False
        slab = min(candidates)[-1]
        for offset in slab.used_offsets():
            owner = self._owners.get(offset)
            if owner is not None:  # A chunk with two slots here left with the first.
                self._policy.remove(owner.entry.key)
                self._evict(owner.entry.key)
        return True

    def _heat(self, slab: Slab, stays: set[ChunkKey]) -> float | None:
        """Return the time of the slab's latest access, or None when a chunk of it must stay."""
        offsets = slab.used_offsets()
        if not self._owners.keys() >= set(offsets):
            return None  # A slot of the chunk that room is being made for.
        owners = [self._owners[offset] for offset in offsets]
        if any(o.pins or o.state is not State.READY or o.entry.key in stays for o in owners):
            return None
        return max((self._touched[o.entry.key] for o in owners), default=0.0)
