"""How much one tenant may hold, and what of its own gives way when it stores more.

Counted are the bytes of a tenant's chunks where they lie: a chunk in DRAM and on disk counts twice.
In remotes, which others write to as well, those count that this cache has written since its start
and has not heard to be gone. A store, or a write to disk or to a remote, goes ahead only if the
tenant then holds at most its quota. To make room these give way, in this order, and nothing of
another tenant's does:

1. copies in DRAM of what the disk has too,
2. what remotes alone have, the oldest first,
3. on disk, what was not used since the start, the coldest first, then the first to be used; with
   each goes what remotes have of it,
4. copies in DRAM of what remotes alone have too,
5. what DRAM alone has, the coldest first. (Not for a write to disk or to a remote.)

Reading a chunk into DRAM is no write: it may put a tenant above its quota until it next stores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol

from kvtier.cache.tenancy.roots import Roots
from kvtier.constants import GIVE_WAY_ROWS_MAX, GIVE_WAY_TENANTS_MAX
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

    def room_in_remote(self, root: bytes, entry: Entry) -> bool:
        """The same for a write to a remote."""
        ...


class Afar(Protocol):
    """What this cache has written to remotes for tenants. Used under the cache's lock."""

    def bytes_of(self, root: bytes) -> int:
        """Return the bytes of a root's chunks in all remotes together."""
        ...

    def keys_of(self, roots: Collection[bytes]) -> list[ChunkKey]:
        """Return chunks of some roots, the oldest first, a bounded number."""
        ...

    def holds(self, key: ChunkKey) -> bool:
        """Tell whether any remote was given a chunk."""
        ...

    def leave(self, key: ChunkKey) -> int:
        """Have a chunk deleted; return the bytes that count no more, 0 where it is in use."""
        ...

    def going_bytes_of(self, root: bytes) -> int:
        """Return the bytes of a root that count no more and are still to be deleted."""
        ...


class NothingAfar:
    """Of a cache without remotes."""

    def bytes_of(self, root: bytes) -> int:  # noqa: ARG002
        """Return 0."""
        return 0

    def keys_of(self, roots: Collection[bytes]) -> list[ChunkKey]:  # noqa: ARG002
        """Return none."""
        return []

    def holds(self, key: ChunkKey) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def leave(self, key: ChunkKey) -> int:  # noqa: ARG002
        """Return 0."""
        return 0

    def going_bytes_of(self, root: bytes) -> int:  # noqa: ARG002
        """Return 0."""
        return 0


class NoQuotas:
    """Of a cache in which tenants may hold as much as there is."""

    def room_in_dram(self, root: bytes, entry: Entry) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    def room_on_disk(self, root: bytes, entry: Entry) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    def room_in_remote(self, root: bytes, entry: Entry) -> bool:  # noqa: ARG002
        """Return True."""
        return True


class TenantQuotas:
    """Keeps every tenant within its quota. Used under the cache's lock."""

    def __init__(
        self,
        roots: Roots,
        dram: DramTier,
        disk: DiskTier | None,
        afar: Afar,
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
        self._afar = afar
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

    def room_in_remote(self, root: bytes, entry: Entry) -> bool:
        """See ``Quotas.room_in_remote``."""
        return self._make_room(root, entry, self._leave_below)

    def _make_room(
        self, root: bytes, entry: Entry, leave: Callable[[ChunkKey, set[ChunkKey]], int]
    ) -> bool:
        tenant = self._roots.tenant_of(root)
        quota = self._quotas.get(tenant, self._quota_bytes)
        if not tenant or not quota:
            return True
        used = tenant_bytes(self._roots.of_tenant(tenant), self._dram, self._disk, self._afar)
        if used + entry.nbytes <= quota:
            return True
        if entry.nbytes > quota:
            return False
        stays = self._line(entry)
        for order in self._next_orders(tenant):
            while order and used + entry.nbytes > quota:
                used -= leave(order.popleft(), stays)
            if used + entry.nbytes <= quota:
                self._orders[tenant] = order
                if len(self._orders) > GIVE_WAY_TENANTS_MAX:  # The one that stored longest ago.
                    del self._orders[next(iter(self._orders))]
                return True
        return False

    def _next_orders(self, tenant: bytes) -> Iterator[deque[ChunkKey]]:
        """Yield what is left of the last order, then a new one: that looks at all there is."""
        yield self._orders.pop(tenant, deque())
        yield deque(self._order(tenant))

    def _leave_any(self, key: ChunkKey, stays: set[ChunkKey]) -> int:
        """Let a chunk leave one tier; return the bytes that it gave back, 0 where it may not."""
        below = self._leave_below(key, stays)
        record = self._dram.index.ready(key)
        if below or record is None or record.pins or key in stays or self._keeps(key):
            return below
        self._dram.leave(record)
        return record.entry.nbytes

    def _leave_below(self, key: ChunkKey, stays: set[ChunkKey]) -> int:
        """The same for what lies below DRAM: its copy there, where it has one, or all of it."""
        on_disk = self._on_disk(key)
        if self._keeps(key) or not (on_disk or self._afar.holds(key)):
            return 0
        copy = self._dram.index.ready(key)
        if copy is not None:
            if copy.pins:
                return 0
            self._dram.leave(copy)
            return copy.entry.nbytes
        if key in stays:
            return 0
        if self._disk is None or not on_disk:
            return self._afar.leave(key)
        record = self._disk.ready(key)
        if record is None or record.pins:
            return 0
        self._disk.forget(record)
        self._left_disk(key)
        return record.entry.nbytes + self._afar.leave(key)

    def _order(self, tenant: bytes) -> list[ChunkKey]:
        """Return what may give way, the first one first; what is in two tiers comes twice."""
        roots = self._roots.of_tenant(tenant)
        in_dram = self._dram.coldest(roots)
        on_disk = [key for key in in_dram if self._on_disk(key)]
        others = [key for key in in_dram if not self._on_disk(key)]
        copies = [key for key in others if self._afar.holds(key)]
        alone = [key for key in others if not self._afar.holds(key)]
        far = [
            key
            for key in self._afar.keys_of(roots)
            if not self._on_disk(key) and self._dram.index.get(key) is None
        ]
        return [*on_disk, *far, *self._order_on_disk(roots), *copies, *alone]

    def _order_on_disk(self, roots: Collection[bytes]) -> list[ChunkKey]:
        if self._disk is None:
            return []
        cold = self._disk.cold.leaves_of(roots, GIVE_WAY_ROWS_MAX)
        hot = [record.entry for record in self._disk.index if record.namespace in roots]
        return [*cold, *coldest_first(hot, range(len(hot)))]

    def _on_disk(self, key: ChunkKey) -> bool:
        return self._disk is not None and self._disk.holds(key)

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


def tenant_bytes(roots: Iterable[bytes], dram: DramTier, disk: DiskTier | None, afar: Afar) -> int:
    """Return the bytes that chunks under some roots take in all tiers, right now."""
    total = 0
    for root in roots:
        total += dram.index.bytes_of(root) + afar.bytes_of(root)
        if disk is not None:
            total += disk.index.bytes_of(root) + disk.cold.bytes_of(root)
    return total
