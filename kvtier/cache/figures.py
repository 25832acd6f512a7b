"""What a cache reports of itself. Under the cache's lock."""

from __future__ import annotations

from kvtier.cache.below.fill import Filler
from kvtier.cache.below.remote_room import RemoteRoom
from kvtier.cache.below.writeout import Writeout
from kvtier.cache.store import Storer
from kvtier.cache.worth.costs import Costs
from kvtier.config import CacheConfig
from kvtier.obs.counters import Counters
from kvtier.obs.events import EventLog
from kvtier.obs.stats import CacheStats, RemoteStats, TierStats
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.types import Tier


def cache_stats(
    config: CacheConfig,
    counters: Counters,
    dram: DramTier,
    disk: DiskTier | None,
    storer: Storer,
    filler: Filler,
    writeout: Writeout | None,
    room: RemoteRoom | None,
    events: EventLog | None,
    costs: Costs,
    *,
    loads_inflight: int,
) -> CacheStats:
    """Count everything, now."""
    tiers = [_dram_stats(config, counters, dram)]
    if disk is not None:
        tiers.append(_disk_stats(config, counters, disk))
    if room is not None:
        tiers.append(room.stats(config.codec))
    queued = writeout.dirty_count + writeout.inflight_count if writeout else 0
    return CacheStats(
        tiers=tuple(tiers),
        loads_inflight=loads_inflight,
        stores_inflight=storer.inflight_count,
        writes_queued=queued + (room.waiting_count if room else 0),
        late_jobs=filler.late_count,
        codec_fallbacks=storer.codec_fallbacks,
        tenants=counters.tenants(),
        saved_compute_s=costs.saved_s,
        lost_compute_s=costs.lost_s,
        costs=costs.stats(),
        events_dropped=events.dropped_count if events is not None else 0,
        remotes=_remote_stats(config, room) if room is not None else (),
        deletions_queued=room.deleting_count if room is not None else 0,
    )


def _dram_stats(config: CacheConfig, counters: Counters, dram: DramTier) -> TierStats:
    return TierStats(
        tier=Tier.DRAM,
        state="ok",
        detail="",
        capacity_bytes=dram.capacity_bytes,
        used_bytes=dram.used_bytes,
        chunks=len(dram.index),
        pinned_chunks=dram.index.pinned_count,
        quarantined_files=0,
        counters=counters[Tier.DRAM].copy(),
        codec=config.codec,
    )


def _disk_stats(config: CacheConfig, counters: Counters, disk: DiskTier) -> TierStats:
    state, detail = disk.state
    own = config.disk.codec if config.disk is not None else None
    return TierStats(
        tier=Tier.DISK,
        state=state,
        detail=detail,
        capacity_bytes=disk.capacity_bytes,
        used_bytes=disk.used_bytes,
        chunks=len(disk),
        pinned_chunks=disk.index.pinned_count,
        quarantined_files=disk.quarantined_count,
        counters=counters[Tier.DISK].copy(),
        index_bytes=sum(volume.files.index_bytes for volume in disk.volumes),
        codec=own or config.codec,
    )


def _remote_stats(config: CacheConfig, room: RemoteRoom) -> tuple[RemoteStats, ...]:
    schemes = [each.url.partition("://")[0] for each in config.remotes]
    tiers = [remote.tier for remote in room.remotes.all]
    return tuple(
        RemoteStats(tier.number, scheme, *tier.state)
        for scheme, tier in zip(schemes, tiers, strict=True)
    )
