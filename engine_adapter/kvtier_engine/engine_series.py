"""The metrics of an engine: of requests, of itself, and of the tiers with its blocks as one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Final

from kvtier.obs.series import Reader, Series, Values, counter, gauge, histogram, seen_from
from kvtier.obs.stats import CacheStats, Histogram
from kvtier.obs.tier_series import TENANT_SERIES, TIER_SERIES
from kvtier.types import Tier
from kvtier_engine.api.service import ENDPOINTS, Outcome
from kvtier_engine.engine_stats import EngineStats
from kvtier_engine.snapshot import Snapshot
from kvtier_engine.types import FinishReason


def _engine(read: Callable[[EngineStats], float | Histogram]) -> Reader[Snapshot]:
    return lambda snapshot: [((), read(snapshot.engine))]


def _outcomes(snapshot: Snapshot) -> Values:
    for endpoint, outcome in product(ENDPOINTS, Outcome):
        yield (endpoint, outcome.value), snapshot.requests.outcomes[endpoint, outcome]


def _sequences(snapshot: Snapshot) -> Values:
    engine = snapshot.engine
    yield ("running",), engine.running
    yield ("waiting",), engine.waiting
    yield ("loading",), engine.loading


def _blocks(snapshot: Snapshot) -> Values:
    engine = snapshot.engine
    yield ("used",), engine.blocks_used
    yield ("cached",), engine.blocks_cached
    yield ("free",), engine.blocks_total - engine.blocks_used - engine.blocks_cached


def _hits(snapshot: Snapshot) -> Values:
    return [((tier.value,), snapshot.engine.hit_tokens.get(tier, 0)) for tier in Tier]


def _finished(snapshot: Snapshot) -> Values:
    finished = snapshot.engine.finished
    return [((reason.value,), finished.get(reason, 0)) for reason in FinishReason]


def _blocks_used(snapshot: Snapshot) -> float:
    engine = snapshot.engine
    return (engine.blocks_used + engine.blocks_cached) * snapshot.block_bytes


def _blocks_total(snapshot: Snapshot) -> float:
    return snapshot.engine.blocks_total * snapshot.block_bytes


#: What the tiers' own metrics tell of HBM, which is no tier of the cache.
_HBM: Final[dict[str, Callable[[Snapshot], float]]] = {
    "kvtier_tier_used_bytes": _blocks_used,
    "kvtier_tier_capacity_bytes": _blocks_total,
}


def _with_hbm(series: Series[CacheStats]) -> Series[Snapshot]:
    hbm = _HBM.get(series.name)

    def read(snapshot: Snapshot) -> Values:
        if hbm is not None:
            yield (Tier.HBM.value,), hbm(snapshot)
        if snapshot.cache is not None:
            yield from series.read(snapshot.cache)

    return seen_from(series, read)


#: In the order of the documentation.
_OWN: Final[tuple[Series[Snapshot], ...]] = (
    counter(
        "kvtier_requests_total",
        "HTTP requests to the OpenAI endpoints that have ended, by how they ended.",
        _outcomes,
        ("endpoint", "outcome"),
    ),
    histogram(
        "kvtier_request_seconds",
        "Time from acceptance to the last byte of requests that were answered in full.",
        lambda snapshot: [((), snapshot.requests.duration)],
    ),
    histogram(
        "kvtier_time_to_first_token_seconds",
        "Time from submission of a sequence to its first token.",
        _engine(lambda engine: engine.ttft),
    ),
    histogram(
        "kvtier_inter_token_seconds",
        "Time between two tokens of a sequence.",
        _engine(lambda engine: engine.itl),
    ),
    gauge(
        "kvtier_engine_up",
        "1 while the engine runs, 0 once it has died.",
        _engine(lambda engine: float(not engine.error)),
    ),
    gauge(
        "kvtier_degraded",
        "1 while a tier is not ok; requests are answered all the same.",
        lambda snapshot: [((), float(snapshot.degraded))],
    ),
    gauge(
        "kvtier_sequences",
        "Sequences in the engine: running, waiting, or loading KV from a tier.",
        _sequences,
        ("state",),
    ),
    counter(
        "kvtier_sequences_finished_total",
        "Sequences that have ended, by reason.",
        _finished,
        ("reason",),
    ),
    counter(
        "kvtier_prompt_tokens_total",
        "Prompt tokens of sequences that have begun to run.",
        _engine(lambda engine: engine.prompt_tokens),
    ),
    counter(
        "kvtier_prompt_hit_tokens_total",
        "Prompt tokens that were not computed, by the tier that they came from.",
        _hits,
        ("tier",),
    ),
    counter(
        "kvtier_refound_tokens_total",
        "Tokens that preempted sequences found again; in no other figure.",
        _engine(lambda engine: engine.refound_tokens),
    ),
    counter(
        "kvtier_generated_tokens_total",
        "Tokens generated.",
        _engine(lambda engine: engine.generated_tokens),
    ),
    counter("kvtier_steps_total", "Steps computed.", _engine(lambda engine: engine.steps)),
    counter(
        "kvtier_step_errors_total",
        "Steps that failed and took their sequences with them.",
        _engine(lambda engine: engine.step_errors),
    ),
    counter(
        "kvtier_preemptions_total",
        "Sequences that gave up their blocks for others and were continued later.",
        _engine(lambda engine: engine.preemptions),
    ),
    gauge(
        "kvtier_blocks",
        "Blocks of the pool: used by sequences, cached for later ones, or free.",
        _blocks,
        ("state",),
    ),
    counter(
        "kvtier_blocks_evicted_total",
        "Cached blocks that were given up for new ones.",
        _engine(lambda engine: engine.blocks_evicted),
    ),
    counter(
        "kvtier_loads_given_up_total",
        "Loads whose sequence gave its blocks back before it ran.",
        _engine(lambda engine: engine.loads_given_up),
    ),
    counter(
        "kvtier_cache_faults_total",
        "Calls of the cache that raised; the engine went on without it.",
        _engine(lambda engine: engine.cache_faults),
    ),
)

ENGINE_SERIES: Final = (*_OWN, *map(_with_hbm, TIER_SERIES))
#: What ``--tenant-metrics`` adds.
ENGINE_TENANT_SERIES: Final = tuple(map(_with_hbm, TENANT_SERIES))
