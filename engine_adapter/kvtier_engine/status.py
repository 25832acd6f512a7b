"""What the server says of its own state: as ``/health``, and in full as ``/v1/kvtier/stats``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.cache.tenancy.held import HeldPins
from kvtier.obs.stats import CacheStats, CostStats
from kvtier.obs.told import told_cache, told_health, told_tenant, told_tier
from kvtier.types import Tier
from kvtier_engine.api.app import Health
from kvtier_engine.api.ports import ServedModel
from kvtier_engine.engine_stats import EngineStats
from kvtier_engine.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while a server runs.

    ``stored_bytes_per_token`` is what the codec's shards take in a tier, headers and padding
    included. ``cache_problem`` says why there is no cache although one was asked for.
    """

    device: str
    dtype: str
    block_tokens: int
    block_bytes: int
    chunk_tokens: int
    codec: str
    stored_bytes_per_token: float
    cache_problem: str = ""


def is_degraded(facts: Facts, cache: CacheStats | None) -> bool:
    """Tell whether a tier that was asked for is not as it should be."""
    return bool(facts.cache_problem) or (cache is not None and cache.degraded)


def health_of(
    model: ServedModel,
    facts: Facts,
    engine: EngineStats,
    cache: CacheStats | None,
    *,
    draining: bool,
) -> Health:
    """Return the health report. Trouble with a tier degrades; only a dead engine stops."""
    status = "degraded" if is_degraded(facts, cache) else "ok"
    status = "draining" if draining else status
    status = "failed" if engine.error else status
    report: dict[str, Any] = {
        "status": status,
        "model": model.name,
        "weights_id": model.weights_id,
        "device": facts.device,
        "dtype": facts.dtype,
        "context_tokens": model.context_tokens,
        "block_tokens": facts.block_tokens,
        "chunk_tokens": facts.chunk_tokens,
        "codec": facts.codec,
        "bytes_per_token": {
            "hbm": facts.block_bytes / facts.block_tokens,
            "stored": facts.stored_bytes_per_token,
        },
        "sequences": _sequences(engine),
        "tiers": _tiers(facts, engine, cache),
    }
    return Health(serving=not engine.error and not draining, report=report)


def stats_of(
    model: ServedModel,
    facts: Facts,
    now: Snapshot,
    *,
    uptime_s: float,
    tenants: bool,
) -> dict[str, Any]:
    """Return every figure of the tiers; counters since the start, seconds and bytes throughout.

    ``tenants`` says whether those are told apart that clients may not know of.
    """
    engine, cache = now.engine, now.cache
    report: dict[str, Any] = {
        "model": model.name,
        "uptime_s": uptime_s,
        "degraded": now.degraded,
        "sequences": _sequences(engine),
        "prompt_tokens": engine.prompt_tokens,
        "generated_tokens": engine.generated_tokens,
        "hit_tokens": {tier.value: engine.hit_tokens.get(tier, 0) for tier in Tier},
        "tiers": [_hbm(facts, engine), *map(told_tier, now.tiers)],
    }
    if cache is not None:
        report["cache"] = told_cache(cache)
        report["costs"] = _costs(cache.costs)
    if tenants:
        report["tenants"] = {name: told_tenant(each) for name, each in now.tenants.items()}
    return report


def told_pins(pins: Sequence[HeldPins]) -> list[dict[str, Any]]:
    """Return what is pinned, by tenant (the digest of its salt, empty for none) and time left."""
    return [
        {
            "tenant": each.tenant.hex(),
            "seconds": each.seconds,
            "objects": each.chunks,
            "dram_bytes": each.dram_bytes,
            "disk_bytes": each.disk_bytes,
        }
        for each in pins
    ]


def _tiers(facts: Facts, engine: EngineStats, cache: CacheStats | None) -> list[dict[str, Any]]:
    hbm = _hbm(facts, engine)
    if cache is not None:
        return [hbm, *map(told_health, cache.tiers)]
    if facts.cache_problem:
        problem = {"state": "unavailable", "detail": facts.cache_problem, "codec": facts.codec}
        return [hbm, {"name": Tier.DRAM.value, **problem, "used_bytes": 0, "capacity_bytes": 0}]
    return [hbm]


def _hbm(facts: Facts, engine: EngineStats) -> dict[str, Any]:
    held = engine.blocks_used + engine.blocks_cached
    return {
        "name": Tier.HBM.value,
        "state": "ok",
        "detail": "",
        "codec": facts.dtype,
        "used_bytes": held * facts.block_bytes,
        "capacity_bytes": engine.blocks_total * facts.block_bytes,
    }


def _costs(costs: CostStats) -> dict[str, Any]:
    decisions: dict[str, dict[str, int]] = {}
    for (tier, reason), count in costs.decisions.items():
        decisions.setdefault(tier.value, {})[reason] = count
    return {
        "links": {
            tier.value: {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
            for tier, link in costs.links.items()
        },
        "moves_bytes_per_s": dict(costs.moves_bytes_per_s),
        "prefill_s_per_token": costs.prefill_s_per_token,
        "decisions": decisions,
    }


def _sequences(engine: EngineStats) -> dict[str, int]:
    return {"running": engine.running, "waiting": engine.waiting, "loading": engine.loading}
