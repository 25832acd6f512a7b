"""What the engine and the cache count, as Prometheus reads it.

Nothing is counted here. A scrape reads one snapshot of what the owners count and renders it, so
that no figure exists twice and an engine made anew in the process leaves no series behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvtier.obs.stats import (
    LATENCY_BOUNDS_S,
    CacheStats,
    CostStats,
    Histogram,
    TenantCounters,
    TierStats,
)
from kvtier_engine.api.service import RequestCounters
from kvtier_engine.engine_stats import EngineStats

Labels = tuple[str, ...]


class Kind(StrEnum):
    """What Prometheus may do with a series."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a scrape tells, at one instant. ``cache`` is None without one."""

    engine: EngineStats
    cache: CacheStats | None
    requests: RequestCounters
    block_bytes: int
    degraded: bool

    @property
    def tiers(self) -> tuple[TierStats, ...]:
        """The tiers below HBM."""
        return () if self.cache is None else self.cache.tiers

    @property
    def costs(self) -> CostStats:
        """What loading and computing are measured to cost."""
        return CostStats() if self.cache is None else self.cache.costs

    @property
    def tenants(self) -> Mapping[str, TenantCounters]:
        """What tenants got, by the name that stands for each."""
        return {} if self.cache is None else self.cache.tenants


Reader = Callable[[Snapshot], Iterable[tuple[Labels, float | Histogram]]]


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: its name as scraped (counters end in ``_total``), labels, and its values."""

    name: str
    kind: Kind
    help: str
    read: Reader
    labels: Labels = ()

    def family(self, snapshot: Snapshot) -> Metric:
        """Return the metric with its present values."""
        if self.kind is Kind.HISTOGRAM:
            histograms = HistogramMetricFamily(self.name, self.help, labels=self.labels)
            for labels, value in self.read(snapshot):
                assert isinstance(value, Histogram)
                histograms.add_metric(labels, _buckets(value), value.total_s)
            return histograms
        plain = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        family = plain(self.name, self.help, labels=self.labels)
        for labels, value in self.read(snapshot):
            assert not isinstance(value, Histogram)
            family.add_metric(labels, value)
        return family


def counter(name: str, meaning: str, read: Reader, labels: Labels = ()) -> Series:
    """Return a series that never falls; its name ends in ``_total``."""
    return Series(name, Kind.COUNTER, meaning, read, labels)


def gauge(name: str, meaning: str, read: Reader, labels: Labels = ()) -> Series:
    """Return a series that goes up and down."""
    return Series(name, Kind.GAUGE, meaning, read, labels)


def histogram(name: str, meaning: str, read: Reader, labels: Labels = ()) -> Series:
    """Return a series of seconds; its name ends in ``_seconds``."""
    return Series(name, Kind.HISTOGRAM, meaning, read, labels)


class EngineCollector(Collector):
    """Renders a fresh snapshot at every scrape. ``snapshot`` must not block."""

    def __init__(self, snapshot: Callable[[], Snapshot], series: Sequence[Series]) -> None:
        self._snapshot = snapshot
        self._series = series

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        snapshot = self._snapshot()
        for series in self._series:
            yield series.family(snapshot)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
