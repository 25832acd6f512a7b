"""Whose chunks the tiers hold and what was wished for them: the parts, put together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.cache.below.remote_room import RemoteRoom
from kvtier.cache.below.removal import remove
from kvtier.cache.below.writeout import Writeout
from kvtier.cache.tenancy.held import Holdings
from kvtier.cache.tenancy.pins import KeptKeys, Pins
from kvtier.cache.tenancy.quota import NothingAfar, Quotas, TenantQuotas
from kvtier.cache.tenancy.reclaim import Reclaimer
from kvtier.cache.tenancy.roots import Roots
from kvtier.cache.tenancy.tenants import Tenants
from kvtier.cache.tenancy.wishes import Wishes
from kvtier.config import CacheConfig
from kvtier.interfaces import Clock
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.types import ChunkKey


@dataclass(frozen=True, slots=True)
class Tenancy:
    """``tenants``, ``pins`` and ``holdings`` take the lock, all else is used under it."""

    tenants: Tenants
    pins: Pins
    holdings: Holdings
    quotas: Quotas
    wishes: Wishes
    reclaimer: Reclaimer

    def tick(self) -> None:
        """Let go what is stale and what has had its time, some at a time."""
        self.reclaimer.step()
        self.wishes.step()


def make_tenancy(
    config: CacheConfig,
    lock: threading.Lock,
    clock: Clock,
    roots: Roots,
    dram: tuple[DramTier, KeptKeys],
    disk: tuple[DiskTier, KeptKeys] | None,
    writeout: Writeout | None,
    room: RemoteRoom | None,
    *,
    left_disk: Callable[[ChunkKey], None],
    end_loads: Callable[[], None],
    save: Callable[[], None],
) -> Tenancy:
    """Put the parts together. See ``TenantQuotas`` and ``Tenants`` for the callbacks."""
    tiers = (dram[0], disk[0] if disk is not None else None)
    holders = (*tiers, room.afar if room is not None else NothingAfar())
    pins = Pins(lock, clock, roots, dram, disk)

    def let_go(key: ChunkKey) -> bool:
        return remove(key, *tiers, writeout, room)

    reclaimer = Reclaimer(roots, *holders, let_go)
    single = {bytes.fromhex(each.tenant): each.quota_bytes for each in config.tenant_quotas}
    total = config.tenant_quota_bytes
    quotas = TenantQuotas(roots, *holders, total, single, pins.keeps, left_disk)
    return Tenancy(
        tenants=Tenants(lock, roots, *holders, reclaimer, quotas, end_loads, save),
        pins=pins,
        holdings=Holdings(lock, clock, roots, pins, dram, disk, left_disk),
        quotas=quotas,
        wishes=Wishes(clock, pins, let_go),
        reclaimer=reclaimer,
    )
