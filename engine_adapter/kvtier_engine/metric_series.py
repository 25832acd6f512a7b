"""Every metric of ``kvtier-serve``: name, labels, meaning, and where its value stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Final

from kvtier.obs.stats import CacheStats, Histogram, LinkStats, TierCounters, TierStats
from kvtier.types import MissReason, Tier
from kvtier_engine.api.service import ENDPOINTS, Outcome
from kvtier_engine.engine_stats import EngineStats
from kvtier_engine.prometheus import Kind, Labels, Reader, Series, Snapshot
from kvtier_engine.types import FinishReason


def _engine(read: Callable[[EngineStats], float | Histogram]) -> Reader:
    return lambda snapshot: [((), read(snapshot.engine))]


def _cache(read: Callable[[CacheStats], float]) -> Reader:
    return lambda snapshot: [((), read(snapshot.cache))] if snapshot.cache is not None else []


def _tier(read: Callable[[TierStats], float | Histogram]) -> Reader:
    return lambda snapshot: [((tier.tier.value,), read(tier)) for tier in snapshot.tiers]


def _counted(read: Callable[[TierCounters], float | Histogram]) -> Reader:
    return _tier(lambda tier: read(tier.counters))


def _by_reason(read: Callable[[TierCounters], dict[MissReason, int]]) -> Reader:
    return lambda snapshot: [
        ((tier.tier.value, reason.value), read(tier.counters).get(reason, 0))
        for tier, reason in product(snapshot.tiers, MissReason)
    ]


def _outcomes(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    for endpoint, outcome in product(ENDPOINTS, Outcome):
        yield (endpoint, outcome.value), snapshot.requests.outcomes[endpoint, outcome]


def _sequences(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    engine = snapshot.engine
    yield ("running",), engine.running
    yield ("waiting",), engine.waiting
    yield ("loading",), engine.loading


def _blocks(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    engine = snapshot.engine
    yield ("used",), engine.blocks_used
    yield ("cached",), engine.blocks_cached
    yield ("free",), engine.blocks_total - engine.blocks_used - engine.blocks_cached


def _hits(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    return [((tier.value,), snapshot.engine.hit_tokens.get(tier, 0)) for tier in Tier]


def _finished(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    finished = snapshot.engine.finished
    return [((reason.value,), finished.get(reason, 0)) for reason in FinishReason]


def _links(read: Callable[[LinkStats], float]) -> Reader:
    return lambda snapshot: [
        ((tier.value,), read(link)) for tier, link in snapshot.costs.links.items()
    ]


def _moves(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    return [((codec,), speed) for codec, speed in snapshot.costs.moves_bytes_per_s.items()]


def _prefill(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    seconds = snapshot.costs.prefill_s_per_token
    return [] if seconds is None else [((), seconds)]


def _decisions(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    counts = snapshot.costs.decisions.items()
    return [((tier.value, reason), count) for (tier, reason), count in counts]


def _tenant_hits(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    for name, counters in snapshot.tenants.items():
        for tier, tokens in counters.hit_tokens.items():
            yield (name, tier.value), tokens


def _tenant_misses(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    for name, counters in snapshot.tenants.items():
        for (tier, reason), tokens in counters.miss_tokens.items():
            yield (name, tier.value, reason.value), tokens


def _fallbacks(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    counted = snapshot.cache.codec_fallbacks if snapshot.cache is not None else {}
    return list(counted.items())


def _used_bytes(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    engine = snapshot.engine
    held = engine.blocks_used + engine.blocks_cached
    yield (Tier.HBM.value,), held * snapshot.block_bytes
    yield from (((tier.tier.value,), tier.used_bytes) for tier in snapshot.tiers)


def _capacity_bytes(snapshot: Snapshot) -> Iterable[tuple[Labels, float]]:
    yield (Tier.HBM.value,), snapshot.engine.blocks_total * snapshot.block_bytes
    yield from (((tier.tier.value,), tier.capacity_bytes) for tier in snapshot.tiers)


def _counter(name: str, meaning: str, read: Reader, labels: Labels = ()) -> Series:
    return Series(name, Kind.COUNTER, meaning, read, labels)


def _gauge(name: str, meaning: str, read: Reader, labels: Labels = ()) -> Series:
    return Series(name, Kind.GAUGE, meaning, read, labels)


def _histogram(name: str, meaning: str, read: Reader, labels: Labels = ()) -> Series:
    return Series(name, Kind.HISTOGRAM, meaning, read, labels)


_TIER: Final = ("tier",)
_REASON: Final = ("tier", "reason")

#: Every metric, in the order of the documentation.
SERIES: Final[tuple[Series, ...]] = (
    _counter(
        "kvtier_requests_total",
        "HTTP requests to the OpenAI endpoints that have ended, by how they ended.",
        _outcomes,
        ("endpoint", "outcome"),
    ),
    _histogram(
        "kvtier_request_seconds",
        "Time from acceptance to the last byte of requests that were answered in full.",
        lambda snapshot: [((), snapshot.requests.duration)],
    ),
    _histogram(
        "kvtier_time_to_first_token_seconds",
        "Time from submission of a sequence to its first token.",
        _engine(lambda engine: engine.ttft),
    ),
    _histogram(
        "kvtier_inter_token_seconds",
        "Time between two tokens of a sequence.",
        _engine(lambda engine: engine.itl),
    ),
    _gauge(
        "kvtier_engine_up",
        "1 while the engine runs, 0 once it has died.",
        _engine(lambda engine: float(not engine.error)),
    ),
    _gauge(
        "kvtier_degraded",
        "1 while a tier is not ok; requests are answered all the same.",
        lambda snapshot: [((), float(snapshot.degraded))],
    ),
    _gauge(
        "kvtier_sequences",
        "Sequences in the engine: running, waiting, or loading KV from a tier.",
        _sequences,
        ("state",),
    ),
    _counter(
        "kvtier_sequences_finished_total",
        "Sequences that have ended, by reason.",
        _finished,
        ("reason",),
    ),
    _counter(
        "kvtier_prompt_tokens_total",
        "Prompt tokens of sequences that have begun to run.",
        _engine(lambda engine: engine.prompt_tokens),
    ),
    _counter(
        "kvtier_prompt_hit_tokens_total",
        "Prompt tokens that were not computed, by the tier that they came from.",
        _hits,
        _TIER,
    ),
    _counter(
        "kvtier_refound_tokens_total",
        "Tokens that preempted sequences found again; in no other figure.",
        _engine(lambda engine: engine.refound_tokens),
    ),
    _counter(
        "kvtier_generated_tokens_total",
        "Tokens generated.",
        _engine(lambda engine: engine.generated_tokens),
    ),
    _counter("kvtier_steps_total", "Steps computed.", _engine(lambda engine: engine.steps)),
    _counter(
        "kvtier_step_errors_total",
        "Steps that failed and took their sequences with them.",
        _engine(lambda engine: engine.step_errors),
    ),
    _counter(
        "kvtier_preemptions_total",
        "Sequences that gave up their blocks for others and were continued later.",
        _engine(lambda engine: engine.preemptions),
    ),
    _gauge(
        "kvtier_blocks",
        "Blocks of the pool: used by sequences, cached for later ones, or free.",
        _blocks,
        ("state",),
    ),
    _counter(
        "kvtier_blocks_evicted_total",
        "Cached blocks that were given up for new ones.",
        _engine(lambda engine: engine.blocks_evicted),
    ),
    _counter(
        "kvtier_loads_given_up_total",
        "Loads whose sequence gave its blocks back before it ran.",
        _engine(lambda engine: engine.loads_given_up),
    ),
    _counter(
        "kvtier_cache_faults_total",
        "Calls of the cache that raised; the engine went on without it.",
        _engine(lambda engine: engine.cache_faults),
    ),
    _gauge(
        "kvtier_tier_ok",
        "1 while a tier is ok; /health says what is wrong.",
        _tier(lambda tier: float(tier.state == "ok")),
        _TIER,
    ),
    _gauge("kvtier_tier_used_bytes", "Bytes in use.", _used_bytes, _TIER),
    _gauge("kvtier_tier_capacity_bytes", "Bytes that a tier may use.", _capacity_bytes, _TIER),
    _gauge("kvtier_tier_chunks", "Chunks held.", _tier(lambda tier: tier.chunks), _TIER),
    _gauge(
        "kvtier_tier_pinned_chunks",
        "Chunks that are being read or written and cannot be evicted.",
        _tier(lambda tier: tier.pinned_chunks),
        _TIER,
    ),
    _gauge(
        "kvtier_tier_quarantined_files",
        "Files that failed verification and are kept for inspection.",
        _tier(lambda tier: tier.quarantined_files),
        _TIER,
    ),
    _counter(
        "kvtier_tier_hit_tokens_total",
        "Tokens that a tier gave.",
        _counted(lambda counters: counters.hit_tokens),
        _TIER,
    ),
    _counter(
        "kvtier_tier_miss_tokens_total",
        "Tokens in whole chunks that a tier did not give, by reason.",
        _by_reason(lambda counters: counters.miss_tokens),
        _REASON,
    ),
    _counter(
        "kvtier_tier_read_bytes_total",
        "Bytes read from a tier.",
        _counted(lambda counters: counters.read_bytes),
        _TIER,
    ),
    _counter(
        "kvtier_tier_written_bytes_total",
        "Bytes written to a tier.",
        _counted(lambda counters: counters.written_bytes),
        _TIER,
    ),
    _counter(
        "kvtier_tier_index_bytes_total",
        "Bytes written to a tier for its index, on top of those of chunks.",
        _tier(lambda tier: tier.index_bytes),
        _TIER,
    ),
    _histogram(
        "kvtier_tier_read_seconds",
        "Time of one read from a tier.",
        _counted(lambda counters: counters.read_latency),
        _TIER,
    ),
    _histogram(
        "kvtier_tier_write_seconds",
        "Time of one write to a tier.",
        _counted(lambda counters: counters.write_latency),
        _TIER,
    ),
    _counter(
        "kvtier_tier_corrupt_shards_total",
        "Shards that failed verification; each was a miss.",
        _counted(lambda counters: counters.corrupt_shards),
        _TIER,
    ),
    _counter(
        "kvtier_tier_evicted_chunks_total",
        "Chunks that left to make room.",
        _counted(lambda counters: counters.evicted_chunks),
        _TIER,
    ),
    _counter(
        "kvtier_tier_refused_chunks_total",
        "Chunks that a tier did not take in, by reason.",
        _by_reason(lambda counters: counters.refused_chunks),
        _REASON,
    ),
    _counter(
        "kvtier_tier_io_errors_total",
        "Faults of a tier's medium.",
        _counted(lambda counters: counters.io_errors),
        _TIER,
    ),
    _counter(
        "kvtier_codec_fallback_chunks_total",
        "Chunks that another codec packed than the configured one, by reason.",
        _fallbacks,
        ("codec", "reason"),
    ),
    _gauge(
        "kvtier_tier_link_latency_seconds",
        "Time until a tier answers, as measured.",
        _links(lambda link: link.latency_s),
        _TIER,
    ),
    _gauge(
        "kvtier_tier_link_bytes_per_second",
        "Speed of a tier once it answers, as measured.",
        _links(lambda link: link.bytes_per_s),
        _TIER,
    ),
    _gauge(
        "kvtier_move_bytes_per_second",
        "Speed from DRAM into the engine's blocks, as measured, by codec.",
        _moves,
        ("codec",),
    ),
    _gauge(
        "kvtier_prefill_seconds_per_token",
        "Time to compute the first token of a prompt, as measured; later ones take longer.",
        _prefill,
    ),
    _counter(
        "kvtier_load_decisions_total",
        "Runs of tokens of admitted requests, by the tier that has them and what was decided.",
        _decisions,
        _REASON,
    ),
    _counter(
        "kvtier_saved_compute_seconds_total",
        "How much longer computing would have taken than loads did, by estimate.",
        _cache(lambda cache: cache.saved_compute_s),
    ),
    _counter(
        "kvtier_lost_compute_seconds_total",
        "How much longer loads took than computing would have taken, by estimate.",
        _cache(lambda cache: cache.lost_compute_s),
    ),
    _counter(
        "kvtier_events_dropped_total",
        "KV events that nobody took in time; what is held was told anew after each gap.",
        _cache(lambda cache: cache.events_dropped),
    ),
    _gauge("kvtier_loads_inflight", "Loads under way.", _cache(lambda cache: cache.loads_inflight)),
    _gauge(
        "kvtier_stores_inflight",
        "Chunks on their way from HBM to DRAM.",
        _cache(lambda cache: cache.stores_inflight),
    ),
    _gauge(
        "kvtier_writes_queued",
        "Chunks that wait to be written to disk or are being written.",
        _cache(lambda cache: cache.writes_queued),
    ),
    _gauge(
        "kvtier_late_jobs",
        "Reads that were given up and have not come back; their slots are not reused.",
        _cache(lambda cache: cache.late_jobs),
    ),
)

#: What ``--tenant-metrics`` adds: at most some hundred tenants, each with few series.
TENANT_SERIES: Final[tuple[Series, ...]] = (
    _counter(
        "kvtier_tenant_hit_tokens_total",
        "Tokens that a tier gave to a tenant.",
        _tenant_hits,
        ("tenant", *_TIER),
    ),
    _counter(
        "kvtier_tenant_miss_tokens_total",
        "Tokens in whole chunks that a tenant asked a tier for in vain, by reason.",
        _tenant_misses,
        ("tenant", *_REASON),
    ),
)
