"""The metrics of tiers, the same from every server that has a cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Final

from kvtier.obs.series import Reader, Series, Values, counter, gauge, histogram
from kvtier.obs.stats import CacheStats, Histogram, LinkStats, TierCounters, TierStats
from kvtier.types import MissReason

_TIER: Final = ("tier",)
_REASON: Final = ("tier", "reason")


def _cache(read: Callable[[CacheStats], float]) -> Reader[CacheStats]:
    return lambda cache: [((), read(cache))]


def _tier(read: Callable[[TierStats], float | Histogram]) -> Reader[CacheStats]:
    return lambda cache: [((tier.tier.value,), read(tier)) for tier in cache.tiers]


def _held(read: Callable[[TierStats], float]) -> Reader[CacheStats]:
    """Of a remote that others bound, nobody here knows what it holds: it has no such figure."""
    return lambda cache: [((tier.tier.value,), read(tier)) for tier in cache.tiers if tier.bounded]


def _counted(read: Callable[[TierCounters], float | Histogram]) -> Reader[CacheStats]:
    return _tier(lambda tier: read(tier.counters))


def _by_reason(read: Callable[[TierCounters], dict[MissReason, int]]) -> Reader[CacheStats]:
    return lambda cache: [
        ((tier.tier.value, reason.value), read(tier.counters).get(reason, 0))
        for tier, reason in product(cache.tiers, MissReason)
    ]


def _links(read: Callable[[LinkStats], float]) -> Reader[CacheStats]:
    return lambda cache: [((tier.value,), read(link)) for tier, link in cache.costs.links.items()]


def _moves(cache: CacheStats) -> Values:
    return [((codec,), speed) for codec, speed in cache.costs.moves_bytes_per_s.items()]


def _prefill(cache: CacheStats) -> Values:
    seconds = cache.costs.prefill_s_per_token
    return [] if seconds is None else [((), seconds)]


def _decisions(cache: CacheStats) -> Values:
    counts = cache.costs.decisions.items()
    return [((tier.value, reason), count) for (tier, reason), count in counts]


def _fallbacks(cache: CacheStats) -> Values:
    return list(cache.codec_fallbacks.items())


def _tenant_hits(cache: CacheStats) -> Values:
    for name, counters in cache.tenants.items():
        for tier, tokens in counters.hit_tokens.items():
            yield (name, tier.value), tokens


def _tenant_misses(cache: CacheStats) -> Values:
    for name, counters in cache.tenants.items():
        for (tier, reason), tokens in counters.miss_tokens.items():
            yield (name, tier.value, reason.value), tokens


#: In the order of the documentation.
TIER_SERIES: Final[tuple[Series[CacheStats], ...]] = (
    gauge(
        "kvtier_tier_ok",
        "1 while a tier is ok; /health says what is wrong.",
        _tier(lambda tier: float(tier.state == "ok")),
        _TIER,
    ),
    gauge("kvtier_tier_used_bytes", "Bytes in use.", _held(lambda tier: tier.used_bytes), _TIER),
    gauge(
        "kvtier_tier_capacity_bytes",
        "Bytes that a tier may use.",
        _held(lambda tier: tier.capacity_bytes),
        _TIER,
    ),
    gauge("kvtier_tier_chunks", "Chunks held.", _held(lambda tier: tier.chunks), _TIER),
    gauge(
        "kvtier_tier_pinned_chunks",
        "Chunks that are being read or written and cannot be evicted.",
        _held(lambda tier: tier.pinned_chunks),
        _TIER,
    ),
    gauge(
        "kvtier_tier_quarantined_files",
        "Files that failed verification and are kept for inspection.",
        _tier(lambda tier: tier.quarantined_files),
        _TIER,
    ),
    counter(
        "kvtier_tier_hit_tokens_total",
        "Tokens that a tier gave.",
        _counted(lambda counters: counters.hit_tokens),
        _TIER,
    ),
    counter(
        "kvtier_tier_miss_tokens_total",
        "Tokens in whole chunks that a tier did not give, by reason.",
        _by_reason(lambda counters: counters.miss_tokens),
        _REASON,
    ),
    counter(
        "kvtier_tier_read_bytes_total",
        "Bytes read from a tier.",
        _counted(lambda counters: counters.read_bytes),
        _TIER,
    ),
    counter(
        "kvtier_tier_lent_bytes_total",
        "Of the bytes read, those that were used where they lay, without a copy.",
        _counted(lambda counters: counters.lent_bytes),
        _TIER,
    ),
    counter(
        "kvtier_tier_written_bytes_total",
        "Bytes written to a tier.",
        _counted(lambda counters: counters.written_bytes),
        _TIER,
    ),
    counter(
        "kvtier_tier_index_bytes_total",
        "Bytes written to a tier for its index, on top of those of chunks.",
        _tier(lambda tier: tier.index_bytes),
        _TIER,
    ),
    histogram(
        "kvtier_tier_read_seconds",
        "Time of one read from a tier.",
        _counted(lambda counters: counters.read_latency),
        _TIER,
    ),
    histogram(
        "kvtier_tier_write_seconds",
        "Time of one write to a tier.",
        _counted(lambda counters: counters.write_latency),
        _TIER,
    ),
    counter(
        "kvtier_tier_corrupt_shards_total",
        "Shards that failed verification; each was a miss.",
        _counted(lambda counters: counters.corrupt_shards),
        _TIER,
    ),
    counter(
        "kvtier_tier_evicted_chunks_total",
        "Chunks that left to make room.",
        _counted(lambda counters: counters.evicted_chunks),
        _TIER,
    ),
    counter(
        "kvtier_tier_refused_chunks_total",
        "Chunks that a tier did not take in, by reason.",
        _by_reason(lambda counters: counters.refused_chunks),
        _REASON,
    ),
    counter(
        "kvtier_tier_io_errors_total",
        "Faults of a tier's medium.",
        _counted(lambda counters: counters.io_errors),
        _TIER,
    ),
    counter(
        "kvtier_codec_fallback_chunks_total",
        "Chunks that another codec packed than the configured one, by reason.",
        _fallbacks,
        ("codec", "reason"),
    ),
    gauge(
        "kvtier_tier_link_latency_seconds",
        "Time until a tier answers, as measured.",
        _links(lambda link: link.latency_s),
        _TIER,
    ),
    gauge(
        "kvtier_tier_link_bytes_per_second",
        "Speed of a tier once it answers, as measured.",
        _links(lambda link: link.bytes_per_s),
        _TIER,
    ),
    gauge(
        "kvtier_move_bytes_per_second",
        "Speed from DRAM into the engine's blocks, as measured, by codec.",
        _moves,
        ("codec",),
    ),
    gauge(
        "kvtier_prefill_seconds_per_token",
        "Time to compute the first token of a prompt, as measured; later ones take longer.",
        _prefill,
    ),
    counter(
        "kvtier_load_decisions_total",
        "Runs of tokens of admitted requests, by the tier that has them and what was decided.",
        _decisions,
        _REASON,
    ),
    counter(
        "kvtier_saved_compute_seconds_total",
        "How much longer computing would have taken than loads did, by estimate.",
        _cache(lambda cache: cache.saved_compute_s),
    ),
    counter(
        "kvtier_lost_compute_seconds_total",
        "How much longer loads took than computing would have taken, by estimate.",
        _cache(lambda cache: cache.lost_compute_s),
    ),
    counter(
        "kvtier_events_dropped_total",
        "KV events that nobody took in time; what is held was told anew after each gap.",
        _cache(lambda cache: cache.events_dropped),
    ),
    gauge("kvtier_loads_inflight", "Loads under way.", _cache(lambda cache: cache.loads_inflight)),
    gauge(
        "kvtier_stores_inflight",
        "Chunks on their way from HBM to DRAM.",
        _cache(lambda cache: cache.stores_inflight),
    ),
    gauge(
        "kvtier_writes_queued",
        "Chunks that wait to be written to disk or are being written.",
        _cache(lambda cache: cache.writes_queued),
    ),
    gauge(
        "kvtier_deletions_queued",
        "Chunks that a remote was not asked to delete yet, or did not answer about.",
        _cache(lambda cache: cache.deletions_queued),
    ),
    gauge(
        "kvtier_late_jobs",
        "Reads that were given up and have not come back; their slots are not reused.",
        _cache(lambda cache: cache.late_jobs),
    ),
)

#: What ``--tenant-metrics`` adds: at most some hundred tenants, each with few series.
TENANT_SERIES: Final[tuple[Series[CacheStats], ...]] = (
    counter(
        "kvtier_tenant_hit_tokens_total",
        "Tokens that a tier gave to a tenant.",
        _tenant_hits,
        ("tenant", *_TIER),
    ),
    counter(
        "kvtier_tenant_miss_tokens_total",
        "Tokens in whole chunks that a tenant asked a tier for in vain, by reason.",
        _tenant_misses,
        ("tenant", *_REASON),
    ),
)
