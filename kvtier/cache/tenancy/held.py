"""What operators ask of a cache: what a namespace holds where, and that some of it goes or stays.

Chunks are named by their keys alone. Where chunks have parents, whoever lets some go names the
deepest first.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvtier.cache.tenancy.pins import KeptKeys, Pins
from kvtier.cache.tenancy.roots import Roots
from kvtier.interfaces import Clock
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.index import State
from kvtier.types import ChunkKey, MissReason, Namespace, Tier


class Eviction(StrEnum):
    """What came of letting a chunk go."""

    EVICTED = "evicted"
    ABSENT = "absent"
    PINNED = "pinned"
    BUSY = "busy"  # Read or written at the moment, or its directory is away: ask again.


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """What lies under one root: a namespace of a tenant in one epoch.

    ``tenant`` is the digest of its salt, empty without one or where it is not known.
    """

    root: bytes
    tenant: bytes
    epoch: int
    current: bool
    dram_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class HeldPins:
    """What is pinned under one root for about as long: ``seconds`` from now, rounded up.

    A chunk that lies in DRAM and on disk is one, and its bytes count in both.
    """

    root: bytes
    tenant: bytes
    seconds: int
    chunks: int
    dram_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class _Rooted:
    namespace: Namespace
    root: bytes


class Holdings:
    """Any thread may call; takes the cache's lock, for each call once."""

    def __init__(
        self,
        lock: threading.Lock,
        clock: Clock,
        roots: Roots,
        pins: Pins,
        dram: tuple[DramTier, KeptKeys],
        disk: tuple[DiskTier, KeptKeys] | None,
        left_disk: Callable[[ChunkKey], None],
    ) -> None:
        """``left_disk`` is called with each key that leaves the disk."""
        self._lock = lock
        self._clock = clock
        self._roots = roots
        self._pins = pins
        self._dram, self._kept_in_dram = dram
        self._disk = disk[0] if disk is not None else None
        self._kept_on_disk = disk[1] if disk is not None else None
        self._left_disk = left_disk

    def by_root(self) -> list[HeldBytes]:
        """Return the bytes under every root that holds some, in no order."""
        with self._lock:
            below = self._disk
            roots = set(self._dram.index.namespaces)
            if below is not None:
                roots |= {*below.index.namespaces, *below.cold.namespaces}
            held = [self._held(root) for root in roots]
        return [each for each in held if each.dram_bytes or each.disk_bytes]

    def pinned_bytes(self, namespace: Namespace) -> int:
        """Return the bytes of a namespace's chunks that are pinned, counted once for each tier."""
        with self._lock:
            root = self._roots.root(namespace)
            kept = (self._kept_in_dram, self._kept_on_disk)
            return sum(each.nbytes_of(root) for each in kept if each is not None)

    def pins(self) -> list[HeldPins]:
        """Return what is pinned and held now, what ends first in front.

        At most ``PINNED_CHUNKS_MAX`` of each tier.
        """
        found: defaultdict[tuple[int, bytes], dict[ChunkKey, None]] = defaultdict(dict)
        with self._lock:
            now, stale = self._clock.now(), self._roots.stale()
            for kept in (self._kept_in_dram, self._kept_on_disk):
                for key, root, until in kept.standing() if kept is not None else ():
                    if root not in stale:
                        found[math.ceil(until - now), root][key] = None
            rows = [self._pinned(root, left_s, keys) for (left_s, root), keys in found.items()]
        held = [row for row in rows if row.dram_bytes or row.disk_bytes]
        return sorted(held, key=lambda row: (row.seconds, row.tenant, row.root))

    def keys(self, namespace: Namespace, tier: Tier, most: int) -> list[ChunkKey]:
        """Return what a namespace holds in DRAM or on disk; some of it, where it is more.

        In DRAM those used longest ago come first, children before their parents. On disk those come
        first that were used since the start.
        """
        with self._lock:
            root = self._roots.root(namespace)
            if tier is Tier.DRAM:
                return self._dram.coldest({root})[:most]
            if self._disk is None:
                return []
            hot = [r.entry.key for r in self._disk.index if r.namespace == root][:most]
            return hot + self._disk.cold.newest_of({root}, most - len(hot))

    def evict(self, keys: Iterable[ChunkKey], tiers: Collection[Tier]) -> list[Eviction]:
        """Let chunks go from DRAM, the disk or both, as if they made room.

        What is pinned stays, and what a remote holds is found there again.
        """
        with self._lock:
            return [self._evict(key, tiers) for key in keys]

    def pin(
        self, namespace: Namespace, keys: Iterable[ChunkKey], seconds: float
    ) -> list[MissReason | None]:
        """Keep chunks from eviction for so long wherever they lie; None: it is pinned.

        See ``Pins``. The caller has looked at ``seconds`` with ``check_pin_seconds``.
        """
        with self._lock:
            rooted = _Rooted(namespace, self._roots.root(namespace))
            until = self._clock.now() + seconds
            return [self._pins.keep(rooted, key, until) for key in keys]

    def unpin(self, keys: Iterable[ChunkKey]) -> list[bool]:
        """Let chunks leave when their turn comes; False: it was not pinned."""
        with self._lock:
            return [self._pins.drop(key) for key in keys]

    def _pinned(self, root: bytes, seconds: int, keys: Iterable[ChunkKey]) -> HeldPins:
        row = self._roots.row_of(root)
        count = dram_bytes = disk_bytes = 0
        for key in keys:
            record = self._dram.index.get(key)
            below = self._disk.ready(key) if self._disk is not None else None
            count += record is not None or below is not None
            dram_bytes += record.entry.nbytes if record is not None else 0
            disk_bytes += below.entry.nbytes if below is not None else 0
        tenant = row.tenant if row is not None else b""
        return HeldPins(root, tenant, seconds, count, dram_bytes, disk_bytes)

    def _held(self, root: bytes) -> HeldBytes:
        row, below = self._roots.row_of(root), self._disk
        on_disk = 0
        if below is not None:
            on_disk = below.index.bytes_of(root) + below.cold.bytes_of(root)
        return HeldBytes(
            root=root,
            tenant=row.tenant if row is not None else b"",
            epoch=row.epoch if row is not None else 0,
            current=root not in self._roots.stale(),
            dram_bytes=self._dram.index.bytes_of(root),
            disk_bytes=on_disk,
        )

    def _evict(self, key: ChunkKey, tiers: Collection[Tier]) -> Eviction:
        record = self._dram.index.get(key) if Tier.DRAM in tiers else None
        disk = self._disk if Tier.DISK in tiers else None
        on_disk = disk is not None and disk.holds(key)
        if record is None and not on_disk:
            return Eviction.ABSENT
        if self._pins.keeps(key):
            return Eviction.PINNED
        if record is not None and (record.pins or record.state is not State.READY):
            return Eviction.BUSY
        if disk is not None and on_disk:
            disk.displace(key, ())
            if disk.holds(key):
                return Eviction.BUSY
            self._left_disk(key)
        if record is not None:
            self._dram.leave(record)
        return Eviction.EVICTED
