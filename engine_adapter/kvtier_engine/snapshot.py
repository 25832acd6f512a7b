"""Everything that the engine and the cache count, at one instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.obs.stats import CacheStats, TenantCounters, TierStats
from kvtier_engine.api.service import RequestCounters
from kvtier_engine.engine_stats import EngineStats


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a scrape tells. ``cache`` is None without one."""

    engine: EngineStats
    cache: CacheStats | None
    requests: RequestCounters
    block_bytes: int
    degraded: bool

    @property
    def tiers(self) -> tuple[TierStats, ...]:
        """The tiers below HBM."""
        return () if self.cache is None else self.cache.tiers

    @property
    def tenants(self) -> Mapping[str, TenantCounters]:
        """What tenants got, by the name that stands for each."""
        return {} if self.cache is None else self.cache.tenants
