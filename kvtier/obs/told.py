"""A cache's figures as JSON: the same names from every server that tells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from kvtier.obs.stats import LATENCY_BOUNDS_S, CacheStats, Histogram, TenantCounters, TierStats

_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def told_health(tier: TierStats) -> dict[str, Any]:
    """How a tier is, and how full; null where nobody here knows that."""
    return {
        "name": tier.tier.value,
        "state": tier.state,
        "detail": tier.detail,
        "codec": tier.codec,
        "used_bytes": tier.used_bytes if tier.bounded else None,
        "capacity_bytes": tier.capacity_bytes if tier.bounded else None,
    }


def told_tier(tier: TierStats) -> dict[str, Any]:
    """Everything of a tier. Times are seconds."""
    counters = tier.counters
    return {
        **told_health(tier),
        "chunks": tier.chunks if tier.bounded else None,
        "pinned_chunks": tier.pinned_chunks if tier.bounded else None,
        "quarantined_files": tier.quarantined_files,
        "hit_tokens": counters.hit_tokens,
        "miss_tokens": told_by_word(counters.miss_tokens),
        "refused_chunks": told_by_word(counters.refused_chunks),
        "evicted_chunks": counters.evicted_chunks,
        "corrupt_shards": counters.corrupt_shards,
        "io_errors": counters.io_errors,
        "read_bytes": counters.read_bytes,
        "lent_bytes": counters.lent_bytes,
        "written_bytes": counters.written_bytes,
        "index_bytes": tier.index_bytes,
        "read_s": _told_times(counters.read_latency),
        "write_s": _told_times(counters.write_latency),
    }


def told_cache(cache: CacheStats) -> dict[str, Any]:
    """What is under way over all tiers, what it has spared, and how each remote is."""
    return {
        "loads_inflight": cache.loads_inflight,
        "stores_inflight": cache.stores_inflight,
        "writes_queued": cache.writes_queued,
        "deletions_queued": cache.deletions_queued,
        "late_jobs": cache.late_jobs,
        "saved_compute_s": cache.saved_compute_s,
        "lost_compute_s": cache.lost_compute_s,
        "events_dropped": cache.events_dropped,
        "remotes": list(map(asdict, cache.remotes)),
        "latency_bounds_s": list(LATENCY_BOUNDS_S),
    }


def told_tenant(counters: TenantCounters) -> dict[str, Any]:
    """What the tiers gave to a tenant and did not give, the latter by tier and reason."""
    misses: dict[str, dict[str, int]] = {}
    for (tier, reason), tokens in counters.miss_tokens.items():
        misses.setdefault(tier.value, {})[reason.value] = tokens
    return {"hit_tokens": told_by_word(counters.hit_tokens), "miss_tokens": misses}


def told_by_word(counts: Mapping[Any, int]) -> dict[str, int]:
    """Counts by the word of an enum, those that are not zero."""
    return {word.value: count for word, count in counts.items() if count}


def _told_times(histogram: Histogram) -> dict[str, Any]:
    quantiles = {name: histogram.quantile(share) for name, share in _QUANTILES.items()}
    return {
        "count": histogram.count,
        "total": histogram.total_s,
        **quantiles,
        # By ``latency_bounds_s``, with what is slower at the end.
        "counts": list(histogram.counts),
    }
