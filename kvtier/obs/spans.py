"""Spans: what was done, when it began and how long it took, for a tracing system.

A span is told once it is over, so what goes on costs nothing, and without a listener the only cost
is to see that there is none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from kvtier.errors import ConfigError, MissingExtraError

_log = logging.getLogger(__name__)

Attribute = str | int | float | bool


class Spans(Protocol):
    """Whoever listens. Called under the cache's lock: returns at once, and raises nothing."""

    def record(self, name: str, seconds: float, attributes: Mapping[str, Attribute]) -> None:
        """Take a span that took so long and ends now."""
        ...


class OtelSpans:
    """Hands spans to OpenTelemetry. What exports them batches, so that no request waits for it."""

    def __init__(self, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        """Use the process's tracer provider.

        Raises ``MissingExtraError`` without OpenTelemetry, ``ConfigError`` where no provider has
        been set: all spans would be lost in silence.
        """
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise MissingExtraError(
                'spans need OpenTelemetry: pip install "kvtier[otel]"'
            ) from error
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            raise ConfigError(
                "OpenTelemetry has no tracer provider; opentelemetry-instrument sets one, as does "
                "opentelemetry.trace.set_tracer_provider"
            )
        self._tracer = trace.get_tracer("kvtier")
        self._wall_ns = wall_ns
        self.lost_count = 0

    def record(self, name: str, seconds: float, attributes: Mapping[str, Attribute]) -> None:
        """Hand over a span."""
        self._record_boundary(name, seconds, attributes)

    def _record_boundary(
        self, name: str, seconds: float, attributes: Mapping[str, Attribute]
    ) -> None:
        """What a provider or its exporter raises costs the span and nothing else."""
        end = self._wall_ns()
        start = end - int(seconds * 1e9)
        try:
            self._tracer.start_span(name, start_time=start, attributes=attributes).end(end)
        # Requests go on, whatever a provider or its exporter raises.
        except Exception:
            if not self.lost_count:
                _log.exception("a span was lost; others that are lost are counted")
            self.lost_count += 1
