"""How much one tenant may hold, and what of its own gives way when it stores more.

Counted are the bytes of a tenant's chunks where they lie: a chunk in DRAM and on disk counts twice.
A store or a write to disk goes ahead only if the tenant then holds at most its quota. To make room
these give way, in this order, and nothing of another tenant's does:

1. copies in DRAM of what the disk has too,
2. on disk, what was not used since the start, the coldest first, then the first to be used,
3. what DRAM alone has, the coldest first. (Not for a write to disk.)

Reading a chunk into DRAM is no write: it may put a tenant above its quota until it next stores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from kvtier.cache.tenancy.roots import Roots
from kvtier.constants import GIVE_WAY_ROWS_MAX
from kvtier.tiers.coldest import coldest_first
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.types import ChunkKey, Entry


class Quotas(Protocol):
    """What whoever writes asks first, under the cache's lock."""

    def room_in_dram(self, root: bytes, entry: Entry) -> bool:
        """Tell whether the tenant of a root may store a chunk, after making room for it."""
        ...

    def room_on_disk(self, root: bytes, entry: Entry) -> bool:
        """Tell whether the tenant of a root may write a chunk out, after making room for it."""
        ...


class NoQuotas:
    """Of a cache in which tenants may hold as much as there is."""

    def room_in_dram(self, root: bytes, entry: Entry) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    def room_on_disk(self, root: bytes, entry: Entry) -> bool:  # noqa: ARG002
        """Return True."""
        return True


class TenantQuotas:
    """Keeps every tenant within its quota. Used under the cache's lock."""

    def __init__(
        self,
        roots: Roots,
        dram: DramTier,
        disk: DiskTier | None,
        quota_bytes: int,
        quotas: Mapping[bytes, int],
        keeps: Callable[[ChunkKey], bool],
        left_disk: Callable[[ChunkKey], None],
    ) -> None:
        """``quotas`` are those of single tenants, by digest; 0 is none.

        What ``keeps`` tells of never gives way; ``left_disk`` is called with each key that does.
        """
        self._roots = roots
        self._dram = dram
        self._disk = disk
        self._quota_bytes = quota_bytes
        self._quotas = dict(quotas)
        self._keeps = keeps
        self._left_disk = left_disk
        # By tenant: what gives way next. It may have been used since, or be gone.
        self._orders: dict[bytes, deque[ChunkKey]] = {}

    def limit(self, quota_bytes: int, quotas: Mapping[bytes, int]) -> None:
        """Put other quotas in place of all; who holds more gives way when it next stores."""
        self._quota_bytes = quota_bytes
        self._quotas = dict(quotas)

    def room_in_dram(self, root: bytes, entry: Entry) -> bool:
        """See ``Quotas.room_in_dram``."""
        return self._make_room(root, entry, self._leave_any)

    def room_on_disk(self, root: bytes, entry: Entry) -> bool:
        """See ``Quotas.room_on_disk``."""
        return self._make_room(root, entry, self._leave_below)

    def _make_room(
        self, root: bytes, entry: Entry, leave: Callable[[ChunkKey, set[ChunkKey]], int]
    ) -> bool:
        tenant = self._roots.tenant_of(root)
        quota = self._quotas.get(tenant, self._quota_bytes)
        if not tenant or not quota:
            return True
        used = tenant_bytes(self._roots.of_tenant(tenant), self._dram, self._disk)
        if used + entry.nbytes <= quota:
            return True
        if entry.nbytes > quota:
            return False
        stays = self._line(entry)
        for order in (self._orders.pop(tenant, deque()), deque(self._order(tenant))):
            while order and used + entry.nbytes > quota:
                used -= leave(order.popleft(), stays)
            if used + entry.nbytes <= quota:
                self._orders[tenant] = order
                return True
        return False

    def _leave_any(self, key: ChunkKey, stays: set[ChunkKey]) -> int:
        """Let a chunk leave one tier; return the bytes that it gave back, 0 where it may not."""
        below = self._leave_below(key, stays)
        record = self._dram.index.ready(key)
        if below or record is None or record.pins or key in stays or self._keeps(key):
            return below
        self._dram.leave(record)
        return record.entry.nbytes

    def _leave_below(self, key: ChunkKey, stays: set[ChunkKey]) -> int:
        """The same for what is on disk: its copy in DRAM, where it has one, or all of it."""
        if self._disk is None or not self._disk.holds(key) or self._keeps(key):
            return 0
        copy = self._dram.index.ready(key)
        if copy is not None:
            if copy.pins:
                return 0
            self._dram.leave(copy)
            return copy.entry.nbytes
        record = self._disk.ready(key)
        if record is None or record.pins or key in stays:
            return 0
        self._disk.forget(record)
        self._left_disk(key)
        return record.entry.nbytes

    def _order(self, tenant: bytes) -> list[ChunkKey]:
        """Return what may give way, the first one first; what is in two tiers comes twice."""
        roots = self._roots.of_tenant(tenant)
        in_dram = self._dram.coldest(roots)
        if self._disk is None:
            return in_dram
        held = [self._disk.holds(key) for key in in_dram]
        copies = [key for key, also in zip(in_dram, held, strict=True) if also]
        alone = [key for key, also in zip(in_dram, held, strict=True) if not also]
        cold = self._disk.cold.leaves_of(roots, GIVE_WAY_ROWS_MAX)
        hot = [record.entry for record in self._disk.index if record.namespace in roots]
        return [*copies, *cold, *coldest_first(hot, range(len(hot))), *alone]

    def _line(self, entry: Entry) -> set[ChunkKey]:
        """Return the chunks that an entry follows, as far as they are held."""
        line: set[ChunkKey] = set()
        above = entry.parent
        while above is not None and above not in line:
            line.add(above)
            above = self._parent(above)
        return line

    def _parent(self, key: ChunkKey) -> ChunkKey | None:
        record = self._dram.index.get(key)
        if record is not None or self._disk is None:
            return record.entry.parent if record is not None else None
        on_disk = self._disk.index.get(key)
        return on_disk.entry.parent if on_disk is not None else self._disk.cold.parent(key)


def tenant_bytes(roots: Iterable[bytes], dram: DramTier, disk: DiskTier | None) -> int:
    """Return the bytes that chunks under some roots take in DRAM and on disk, right now."""
    total = 0
    for root in roots:
        total += dram.index.bytes_of(root)
        if disk is not None:
            total += disk.index.bytes_of(root) + disk.cold.bytes_of(root)
    return total
