"""What the server says of its own state: one snapshot, told as ``/health`` and to Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier.obs.stats import CacheStats
from kvtier.types import Tier
from kvtier_engine.api.app import Health
from kvtier_engine.api.ports import ServedModel
from kvtier_engine.engine_stats import EngineStats


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
        "sequences": {
            "running": engine.running,
            "waiting": engine.waiting,
            "loading": engine.loading,
        },
        "tiers": _tiers(facts, engine, cache),
    }
    return Health(serving=not engine.error and not draining, report=report)


def _tiers(facts: Facts, engine: EngineStats, cache: CacheStats | None) -> list[dict[str, Any]]:
    held = engine.blocks_used + engine.blocks_cached
    hbm = _tier(
        Tier.HBM, "ok", "", held * facts.block_bytes, engine.blocks_total * facts.block_bytes
    )
    if cache is not None:
        return [
            hbm,
            *(
                _tier(tier.tier, tier.state, tier.detail, tier.used_bytes, tier.capacity_bytes)
                for tier in cache.tiers
            ),
        ]
    if facts.cache_problem:
        return [hbm, _tier(Tier.DRAM, "unavailable", facts.cache_problem, 0, 0)]
    return [hbm]


def _tier(
    tier: Tier, state: str, detail: str, used_bytes: int, capacity_bytes: int
) -> dict[str, Any]:
    return {
        "name": tier.value,
        "state": state,
        "detail": detail,
        "used_bytes": used_bytes,
        "capacity_bytes": capacity_bytes,
    }
