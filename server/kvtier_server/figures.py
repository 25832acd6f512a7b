"""What the server says of itself: ``/health``, ``/v1/stats``, and the same for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvtier.obs.stats import LATENCY_BOUNDS_S, CacheStats, Histogram, TierStats
from kvtier.obs.told import told_cache, told_health, told_tier
from kvtier_server.counters import Counters


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


def stats_of(now: Snapshot) -> dict[str, Any]:
    """Return every figure, named as ``kvtier-serve`` names them; an object counts as a token."""
    cache = now.cache
    return {
        "model": "kvtier daemon",
        "uptime_s": now.uptime_s,
        "degraded": cache.degraded,
        "draining": now.draining,
        "prompt_tokens": now.counters.reads + now.counters.absent,
        "hit_tokens": {tier.tier.value: tier.counters.hit_tokens for tier in cache.tiers},
        "tiers": list(map(told_tier, cache.tiers)),
        "cache": told_cache(cache),
        "connections": {
            "open": now.connections,
            "inflight_bytes": now.inflight_bytes,
            "stopped": now.stopped_connections,
            **asdict(now.counters),
        },
    }


def health_of(now: Snapshot) -> dict[str, Any]:
    """Return the health report: trouble with a tier degrades."""
    status = "degraded" if now.cache.degraded else "ok"
    return {
        "status": "draining" if now.draining else status,
        "uptime_s": now.uptime_s,
        "connections": now.connections,
        "tiers": list(map(told_health, now.cache.tiers)),
    }


_TIER_GAUGES: Final[tuple[tuple[str, str, Callable[[TierStats], float]], ...]] = (
    ("ok", "1 while a tier is ok.", lambda tier: float(tier.state == "ok")),
    ("used_bytes", "Bytes in use.", lambda tier: tier.used_bytes),
    ("capacity_bytes", "Bytes that a tier may use.", lambda tier: tier.capacity_bytes),
    ("chunks", "Objects held.", lambda tier: tier.chunks),
    ("pinned_chunks", "Objects being read or written.", lambda tier: tier.pinned_chunks),
)
_TIER_COUNTERS: Final[tuple[tuple[str, str, Callable[[TierStats], float]], ...]] = (
    ("hit_tokens", "Objects that a tier gave.", lambda tier: tier.counters.hit_tokens),
    ("read_bytes", "Bytes read from a tier.", lambda tier: tier.counters.read_bytes),
    ("written_bytes", "Bytes written to a tier.", lambda tier: tier.counters.written_bytes),
    ("corrupt_shards", "Objects that were spoiled.", lambda tier: tier.counters.corrupt_shards),
    ("evicted_chunks", "Objects that made room.", lambda tier: tier.counters.evicted_chunks),
    ("io_errors", "Faults of a tier's medium.", lambda tier: tier.counters.io_errors),
)
_TIER_REASONS: Final[tuple[tuple[str, str, Callable[[TierStats], Mapping[Any, int]]], ...]] = (
    ("miss_tokens", "Objects that a tier did not give.", lambda tier: tier.counters.miss_tokens),
    ("refused_chunks", "Objects not taken in.", lambda tier: tier.counters.refused_chunks),
)
_TIER_TIMES: Final[tuple[tuple[str, str, Callable[[TierStats], Histogram]], ...]] = (
    ("read_seconds", "Time of one read.", lambda tier: tier.counters.read_latency),
    ("write_seconds", "Time of one write.", lambda tier: tier.counters.write_latency),
)


class DaemonCollector(Collector):
    """Renders a fresh snapshot at every scrape. ``snapshot`` must not block."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        now = self._snapshot()
        tiers = now.cache.tiers
        for name, meaning, read in _TIER_GAUGES:
            gauge = GaugeMetricFamily(f"kvtier_tier_{name}", meaning, labels=("tier",))
            for tier in tiers:
                gauge.add_metric((tier.tier.value,), read(tier))
            yield gauge
        for name, meaning, read in _TIER_COUNTERS:
            counter = CounterMetricFamily(f"kvtier_tier_{name}", meaning, labels=("tier",))
            for tier in tiers:
                counter.add_metric((tier.tier.value,), read(tier))
            yield counter
        for name, meaning, reasons in _TIER_REASONS:
            labels = ("tier", "reason")
            counter = CounterMetricFamily(f"kvtier_tier_{name}", meaning, labels=labels)
            for tier in tiers:
                for reason, count in reasons(tier).items():
                    counter.add_metric((tier.tier.value, reason.value), count)
            yield counter
        for name, meaning, time in _TIER_TIMES:
            family = HistogramMetricFamily(f"kvtier_tier_{name}", meaning, labels=("tier",))
            for tier in tiers:
                seconds = time(tier)
                family.add_metric((tier.tier.value,), _buckets(seconds), seconds.total_s)
            yield family
        yield from _connections(now)


def _connections(now: Snapshot) -> Iterator[Metric]:
    open_now = {
        "connections": ("Connections that are open.", now.connections),
        "inflight_bytes": ("Bytes asked for and not sent yet.", now.inflight_bytes),
        "stopped_connections": ("Connections made to wait.", now.stopped_connections),
    }
    for name, (meaning, value) in open_now.items():
        yield GaugeMetricFamily(f"kvtier_daemon_{name}", meaning, value=value)
    for name, count in asdict(now.counters).items():
        meaning = f"Counted since the start: {name.replace('_', ' ')}."
        yield CounterMetricFamily(f"kvtier_daemon_{name}", meaning, value=count)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
