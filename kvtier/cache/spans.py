"""What the spans of a cache say. Names and attributes are listed in docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cache.below.fill import Fill
from kvtier.cache.match import Pending, Ready
from kvtier.obs.spans import Attribute, Spans
from kvtier.tiers.dram import DramRecord
from kvtier.types import LoadOutcome, MissReason, Tier

_OK = "ok"


def record_match(spans: Spans, match: Ready | Pending, tokens: int, seconds: float) -> None:
    """Tell of a lookup of a sequence of so many tokens."""
    found = match.tokens if isinstance(match, Ready) else 0
    outcome = _OK if isinstance(match, Ready) else "pending"
    told: dict[str, Attribute] = {
        "kvtier.tokens": tokens,
        "kvtier.hit_tokens": found,
        "kvtier.outcome": outcome,
    }
    spans.record("kvtier.match", seconds, told)


def record_load(spans: Spans | None, outcome: LoadOutcome, seconds: float) -> None:
    """Tell of a load that has ended. Its outcome is why its tokens end where they do."""
    if spans is None:
        return
    reasons = [miss.reason.value for miss in outcome.misses]
    told: dict[str, Attribute] = {
        "kvtier.tokens": outcome.end_token - outcome.start_token,
        "kvtier.outcome": reasons[0] if reasons else _OK,
    }
    for tier, tokens in outcome.tokens_by_tier.items():
        told[f"kvtier.tokens.{tier.value}"] = tokens
    spans.record("kvtier.load", seconds, told)


def record_fill(spans: Spans, fill: Fill, seconds: float) -> None:
    """Tell of a chunk that was brought up from below DRAM, or was not."""
    told: dict[str, Attribute] = {
        "kvtier.tier": fill.source.origin.tier.value,
        "kvtier.bytes": fill.record.entry.nbytes,
        "kvtier.outcome": _OK if fill.failure is None else fill.failure.value,
    }
    spans.record("kvtier.fill", seconds, told)


def record_store(
    spans: Spans,
    records: Sequence[DramRecord],
    chunk_tokens: int,
    reason: MissReason | None,
    seconds: float,
) -> None:
    """Tell of chunks that were packed into DRAM, or were not."""
    told: dict[str, Attribute] = {
        "kvtier.tier": Tier.DRAM.value,
        "kvtier.tokens": len(records) * chunk_tokens,
        "kvtier.bytes": sum(record.entry.nbytes for record in records),
        "kvtier.outcome": _OK if reason is None else reason.value,
    }
    spans.record("kvtier.store", seconds, told)
