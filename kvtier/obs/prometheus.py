"""Tables of series as Prometheus reads them. The library is an extra, imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, cast

from kvtier.obs.series import Kind, S, Series
from kvtier.obs.stats import LATENCY_BOUNDS_S, Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector


def registry_of(snapshot: Callable[[], S], series: Sequence[Series[S]]) -> CollectorRegistry:
    """Return a registry that renders a fresh snapshot at every scrape.

    ``snapshot`` must not block. Whatever is made anew in the process has a registry of its own, so
    what is gone leaves no series behind.
    """
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    # A collector by its shape: to inherit from theirs, it would have to be imported.
    registry.register(cast("Collector", _Scrape(snapshot, series)))
    return registry


class _Scrape(Generic[S]):
    def __init__(self, snapshot: Callable[[], S], series: Sequence[Series[S]]) -> None:
        self._snapshot = snapshot
        self._series = series

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        snapshot = self._snapshot()
        for series in self._series:
            yield _family(series, snapshot)


def _family(series: Series[S], snapshot: S) -> Metric:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    if series.kind is Kind.HISTOGRAM:
        histograms = HistogramMetricFamily(series.name, series.help, labels=series.labels)
        for labels, value in series.read(snapshot):
            assert isinstance(value, Histogram)
            histograms.add_metric(labels, _buckets(value), value.total_s)
        return histograms
    plain = CounterMetricFamily if series.kind is Kind.COUNTER else GaugeMetricFamily
    family = plain(series.name, series.help, labels=series.labels)
    for labels, value in series.read(snapshot):
        assert not isinstance(value, Histogram)
        family.add_metric(labels, value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
