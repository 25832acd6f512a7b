"""What Prometheus is told: each metric's name, labels and meaning, and where its value stands.

Plain tables over snapshots of any kind; ``kvtier.obs.prometheus`` renders them. Nothing is counted
here, so no figure exists twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvtier.obs.stats import Histogram

Labels = tuple[str, ...]
S = TypeVar("S")
T = TypeVar("T")
Values = Iterable[tuple[Labels, float | Histogram]]
Reader = Callable[[S], Values]


class Kind(StrEnum):
    """What Prometheus may do with a series."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Series(Generic[S]):
    """One metric: its name as scraped (counters end in ``_total``), labels, and its values."""

    name: str
    kind: Kind
    help: str
    read: Reader[S]
    labels: Labels = ()


def counter(name: str, meaning: str, read: Reader[S], labels: Labels = ()) -> Series[S]:
    """Return a series that never falls; its name ends in ``_total``."""
    return Series(name, Kind.COUNTER, meaning, read, labels)


def gauge(name: str, meaning: str, read: Reader[S], labels: Labels = ()) -> Series[S]:
    """Return a series that goes up and down."""
    return Series(name, Kind.GAUGE, meaning, read, labels)


def histogram(name: str, meaning: str, read: Reader[S], labels: Labels = ()) -> Series[S]:
    """Return a series of seconds; its name ends in ``_seconds``."""
    return Series(name, Kind.HISTOGRAM, meaning, read, labels)


def seen_from(series: Series[S], read: Reader[T]) -> Series[T]:
    """Return the same metric with its values from another kind of snapshot."""
    return Series(series.name, series.kind, series.help, read, series.labels)
