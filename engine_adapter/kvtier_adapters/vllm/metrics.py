"""The connector's figures in vLLM's own terms: its log line and its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.types import Tier
from kvtier_adapters.vllm.figures import SERIES, labelled, merged


def by_source(tokens: Mapping[Tier, int]) -> dict[Any, int]:
    """Return tokens by tier in the words of vLLM 0.32; 0.26 has none, and does not ask."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    names = {Tier.DRAM: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}
    counted: dict[Any, int] = {}
    for tier, count in tokens.items():
        source = names.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
        counted[source] = counted.get(source, 0) + count
    return counted


@dataclass
class KVTierStats(KVConnectorStats):  # type: ignore[misc]  # vLLM's classes are not seen here.
    """Figures of an interval, as ``kvtier_adapters.vllm.figures`` names them."""

    def reset(self) -> None:
        """Forget the interval."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add a later interval."""
        return KVTierStats(data=merged(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return what stands in the log: tokens by tier, and what went wrong."""
        shown = ("hit_tokens", "corrupt_shards", "io_errors", "faults")
        return {
            f"kvtier {name} {' '.join(labels)}".strip(): value
            for name, labels, value in labelled(self.data)
            if name in shown and value
        }

    def is_empty(self) -> bool:
        """Tell whether nothing has changed."""
        return not self.data


class KVTierPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # As above.
    """Counters and gauges named ``vllm:kvtier_..``, with vLLM's own labels and ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        self._metrics = {
            series.name: (counter if series.grows else gauge)(
                name=f"vllm:kvtier_{series.name}",
                documentation=series.text,
                labelnames=[*labelnames, *series.labels],
            )
            for series in SERIES
        }
        self._grows = {series.name: series.grows for series in SERIES}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's figures."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labels, value in labelled(transfer_stats_data):
            metric = self._metrics[name].labels(*engine, *labels)
            if self._grows[name]:
                metric.inc(value)
            else:
                metric.set(value)
