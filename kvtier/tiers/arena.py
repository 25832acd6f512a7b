"""One mapping of memory, cut into slabs of equal slots: where shards lie in DRAM.

A slab holds slots of exactly one shard size and is as long as a whole number of them, so no slab
has a tail that fits nothing. A slab whose last slot is freed gives its extent back, and
neighbouring extents join. Where the memory has owners, a slab is one owner's, and what follows
holds for each pair of owner and size::

    | slab: 5 x 11.8 MB | slab: 5 x 11.8 MB | free extent | slab: 16 x 4 MB | free extent |

**Waste.** A byte is wasted for a size when nobody holds it and a slot of that size cannot have
it: it lies in a free slot of another size, or in an extent shorter than the slot. A size is live
while it has a slab; *slab(t)* is the full length of a slab of size t. Three things hold after
every call, whatever was allocated and freed before:

1. A slab is made only when every slot of its size is held, so the slabs of size t are together
   less than one *slab(t)* longer than the most that was ever held of t at once.
2. A slot of size s is refused only when no slot of s is free and every extent is shorter than s.
   No two extents touch, so there are at most as many as slabs, and one more.
3. Hence, while no slab has run empty there is one extent, and while each size holds as much as it
   ever did (chunks are replaced by chunks of their layout), a refusal leaves less than one slab
   per live size unused.

No allocator that leaves what it gave out where it is can promise 3 for every order of frees
(Robson, "Bounds for some functions concerning dynamic storage allocation", J. ACM 21(3), 1974):
free slots may lie scattered over the slabs of one size while another starves. So the arena says
which sizes have more than one slab's worth of free slots (``spare``), and the tier empties their
emptiest slab before it gives up one of a size that is well packed.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass, field

from kvtier.constants import ALIGN_BYTES, SLAB_BYTES_DEFAULT
from kvtier.errors import ConfigError
from kvtier.tiers.extents import Extents
from kvtier.tiers.memory import Memory, Progress
from kvtier.tiers.owned_memory import OwnedMemory, Region
from kvtier.types import Slot

# A slab takes at most this share of the arena, so that a chunk whose shards have several sizes
# finds a slab for each of them in a small one too.
_SLABS_MIN = 4


@dataclass(slots=True)
class Slab:
    """Consecutive slots of one size: those that are free and those that are given out."""

    offset: int
    slot_bytes: int
    slot_count: int
    owner: bytes
    free: list[int]
    used: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Length of the slab's extent."""
        return self.slot_bytes * self.slot_count

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are given out."""
        return self.slot_bytes * len(self.used)


@dataclass(slots=True)
class _Size:
    """What is known of one live size.

    ``open_offsets`` is a heap of the slabs with a free slot. It may name slabs that are gone; a
    slab is made only once the heap is empty, so it never names one twice.
    """

    slab_count: int = 0
    free_count: int = 0
    open_offsets: list[int] = field(default_factory=list)


class Arena:
    """Owns the memory and says which bytes of it are whose. Used under the cache's lock.

    ``allocate`` and ``free`` take O(log n) of the slabs (a slot of a slab that is new or goes
    also a move of n pointers: 20 microseconds at 100,000 slabs). With ``shared`` the memory is a
    memfd that workers in other processes map by ``handle``. With ``owner``, whose it is at first,
    it is made of files of owners; see ``OwnedMemory``. ``slab_bytes`` is what a slab strives
    for, less in an arena of few slabs; one that needs more for a single slot is longer. Mapping
    blocks; see ``Memory`` for ``progress`` and for the ``ConfigError`` of too large an arena.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int = SLAB_BYTES_DEFAULT,
        shared: bool = False,
        owner: bytes | None = None,
        progress: Progress | None = None,
    ) -> None:
        capacity_bytes -= capacity_bytes % ALIGN_BYTES
        if capacity_bytes <= 0:
            raise ConfigError(f"arena of {capacity_bytes} bytes; at least {ALIGN_BYTES} are needed")
        self._memory: Memory | OwnedMemory
        if owner is None:
            self._memory = Memory(capacity_bytes, shared=shared, progress=progress)
        else:
            assert not shared, "workers would map what is of several files"
            self._memory = OwnedMemory(capacity_bytes, owner, progress=progress)
        self.memory = self._memory.view
        self.handle = self._memory.handle
        #: Pages of 2 MiB: O_DIRECT at full speed needs no detour over memory that has them.
        self.huge = self._memory.huge
        self.capacity_bytes = len(self.memory)
        self._slab_bytes = min(slab_bytes, self.capacity_bytes // _SLABS_MIN)
        self._used_bytes = 0
        self._extents = Extents(self.capacity_bytes)
        self._slabs: dict[int, Slab] = {}  # by offset
        self._sizes: dict[tuple[bytes, int], _Size] = {}  # by owner and slot size
        self._offsets: list[int] = []  # of all slabs, sorted: which slab a slot is in

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are given out."""
        return self._used_bytes

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes; the caller holds a pin for as long as it uses them."""
        return self.memory[slot.offset : slot.offset + slot.nbytes]

    def region_at(self, offset: int) -> Region | None:
        """Return the owner's file that a byte lies in; None: nobody may map it."""
        memory = self._memory
        return memory.region_at(offset) if isinstance(memory, OwnedMemory) else None

    def allocate(self, nbytes: int, owner: bytes = b"") -> Slot | None:
        """Give out a slot of exactly ``nbytes`` (a multiple of 4096), or None: no room as is.

        The lowest slab that has one gives it, so that slabs high up run empty. ``owner`` is
        whose it is to be, where the memory has owners.
        """
        assert nbytes > 0, "an empty slot"
        assert nbytes % ALIGN_BYTES == 0, "slots are 4096-aligned"
        slab = self._open_slab(owner, nbytes) or self._new_slab(owner, nbytes)
        if slab is None:
            return None
        offset = slab.free.pop()
        slab.used.add(offset)
        size = self._sizes[owner, nbytes]
        size.free_count -= 1
        if not slab.free:
            heapq.heappop(size.open_offsets)
        self._used_bytes += nbytes
        return Slot(offset, nbytes)

    def free(self, slot: Slot) -> None:
        """Take a slot back. An empty slab gives up its extent to whatever size comes next."""
        slab = self._slab_of(slot)
        size = self._sizes[slab.owner, slab.slot_bytes]
        if not slab.free:
            heapq.heappush(size.open_offsets, slab.offset)
        slab.used.remove(slot.offset)
        slab.free.append(slot.offset)
        size.free_count += 1
        self._used_bytes -= slot.nbytes
        if not slab.used:
            self._drop_slab(slab)

    def slabs(self) -> list[Slab]:
        """Return the live slabs, for the tier to choose one that shall be emptied."""
        return list(self._slabs.values())

    def withholds(self, slot_bytes: int) -> bool:
        """Tell whether there is room for a slab that ``allocate`` did not make.

        The system would not give the memory to its owner: more room is of no use.
        """
        return self._extents.hold(slot_bytes)

    def spare(self, slot_bytes: int, owner: bytes = b"") -> bool:
        """Tell whether a size has more than one slab's worth of free slots."""
        size = self._sizes.get((owner, slot_bytes))
        return size is not None and size.free_count > self._slot_count(slot_bytes)

    def close(self) -> None:
        """Give the memory back. Every view given out must be gone or unused; see ``Memory``."""
        self._memory.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless slabs and extents cover the memory exactly once."""
        spans = [(offset, nbytes, True) for offset, nbytes in self._extents.spans()]
        spans += [(s.offset, s.nbytes, False) for s in self._slabs.values()]
        position, after_extent = 0, False
        for offset, nbytes, extent in sorted(spans):
            if offset != position or nbytes <= 0:
                raise AssertionError(f"a gap or overlap at offset {position} of the arena")
            if extent and after_extent:
                raise AssertionError(f"extents that touch at offset {position}")
            position, after_extent = position + nbytes, extent
        if position != self.capacity_bytes or sorted(self._slabs) != self._offsets:
            raise AssertionError("slabs do not add up to the arena")
        if sum(s.used_bytes for s in self._slabs.values()) != self._used_bytes:
            raise AssertionError("slots given out do not add up to the bytes in use")
        for slab in self._slabs.values():
            slots = {slab.offset + n * slab.slot_bytes for n in range(slab.slot_count)}
            if not slab.used or {*slab.free} | slab.used != slots:
                raise AssertionError(f"slab at {slab.offset} has lost a slot or is kept empty")
            if len(slab.free) + len(slab.used) != slab.slot_count:
                raise AssertionError(f"slab at {slab.offset} has a slot twice")
        self._check_sizes()
        if isinstance(self._memory, OwnedMemory):
            self._memory.check_integrity()

    def _check_sizes(self) -> None:
        for (owner, slot_bytes), size in self._sizes.items():
            alike = (s for s in self._slabs.values() if s.owner == owner)
            slabs = [s for s in alike if s.slot_bytes == slot_bytes]
            counted = (len(slabs), sum(len(s.free) for s in slabs))
            if counted != (size.slab_count, size.free_count) or not slabs:
                raise AssertionError(f"slots of {slot_bytes} bytes: {size}, but {counted}")
            live = {s.offset for s in slabs}
            listed = sorted(offset for offset in size.open_offsets if offset in live)
            if listed != sorted(s.offset for s in slabs if s.free):
                raise AssertionError(f"slabs with a free slot of {slot_bytes}: {listed} are listed")
        if len({(s.owner, s.slot_bytes) for s in self._slabs.values()}) != len(self._sizes):
            raise AssertionError("a live size is not known")

    def _slot_count(self, slot_bytes: int) -> int:
        """Return the slots of a slab that has its full length."""
        return max(1, self._slab_bytes // slot_bytes)

    def _slab_of(self, slot: Slot) -> Slab:
        before = bisect.bisect_right(self._offsets, slot.offset)
        assert before > 0, "a slot of no slab"
        slab = self._slabs[self._offsets[before - 1]]
        assert slot.offset < slab.offset + slab.nbytes, "a slot of no slab"
        assert slab.slot_bytes == slot.nbytes, "a slot of another size"
        assert slot.offset in slab.used, "freed twice, or not a slot's start"
        return slab

    def _open_slab(self, owner: bytes, slot_bytes: int) -> Slab | None:
        """Return the lowest slab with a free slot of this size."""
        size = self._sizes.get((owner, slot_bytes))
        while size is not None and size.open_offsets:
            slab = self._slabs.get(size.open_offsets[0])
            if slab is not None and (slab.owner, slab.slot_bytes) == (owner, slot_bytes):
                return slab
            heapq.heappop(size.open_offsets)
        return None

    def _new_slab(self, owner: bytes, slot_bytes: int) -> Slab | None:
        extent = self._extents.take(slot_bytes, self._slot_count(slot_bytes))
        if extent is None:
            return None
        offset, count = extent
        memory = self._memory
        if isinstance(memory, OwnedMemory) and not memory.own(offset, count * slot_bytes, owner):
            self._extents.give(offset, count * slot_bytes)
            return None
        slots = range(offset, offset + count * slot_bytes, slot_bytes)
        slab = self._slabs[offset] = Slab(offset, slot_bytes, count, owner, [*reversed(slots)])
        bisect.insort(self._offsets, offset)
        size = self._sizes.setdefault((owner, slot_bytes), _Size())
        size.slab_count += 1
        size.free_count += count
        size.open_offsets.append(offset)  # The heap was empty.
        return slab

    def _drop_slab(self, slab: Slab) -> None:
        del self._slabs[slab.offset]
        del self._offsets[bisect.bisect_left(self._offsets, slab.offset)]
        size = self._sizes[slab.owner, slab.slot_bytes]
        size.slab_count -= 1
        size.free_count -= slab.slot_count
        if not size.slab_count:
            del self._sizes[slab.owner, slab.slot_bytes]
        self._extents.give(slab.offset, slab.nbytes)
