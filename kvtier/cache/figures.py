"""What a tier reports of itself. Under the cache's lock."""

from __future__ import annotations

from kvtier.obs.stats import TierCounters, TierStats
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.types import Tier


def dram_stats(dram: DramTier, counters: TierCounters) -> TierStats:
    """Count the DRAM tier, now."""
    return TierStats(
        tier=Tier.DRAM,
        state="ok",
        detail="",
        capacity_bytes=dram.capacity_bytes,
        used_bytes=dram.used_bytes,
        chunks=len(dram.index),
        pinned_chunks=dram.index.pinned_count,
        quarantined_files=0,
        counters=counters.copy(),
    )


def disk_stats(disk: DiskTier, counters: TierCounters) -> TierStats:
    """Count the disk tier, now."""
    state, detail = disk.state
    return TierStats(
        tier=Tier.DISK,
        state=state,
        detail=detail,
        capacity_bytes=disk.capacity_bytes,
        used_bytes=disk.used_bytes,
        chunks=len(disk),
        pinned_chunks=disk.index.pinned_count,
        quarantined_files=disk.quarantined_count,
        counters=counters.copy(),
        index_bytes=sum(volume.files.index_bytes for volume in disk.volumes),
    )
