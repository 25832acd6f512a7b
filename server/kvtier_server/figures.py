"""What the server says of itself: ``/health``, ``/v1/stats``, and the same for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from kvtier.obs.counters import tenant_name
from kvtier.obs.series import Reader, Series, counter, gauge, seen_from
from kvtier.obs.stats import CacheStats
from kvtier.obs.tier_series import TIER_SERIES
from kvtier.obs.told import told_cache, told_health, told_tenant, told_tier
from kvtier.types import Tier
from kvtier_server.counters import MEANING, Counters


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is told, at one instant."""

    cache: CacheStats
    counters: Counters
    connections: int
    inflight_bytes: int
    stopped_connections: int
    uptime_s: float
    draining: bool


def stats_of(now: Snapshot, credentials: Iterable[str] = ()) -> dict[str, Any]:
    """Return every figure, named as ``kvtier-serve`` names them; an object counts as a token.

    ``credentials`` are told apart, as tenants, those that have asked for anything: whoever reads
    this may know of them.
    """
    cache = now.cache
    return {
        "model": "kvtier daemon",
        "uptime_s": now.uptime_s,
        "degraded": cache.degraded,
        "draining": now.draining,
        "prompt_tokens": _asked_for(cache),
        "hit_tokens": {tier.tier.value: tier.counters.hit_tokens for tier in cache.tiers},
        "tiers": list(map(told_tier, cache.tiers)),
        "cache": told_cache(cache),
        "connections": {
            "open": now.connections,
            "inflight_bytes": now.inflight_bytes,
            "stopped": now.stopped_connections,
            **asdict(now.counters),
        },
        "tenants": {
            name: told_tenant(cache.tenants[tenant_name(name)])
            for name in credentials
            if tenant_name(name) in cache.tenants
        },
    }


def _asked_for(cache: CacheStats) -> int:
    """Return the objects that were asked for, however often that was and whatever came of it.

    Each is found or missed in DRAM before anything else. So what tiers gave is never more: what a
    client leased in vain and then read, and what was warmed, counts here as there.
    """
    counters = next(tier.counters for tier in cache.tiers if tier.tier is Tier.DRAM)
    return counters.hit_tokens + sum(counters.miss_tokens.values())


def health_of(now: Snapshot) -> dict[str, Any]:
    """Return the health report: trouble with a tier degrades."""
    status = "degraded" if now.cache.degraded else "ok"
    return {
        "status": "draining" if now.draining else status,
        "uptime_s": now.uptime_s,
        "connections": now.connections,
        "tiers": list(map(told_health, now.cache.tiers)),
    }


def _own(read: Callable[[Snapshot], float]) -> Reader[Snapshot]:
    return lambda now: [((), read(now))]


def _counted(name: str) -> Reader[Snapshot]:
    return lambda now: [((), getattr(now.counters, name))]


def _of_cache(series: Series[CacheStats]) -> Series[Snapshot]:
    return seen_from(series, lambda now: series.read(now.cache))


#: In the order of the documentation, which has those of the tiers but once.
DAEMON_SERIES: Final[tuple[Series[Snapshot], ...]] = (
    gauge(
        "kvtier_daemon_connections", "Connections that are open.", _own(lambda now: now.connections)
    ),
    gauge(
        "kvtier_daemon_inflight_bytes",
        "Bytes asked for and not sent yet.",
        _own(lambda now: now.inflight_bytes),
    ),
    gauge(
        "kvtier_daemon_stopped_connections",
        "Connections made to wait.",
        _own(lambda now: now.stopped_connections),
    ),
    *(
        counter(
            f"kvtier_daemon_{field.name}_total",
            field.metadata[MEANING],
            _counted(field.name),
        )
        for field in fields(Counters)
    ),
)
SERIES: Final = (*map(_of_cache, TIER_SERIES), *DAEMON_SERIES)
