"""The DRAM tier: an arena, an index and a policy that evicts at the moment of need.

A reservation evicts synchronously or is refused; nothing waits, spins or runs behind the scenes.
When the policy has made room in bytes but no slab has a slot of the size that is needed, a slab
of another size is emptied and given over: the emptiest of a size with more than one slab's worth
of free slots, else the coldest. When none can be, the coldest chunk with a slot of that size goes.

Nothing is moved, so a pin holds its slab where it is. A chunk of one shard that the policy admits
is refused only when no eviction could make room for it: no slot of its size is free or held by a
chunk that may leave, and between the slabs with a chunk that must stay (pinned, filling, leaving
with a pin, or an ancestor of what comes in) every range is shorter than the shard. A chunk of m
shards of at most n bytes that the policy admits is never refused while what lies outside the p
slabs with a chunk that must stay is m slabs and (p + m) n bytes or more. Either way but where the
system gives its owner no memory: then what the owner holds makes way, and nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from kvtier.interfaces import Clock, EvictionPolicy
from kvtier.tiers.arena import Arena
from kvtier.tiers.coldest import coldest_first
from kvtier.tiers.index import Record, State, TierIndex
from kvtier.tiers.window import Window
from kvtier.types import ChunkKey, Entry, Features, ShardId, Slot

PolicyFactory = Callable[[int, Callable[[ChunkKey], bool]], EvictionPolicy]
DramRecord = Record[Slot]


def _keeps_nothing(key: ChunkKey) -> bool:
    del key
    return False


def _nobody(namespace: bytes) -> bytes:
    del namespace
    return b""


class DramTier:
    """Owns slots, records and their order of leaving. Used under the cache's lock.

    ``on_evict`` is called with the key of every chunk that leaves to make room.
    """

    def __init__(
        self,
        arena: Arena,
        policy: PolicyFactory,
        clock: Clock,
        on_evict: Callable[[ChunkKey], None],
        keeps: Callable[[ChunkKey], bool] = _keeps_nothing,
        owner_of: Callable[[bytes], bytes] = _nobody,
    ) -> None:
        """What ``keeps`` tells of is never evicted, though nobody reads or writes it.

        The policy that the factory makes must know that by itself. ``owner_of`` a namespace is in
        whose part of the arena its chunks lie.
        """
        self.arena = arena
        #: Where what others lend is read, without a copy in the arena.
        self.window = Window(arena.capacity_bytes)
        self.index: TierIndex[Slot] = TierIndex(self._reclaim)
        self._policy = policy(arena.capacity_bytes, self.index.pinned)
        self._keeps = keeps
        self._owner_of = owner_of
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

    @property
    def staying_bytes(self) -> int:
        """Bytes of the chunks in the arena that may not leave now, counted one by one."""
        staying = (r for r in self.index if self._stays(r.entry.key))
        slots = (slot for record in staying for slot in record.places.values())
        return sum(slot.nbytes for slot in slots if not self.window.holds_slot(slot))

    def reserve(
        self, entry: Entry, namespace: bytes, codec: str, sizes: Mapping[ShardId, int]
    ) -> DramRecord | None:
        """Make room for a chunk and return its filling record, pinned once for the filler.

        ``sizes`` are the shards' slot sizes and add up to ``entry.nbytes``. None refuses: what is
        pinned leaves no room. The caller ends with ``commit`` or ``abort``.
        """
        assert self.index.get(entry.key) is None, "reserved twice"
        victims = self._policy.admit(entry, self._clock.now())
        if victims is None:
            return None
        for victim in victims:
            self._evict(victim)
        places = self._place(entry, sizes, self._owner_of(namespace))
        if places is None:
            self._policy.remove(entry.key)
            return None
        return self._filling(DramRecord(entry, namespace, codec, places))

    def borrow(
        self, entry: Entry, namespace: bytes, codec: str, sizes: Mapping[ShardId, int]
    ) -> DramRecord | None:
        """Return a filling record, pinned once, whose slots lie in the window; None: it is full.

        It takes nothing of the arena, and never becomes ready: the caller ends with ``abort``
        whatever comes of it, and whoever has pinned it by then reads on until it lets go.
        """
        assert self.index.get(entry.key) is None, "borrowed while it is here"
        places: dict[ShardId, Slot] = {}
        for shard, nbytes in sizes.items():
            slot = self.window.reserve(nbytes)
            if slot is None:
                for taken in places.values():
                    self.window.free(taken)
                return None
            places[shard] = slot
        return self._filling(DramRecord(entry, namespace, codec, places))

    def intact(self, record: DramRecord) -> bool:
        """Tell whether what was read of a record before was what had been verified.

        Always, but for what is lent: whoever lent it may be gone.
        """
        return self.window.intact(record.places.values())

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

    def give_way(self, keys: Iterable[ChunkKey], below: Callable[[ChunkKey], object]) -> bool:
        """Let the first of ``keys`` leave that nobody has pinned and that ``below`` finds too.

        For one long sequence that fills the tier: no policy evicts the ancestors of what comes in,
        but those that a lower tier holds stay reachable. False: none of them could leave.
        """
        for key in keys:
            record = self.index.ready(key)
            if record is not None and not self._stays(key) and below(key):
                self.leave(record)
                return True
        return False

    def coldest(self, namespaces: Collection[bytes]) -> list[ChunkKey]:
        """Return the chunks of some namespaces that may be read, coldest first, leaves first."""
        entries = [
            record.entry
            for record in self.index
            if record.state is State.READY and record.namespace in namespaces
        ]
        return coldest_first(entries, [self._touched[entry.key] for entry in entries])

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
        self.window.check_integrity()
        held = {slot.offset for record in self.index for slot in record.places.values()}
        lost = [o for o in held if o not in self._owners]
        given = {o for slab in self.arena.slabs() for o in slab.used} | self.window.offsets
        if lost or given != set(self._owners):
            raise AssertionError("slots given out are not those that records hold")
        if set(self._touched) != {record.entry.key for record in self.index}:
            raise AssertionError("touch times are kept for other chunks than those held")

    def _filling(self, record: DramRecord) -> DramRecord:
        """Take in a record that is to be filled, and pin it for whoever does."""
        self.index.add(record)
        self.index.pin(record)
        self._touched[record.entry.key] = self._clock.now()
        for slot in record.places.values():
            self._owners[slot.offset] = record
        return record

    def _stays(self, key: ChunkKey) -> bool:
        return self.index.pinned(key) or self._keeps(key)

    def _evict(self, key: ChunkKey) -> None:
        record = self.index.get(key)
        assert record is not None, "the policy holds what the index does not"
        assert record.pins == 0, "a pinned chunk never leaves"
        self._touched.pop(key, None)
        self.index.detach(record)
        self._on_evict(key)

    def _reclaim(self, record: DramRecord) -> None:
        for slot in record.places.values():
            del self._owners[slot.offset]
            if self.window.holds_slot(slot):
                self.window.free(slot)
            else:
                self.arena.free(slot)

    def _place(
        self, entry: Entry, sizes: Mapping[ShardId, int], owner: bytes
    ) -> dict[ShardId, Slot] | None:
        """Give every shard a slot, in the order of ``sizes``, or take none."""
        places: dict[ShardId, Slot] = {}
        # Large slots first: small ones would stand in the way of the neighbours they need.
        for shard in sorted(sizes, key=sizes.__getitem__, reverse=True):
            slot = self.arena.allocate(sizes[shard], owner)
            while slot is None and self._make_way(sizes[shard], entry, owner):
                slot = self.arena.allocate(sizes[shard], owner)
            if slot is None:
                for taken in places.values():
                    self.arena.free(taken)
                return None
            places[shard] = slot
        return {shard: places[shard] for shard in sizes}

    def _make_way(self, slot_bytes: int, entry: Entry, owner: bytes) -> bool:
        """Evict what stands in the way of a slot for an entry; False when nothing more may go.

        Everything in one slab of another size or owner, so that it changes hands: the emptiest of
        a size that has slots to spare, else the coldest. When none can be emptied, or the system
        gives an owner no memory, the coldest chunk that has a slot of this size and owner.
        """
        stays: set[ChunkKey] = set()
        above = self.index.get(entry.parent) if entry.parent is not None else None
        while above is not None:
            stays.add(above.entry.key)
            parent = above.entry.parent
            above = self.index.get(parent) if parent is not None else None
        withheld = self.arena.withholds(slot_bytes)
        others: list[tuple[bool, float, int, set[ChunkKey]]] = []
        own: list[tuple[float, int, set[ChunkKey]]] = []
        for slab in self.arena.slabs():
            leavers = {o: key for o in slab.used if (key := self._leaver(o, stays)) is not None}
            if slab.slot_bytes == slot_bytes and slab.owner == owner:
                own += [(self._touched[key], o, {key}) for o, key in leavers.items()]
            elif len(leavers) == len(slab.used) and not withheld:
                packed = not self.arena.spare(slab.slot_bytes, slab.owner)
                heat = max(self._touched[key] for key in leavers.values())
                rank = heat if packed else len(slab.used) / slab.slot_count
                others.append((packed, rank, slab.offset, set(leavers.values())))
        if not others and not own:
            return False
        for key in min(others)[-1] if others else min(own)[-1]:
            self._policy.remove(key)
            self._evict(key)
        return True

    def _leaver(self, offset: int, stays: set[ChunkKey]) -> ChunkKey | None:
        """Return whose slot this is, or None when it must stay."""
        owner = self._owners.get(offset)
        if owner is None:
            return None  # A slot of the chunk that room is being made for.
        key = owner.entry.key
        busy = owner.pins or owner.state is not State.READY
        may_leave = not (busy or key in stays or self._keeps(key))
        return key if may_leave else None
