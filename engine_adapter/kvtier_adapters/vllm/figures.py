"""What a cache has counted since the last look, flat, as vLLM carries it to its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvtier.obs.stats import CacheStats

#: How often figures are told, at most.
TOLD_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Series:
    """A metric: its name, what it says, the names of its labels, and whether it only grows."""

    name: str
    text: str
    labels: tuple[str, ...]
    grows: bool = True


SERIES: Final = (
    Series("hit_tokens", "Tokens loaded from a tier", ("tier",)),
    Series("miss_tokens", "Tokens that a tier was asked for in vain", ("tier", "reason")),
    Series("read_bytes", "Bytes read from a tier", ("tier",)),
    Series("written_bytes", "Bytes written to a tier", ("tier",)),
    Series("corrupt_shards", "Shards that failed their checksum", ("tier",)),
    Series("evicted_chunks", "Chunks that left a tier for others", ("tier",)),
    Series("refused_chunks", "Chunks that a tier did not take", ("tier", "reason")),
    Series("io_errors", "Reads and writes that failed", ("tier",)),
    Series("faults", "Errors inside the cache, served without it", ()),
    Series("used_bytes", "Bytes that a tier holds", ("tier",), grows=False),
    Series("tier_ok", "1 while a tier works", ("tier",), grows=False),
    Series("switched_off", "1 once the connector has switched itself off", (), grows=False),
)
_GROWING: Final = frozenset(series.name for series in SERIES if series.grows)


def figures(stats: CacheStats, faults: int, *, off: bool) -> dict[str, float]:
    """Return all figures at one instant: name and labels, joined by ``|``, to value."""
    found: dict[str, float] = {"faults": faults, "switched_off": float(off)}
    for tier in stats.tiers:
        counters, name = tier.counters, tier.tier.value
        for field in ("hit_tokens", "read_bytes", "written_bytes", "corrupt_shards"):
            found[f"{field}|{name}"] = getattr(counters, field)
        found[f"evicted_chunks|{name}"] = counters.evicted_chunks
        found[f"io_errors|{name}"] = counters.io_errors
        for reason, tokens in counters.miss_tokens.items():
            found[f"miss_tokens|{name}|{reason}"] = tokens
        for reason, chunks in counters.refused_chunks.items():
            found[f"refused_chunks|{name}|{reason}"] = chunks
        found[f"used_bytes|{name}"] = tier.used_bytes
        found[f"tier_ok|{name}"] = float(tier.state == "ok")
    return found


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return what has changed: by how much what only grows has grown, and what the rest is now."""
    changed = {}
    for key, value in now.items():
        old = before.get(key)
        if grows(key):
            if value != (old or 0):
                changed[key] = value - (old or 0)
        elif value != old:
            changed[key] = value
    return changed


def merged(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return what two looks, one after the other, tell together."""
    both = dict(first)
    for key, value in second.items():
        both[key] = both.get(key, 0) + value if grows(key) else value
    return both


def grows(key: str) -> bool:
    """Tell whether a figure only grows."""
    return key.partition("|")[0] in _GROWING


def labelled(data: Mapping[str, float]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Iterate over figures as series' names, labels' values, values."""
    for key, value in data.items():
        name, *labels = key.split("|")
        yield name, tuple(labels), value
