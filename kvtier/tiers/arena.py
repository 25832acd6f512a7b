"""One mapping of memory, cut into slabs of equal slots: where shards lie in DRAM.

A slab holds slots of exactly one shard size and is as long as a whole number of them, so no slab
has a tail that fits nothing. A slab whose last slot is freed gives its extent back, and
neighbouring extents join::

    | slab: 5 x 11.8 MB | slab: 5 x 11.8 MB | free extent | slab: 16 x 4 MB | free extent |

Memory is mapped and touched once (a fresh page costs microseconds, at the worst possible moment)
and in huge pages where the kernel gives them: O_DIRECT into 4 KiB pages runs at a fifth of the
speed.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import os
from dataclasses import dataclass, field

from kvtier.constants import ALIGN_BYTES, HUGE_PAGE_BYTES, MIB, SLAB_BYTES_DEFAULT
from kvtier.errors import ConfigError
from kvtier.types import Slot

# Linux 5.14: fault pages in without reading or writing them. Not in Python's mmap module.
_MADV_POPULATE_WRITE = 23
_POPULATE_STEP_BYTES = 256 * MIB
# A slab takes at most this share of the arena, so that a chunk whose shards have several sizes
# finds a slab for each of them in a small one too.
_SLABS_MIN = 4


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """How another process of this host maps a shared arena. Plain data."""

    path: str
    nbytes: int


def map_arena(handle: ArenaHandle) -> memoryview:
    """Map a shared arena that another process owns, readable and writable.

    The mapping lives as long as the view. Raises ``OSError`` when the owner is gone.
    """
    descriptor = os.open(handle.path, os.O_RDWR)
    try:
        if os.fstat(descriptor).st_size != handle.nbytes:
            raise FileNotFoundError(errno.ENOENT, "the arena's owner is gone", handle.path)
        return memoryview(mmap.mmap(descriptor, handle.nbytes))
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class Slab:
    """Consecutive slots of one size. ``free`` holds offsets, the lowest last."""

    offset: int
    slot_bytes: int
    slot_count: int
    free: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Length of the slab's extent."""
        return self.slot_bytes * self.slot_count

    def used_offsets(self) -> list[int]:
        """Offsets of the slots that are given out."""
        free = set(self.free)
        end = self.offset + self.nbytes
        return [o for o in range(self.offset, end, self.slot_bytes) if o not in free]


class Arena:
    """Owns the memory and says which bytes of it are whose. Used under the cache's lock.

    With ``shared`` the memory is a memfd that workers in other processes map by ``handle``.
    ``slab_bytes`` is what a slab strives for, less in an arena of few slabs; one that needs more
    for a single slot is longer.
    """

    def __init__(
        self, capacity_bytes: int, *, slab_bytes: int = SLAB_BYTES_DEFAULT, shared: bool = False
    ) -> None:
        capacity_bytes -= capacity_bytes % ALIGN_BYTES
        if capacity_bytes <= 0:
            raise ConfigError(f"arena of {capacity_bytes} bytes; at least {ALIGN_BYTES} are needed")
        self.capacity_bytes = capacity_bytes
        self._slab_bytes = min(slab_bytes, capacity_bytes // _SLABS_MIN)
        self._descriptor = os.memfd_create("kvtier-arena") if shared else -1
        self._mapping = _map(capacity_bytes, self._descriptor)
        self.memory = memoryview(self._mapping)
        self.handle: ArenaHandle | None = None
        if shared:
            self.handle = ArenaHandle(f"/proc/{os.getpid()}/fd/{self._descriptor}", capacity_bytes)
        self._extents: list[tuple[int, int]] = [(0, capacity_bytes)]  # (offset, nbytes), sorted
        self._slabs: dict[int, Slab] = {}  # by offset
        self._by_size: dict[int, set[int]] = {}  # offsets of slabs with a free slot
        self._offsets: list[int] = []  # of all slabs, sorted: which slab a slot is in

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are given out."""
        return sum((s.slot_count - len(s.free)) * s.slot_bytes for s in self._slabs.values())

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes; the caller holds a pin for as long as it uses them."""
        return self.memory[slot.offset : slot.offset + slot.nbytes]

    def allocate(self, nbytes: int) -> Slot | None:
        """Give out a slot of exactly ``nbytes`` (a multiple of 4096), or None: no room as is."""
        assert nbytes > 0, "an empty slot"
        assert nbytes % ALIGN_BYTES == 0, "slots are 4096-aligned"
        open_slabs = self._by_size.get(nbytes)
        slab = self._slabs[min(open_slabs)] if open_slabs else self._new_slab(nbytes)
        if slab is None:
            return None
        offset = slab.free.pop()
        if not slab.free:
            self._by_size[nbytes].discard(slab.offset)
        return Slot(offset, nbytes)

    def free(self, slot: Slot) -> None:
        """Take a slot back. An empty slab gives up its extent to whatever size comes next."""
        slab = self._slab_of(slot)
        assert slot.offset not in slab.free, "freed twice"
        slab.free.append(slot.offset)
        self._by_size.setdefault(slab.slot_bytes, set()).add(slab.offset)
        if len(slab.free) == slab.slot_count:
            self._drop_slab(slab)

    def slabs(self) -> list[Slab]:
        """Return the live slabs, for the tier to choose one that shall be emptied."""
        return list(self._slabs.values())

    def close(self) -> None:
        """Give the memory back. Every view given out must be gone or unused.

        A view that is still alive keeps the mapping, but not the pages of it that nobody shares:
        they read as zeros. A second call does nothing.
        """
        if self._mapping.closed:
            return
        self._mapping.madvise(mmap.MADV_DONTNEED)
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._mapping.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless slabs and extents cover the memory exactly once."""
        spans = self._extents + [(s.offset, s.nbytes) for s in self._slabs.values()]
        position = 0
        for offset, nbytes in sorted(spans):
            if offset != position or nbytes <= 0:
                raise AssertionError(f"a gap or overlap at offset {position} of the arena")
            position += nbytes
        if position != self.capacity_bytes or sorted(self._slabs) != self._offsets:
            raise AssertionError("slabs do not add up to the arena")
        for slab in self._slabs.values():
            listed = slab.offset in self._by_size.get(slab.slot_bytes, set())
            if listed != bool(slab.free) or len(set(slab.free)) != len(slab.free):
                raise AssertionError(f"slab at {slab.offset} is listed wrongly")

    def _slab_of(self, slot: Slot) -> Slab:
        before = bisect.bisect_right(self._offsets, slot.offset)
        assert before > 0, "a slot of no slab"
        slab = self._slabs[self._offsets[before - 1]]
        assert slot.offset < slab.offset + slab.nbytes, "a slot of no slab"
        assert slab.slot_bytes == slot.nbytes, "a slot of another size"
        assert (slot.offset - slab.offset) % slab.slot_bytes == 0, "not a slot's start"
        return slab

    def _new_slab(self, slot_bytes: int) -> Slab | None:
        wanted = max(1, self._slab_bytes // slot_bytes)
        for i, (offset, nbytes) in enumerate(self._extents):
            count = min(wanted, nbytes // slot_bytes)
            if count == 0:
                continue
            slab = Slab(offset, slot_bytes, count)
            slab.free = list(range(offset, offset + slab.nbytes, slot_bytes))[::-1]
            rest = (offset + slab.nbytes, nbytes - slab.nbytes)
            self._extents[i : i + 1] = [rest] if rest[1] else []
            self._slabs[offset] = slab
            bisect.insort(self._offsets, offset)
            self._by_size.setdefault(slot_bytes, set()).add(offset)
            return slab
        return None

    def _drop_slab(self, slab: Slab) -> None:
        del self._slabs[slab.offset]
        self._offsets.remove(slab.offset)
        self._by_size[slab.slot_bytes].discard(slab.offset)
        bisect.insort(self._extents, (slab.offset, slab.nbytes))
        joined: list[tuple[int, int]] = []
        for offset, nbytes in self._extents:
            if joined and joined[-1][0] + joined[-1][1] == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
            else:
                joined.append((offset, nbytes))
        self._extents = joined


def _map(nbytes: int, descriptor: int) -> mmap.mmap:
    """Map and touch ``nbytes``, of the descriptor if there is one. Raises ``ConfigError``."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        # Touching more than there is would not fail: the system would end some process for it.
        if nbytes > physical:
            raise OSError(errno.ENOMEM, f"it has {physical}")
        if descriptor >= 0:
            os.ftruncate(descriptor, nbytes)
            mapping = mmap.mmap(descriptor, nbytes)
        else:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _populate(mapping, nbytes)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise ConfigError(f"arena of {nbytes} bytes: the machine does not have them") from error
    return mapping


def _populate(mapping: mmap.mmap, nbytes: int) -> None:
    """Fault every page in, huge ones where the kernel gives them."""
    if nbytes >= HUGE_PAGE_BYTES:
        # A kernel without huge pages refuses the advice; everything works, only slower.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        for start in range(0, nbytes, _POPULATE_STEP_BYTES):
            step = min(_POPULATE_STEP_BYTES, nbytes - start)
            mapping.madvise(_MADV_POPULATE_WRITE, start, step)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Older than 5.14: touch each page.
        for start in range(0, nbytes, ALIGN_BYTES):
            mapping[start] = 0
