"""What a server's figures were in the last while, so that whoever begins to look sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from kvtier.constants import HISTORY_SAMPLES_MAX

_KEPT: Final = ("uptime_s", "prompt_tokens", "hit_tokens")
_KEPT_OF_CONNECTIONS: Final = ("read_bytes", "written_bytes")
_KEPT_OF_TIER: Final = (
    "name", "used_bytes", "hit_tokens", "miss_tokens", "read_bytes", "written_bytes",
    "evicted_chunks",
)  # fmt: skip
_KEPT_OF_TIMES: Final = ("read_s", "write_s")


class History:
    """The latest ``HISTORY_SAMPLES_MAX`` samples. Used by one loop."""

    def __init__(self) -> None:
        self._samples: deque[dict[str, Any]] = deque(maxlen=HISTORY_SAMPLES_MAX)

    def note(self, stats: Mapping[str, Any]) -> None:
        """Keep what can be drawn over time of a server's figures; a full history drops its first.

        A sample has the form of the figures, with fewer of them.
        """
        sample = {name: stats[name] for name in _KEPT}
        sample["tiers"] = [_kept_of(tier) for tier in stats["tiers"]]
        connections = stats.get("connections", {})
        sample["connections"] = {name: connections.get(name, 0) for name in _KEPT_OF_CONNECTIONS}
        self._samples.append(sample)

    def told(self) -> dict[str, Any]:
        """Return the samples as JSON, the oldest first."""
        return {"samples": list(self._samples)}


def _kept_of(tier: Mapping[str, Any]) -> dict[str, Any]:
    times = {name: {"counts": tier[name]["counts"]} for name in _KEPT_OF_TIMES if name in tier}
    return {name: tier[name] for name in _KEPT_OF_TIER if name in tier} | times
