"""Giving back what no sequence can reach any more: chunks of an earlier epoch."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.cache.tenancy.quota import Afar, tenant_bytes
from kvtier.cache.tenancy.roots import Roots
from kvtier.constants import RECLAIMED_CHUNKS_MAX
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.types import ChunkKey


class Reclaimer:
    """Lets chunks of stale roots leave, some at a time. Used under the cache's lock.

    What is being read, written or stored leaves when that has ended; a directory that is away
    gives back what it holds when it has come back.
    """

    def __init__(
        self,
        roots: Roots,
        dram: DramTier,
        disk: DiskTier | None,
        afar: Afar,
        remove: Callable[[ChunkKey], bool],
    ) -> None:
        """``remove`` lets a chunk go from every tier; False: it is in use."""
        self._roots = roots
        self._dram = dram
        self._disk = disk
        self._afar = afar
        self._remove = remove
        self._todo: list[ChunkKey] = []  # The deepest last.

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are still to be given back."""
        stale = self._roots.stale()
        held = tenant_bytes(stale, self._dram, self._disk, self._afar)
        return held + sum(map(self._afar.going_bytes_of, stale))

    def step(self) -> None:
        """Let the next chunks leave."""
        if not self._todo:
            self._todo = self._find()
        some, self._todo = self._todo[-RECLAIMED_CHUNKS_MAX:], self._todo[:-RECLAIMED_CHUNKS_MAX]
        for key in reversed(some):
            self._remove(key)

    def _find(self) -> list[ChunkKey]:
        stale = self._roots.stale()
        if not stale:
            return []
        found: dict[ChunkKey, int] = {}
        if not stale.isdisjoint(self._dram.index.namespaces):
            records = [r for r in self._dram.index if r.namespace in stale]
            found |= {r.entry.key: r.entry.position for r in records}
        if self._disk is not None and not stale.isdisjoint(self._disk.index.namespaces):
            below = [r for r in self._disk.index if r.namespace in stale]
            found |= {r.entry.key: r.entry.position for r in below}
        keys = sorted(found, key=found.__getitem__)
        if keys:
            return keys
        cold = self._disk.cold if self._disk is not None else None
        if cold is not None and any(map(cold.bytes_of, stale.intersection(cold.namespaces))):
            return cold.keys_of(stale, RECLAIMED_CHUNKS_MAX)
        return self._afar.keys_of(stale)
