"""Spans of a cache, as OpenTelemetry's own exporter receives them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, DiskConfig
from kvtier.obs.spans import OtelSpans
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import MissReason
from tests.lib.cache_setup import BLOCK, CHUNK, CHUNK_BYTES, NAMESPACE, fails, written


@pytest.fixture(scope="module")
def provided() -> InMemorySpanExporter:
    """What the process's provider exports to; there can be but one."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def exporter(provided: InMemorySpanExporter) -> InMemorySpanExporter:
    provided.clear()
    return provided


class Traced:
    """A cache that tells spans, with an engine beside it."""

    def __init__(self, folder: Path) -> None:
        disk = DiskConfig(str(folder), 32 * CHUNK_BYTES)
        config = CacheConfig(dram_bytes=8 * CHUNK_BYTES, disk=disk, slab_bytes=4096)
        self.cache = Cache(config, spans=OtelSpans())
        self.engine = EngineDouble(self.cache, NAMESPACE, block_tokens=BLOCK, block_count=96)

    def close(self) -> None:
        self.engine.close()
        self.cache.close()


@pytest.fixture
def traced(tmp_path: Path, exporter: InMemorySpanExporter) -> Iterator[Traced]:
    traced = Traced(tmp_path)
    yield traced
    traced.close()


def spans(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == f"kvtier.{name}"]


def told(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("kvtier."): value for name, value in (span.attributes or {}).items()}


def test_each_step_of_a_request_is_a_span(
    tmp_path: Path, traced: Traced, exporter: InMemorySpanExporter
) -> None:
    traced.engine.store(traced.engine.sequence(range(2 * CHUNK)))
    written(traced.engine)
    (store,) = spans(exporter, "store")
    nbytes = 2 * CHUNK_BYTES
    assert told(store) == {
        "tier": "dram", "tokens": 2 * CHUNK, "bytes": nbytes, "outcome": "ok"
    }  # fmt: skip
    traced.close()
    again = Traced(tmp_path)
    sequence = again.engine.sequence(range(2 * CHUNK))
    wait_until(lambda: bool(again.engine.match(sequence).hits), "the disk does not open")
    again.engine.check(again.engine.load(again.engine.match(sequence)))
    again.close()
    match = spans(exporter, "match")[-1]
    assert told(match) == {"tokens": 2 * CHUNK, "hit_tokens": 2 * CHUNK, "outcome": "ok"}
    fills = spans(exporter, "fill")
    assert [told(fill) for fill in fills] == [
        {"tier": "disk", "bytes": CHUNK_BYTES, "outcome": "ok"}
    ] * 2
    (load,) = spans(exporter, "load")
    assert told(load) == {"tokens": 2 * CHUNK, "tokens.disk": 2 * CHUNK, "outcome": "ok"}
    for span in (store, match, *fills, load):
        assert span.start_time is not None
        assert span.end_time is not None
        assert 0 <= span.end_time - span.start_time < 60e9
    assert load.start_time is not None
    assert fills[0].end_time is not None
    assert load.start_time <= fills[0].end_time


def test_what_fails_says_why(traced: Traced, exporter: InMemorySpanExporter) -> None:
    plan = traced.engine.begin_store(traced.engine.sequence(range(CHUNK)), range(1))
    assert plan is not None
    traced.cache.finish([fails(plan)])
    (store,) = spans(exporter, "store")
    assert told(store)["outcome"] == MissReason.WORKER.value


def test_a_lookup_that_finds_nothing_is_a_span_too(
    traced: Traced, exporter: InMemorySpanExporter
) -> None:
    traced.engine.match(traced.engine.sequence(range(3 * CHUNK)))
    assert told(spans(exporter, "match")[-1])["hit_tokens"] == 0


def test_seconds_become_the_length_of_a_span(exporter: InMemorySpanExporter) -> None:
    OtelSpans(wall_ns=lambda: 5_000_000_000).record("kvtier.load", 1.5, {"kvtier.tokens": 3})
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (3_500_000_000, 5_000_000_000)


def test_what_the_listener_raises_costs_the_span_alone(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*spans: Any, **how: Any) -> None:
        raise RuntimeError("no room")

    listener = OtelSpans()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opentelemetry.sdk.trace.Tracer.start_span", broken)
        for _ in range(3):
            listener.record("kvtier.load", 0.5, {})
    assert listener.lost_count == 3
    assert len(caplog.records) == 1
    listener.record("kvtier.load", 0.5, {})
    assert len(exporter.get_finished_spans()) == 1


def test_without_a_provider_nothing_is_lost_in_silence() -> None:
    code = (
        "from kvtier.obs.spans import OtelSpans\n"
        "from kvtier.errors import ConfigError\n"
        "try: OtelSpans()\n"
        "except ConfigError as error: raise SystemExit(str(error))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "no tracer provider" in ended.stderr
