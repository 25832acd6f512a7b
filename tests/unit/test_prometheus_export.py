"""``/metrics``: every figure once, as its owner counts it, and as the page documents it."""

from __future__ import annotations

import re
from collections import Counter
from copy import deepcopy
from dataclasses import astuple, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.obs.prometheus import registry_of
from kvtier.obs.series import Kind, S, Series
from kvtier.obs.stats import (
    CacheStats,
    CostStats,
    Histogram,
    LinkStats,
    TenantCounters,
    TierCounters,
    TierStats,
)
from kvtier.obs.tier_series import TIER_SERIES
from kvtier.types import MissReason, Tier
from kvtier_engine.api.service import Outcome, RequestCounters
from kvtier_engine.engine_series import ENGINE_SERIES, ENGINE_TENANT_SERIES
from kvtier_engine.engine_stats import EngineStats
from kvtier_engine.snapshot import Snapshot
from kvtier_engine.types import FinishReason
from kvtier_server.counters import Counters as DaemonCounters
from kvtier_server.figures import DAEMON_SERIES
from kvtier_server.figures import SERIES as SERVER_SERIES
from kvtier_server.figures import Snapshot as DaemonSnapshot

ALL_SERIES: tuple[Series[Any], ...] = ENGINE_SERIES + ENGINE_TENANT_SERIES + DAEMON_SERIES
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"

Sample = tuple[str, tuple[tuple[str, str], ...]]


def histogram(*seconds: float) -> Histogram:
    made = Histogram()
    for value in seconds:
        made.observe(value)
    return made


def snapshot(*tiers: TierStats, degraded: bool = False) -> Snapshot:
    engine = EngineStats(
        running=1, waiting=2, loading=3, blocks_total=100, blocks_used=20, blocks_cached=30,
        blocks_evicted=4, preemptions=5, loads_given_up=6, cache_faults=7, steps=8, step_errors=9,
        prompt_tokens=10, generated_tokens=11, refound_tokens=12, hit_tokens={Tier.HBM: 13},
        finished={FinishReason.STOP: 14}, ttft=histogram(0.02), itl=histogram(0.001, 20.0),
    )  # fmt: skip
    requests = RequestCounters(Counter({("chat", Outcome.OK): 15}), histogram(0.5))
    cache = None
    if tiers:
        tenant = TenantCounters(
            Counter({Tier.DRAM: 43}), Counter({(Tier.DISK, MissReason.CORRUPT): 44})
        )
        cache = CacheStats(
            tiers, 16, 17, 18, 19,
            tenants={"0a1b": tenant}, saved_compute_s=40.5, lost_compute_s=41.5, events_dropped=42,
            costs=CostStats(
                {Tier.DISK: LinkStats(0.045, 46.0)}, {"raw": 47.0}, 0.048, 0.1,
                {(Tier.DISK, "faster"): 49},
            ),
        )  # fmt: skip
    return Snapshot(engine, cache, requests, block_bytes=1000, degraded=degraded)


def tier(which: Tier, state: str = "ok") -> TierStats:
    counters = TierCounters(
        hit_tokens=21, miss_tokens=Counter({MissReason.ABSENT: 22}), read_bytes=23,
        written_bytes=24, read_latency=histogram(0.1), write_latency=histogram(0.2),
        corrupt_shards=25, evicted_chunks=26, refused_chunks=Counter({MissReason.NO_ROOM: 27}),
        io_errors=28,
    )  # fmt: skip
    return TierStats(which, state, "", 31, 32, 33, 34, 35, counters, index_bytes=36)


def scrape(shot: S, series: tuple[Series[S], ...]) -> list[tuple[Sample, float]]:
    """Every sample of one scrape, in order, with repetitions if there are any."""
    text = generate_latest(registry_of(partial(deepcopy, shot), series)).decode()
    return [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def scraped(shot: Snapshot) -> list[tuple[Sample, float]]:
    """What an engine tells by default."""
    return scrape(shot, ENGINE_SERIES)


def value(samples: list[tuple[Sample, float]], name: str, **labels: str) -> float:
    (found,) = (v for (n, ls), v in samples if n == name and dict(ls) == labels)
    return found


def test_b165_no_series_comes_twice() -> None:
    keys = [key for key, _ in scraped(snapshot(tier(Tier.DRAM), tier(Tier.DISK)))]
    assert len(keys) == len(set(keys))
    assert len(keys) > 100


def test_b165_a_second_engine_in_the_process_has_a_registry_of_its_own() -> None:
    first = scraped(snapshot(tier(Tier.DRAM)))
    assert scraped(snapshot(tier(Tier.DRAM))) == first


def test_what_a_remote_without_a_bound_holds_has_no_series() -> None:
    samples = scraped(snapshot(tier(Tier.DRAM), replace(tier(Tier.REMOTE), capacity_bytes=0)))
    held = ("used_bytes", "capacity_bytes", "chunks", "pinned_chunks")
    told = {(name, dict(labels).get("tier")) for (name, labels), _ in samples}
    for name in held:
        assert (f"kvtier_tier_{name}", "dram") in told
        assert (f"kvtier_tier_{name}", "remote") not in told
    assert ("kvtier_tier_ok", "remote") in told


def test_every_figure_is_the_owners() -> None:
    samples = scraped(snapshot(tier(Tier.DRAM), tier(Tier.DISK, "unavailable"), degraded=True))
    assert value(samples, "kvtier_requests_total", endpoint="chat", outcome="ok") == 15
    assert value(samples, "kvtier_sequences", state="loading") == 3
    assert value(samples, "kvtier_sequences_finished_total", reason="stop") == 14
    assert value(samples, "kvtier_prompt_hit_tokens_total", tier="hbm") == 13
    assert value(samples, "kvtier_blocks", state="used") == 20
    assert value(samples, "kvtier_blocks", state="free") == 50
    assert value(samples, "kvtier_engine_up") == 1
    assert value(samples, "kvtier_degraded") == 1
    assert value(samples, "kvtier_tier_ok", tier="dram") == 1
    assert value(samples, "kvtier_tier_ok", tier="disk") == 0
    assert value(samples, "kvtier_tier_used_bytes", tier="hbm") == 50_000
    assert value(samples, "kvtier_tier_capacity_bytes", tier="hbm") == 100_000
    assert value(samples, "kvtier_tier_used_bytes", tier="disk") == 32
    assert value(samples, "kvtier_tier_miss_tokens_total", tier="disk", reason="absent") == 22
    assert value(samples, "kvtier_tier_miss_tokens_total", tier="disk", reason="corrupt") == 0
    assert value(samples, "kvtier_tier_refused_chunks_total", tier="dram", reason="no_room") == 27
    assert value(samples, "kvtier_tier_io_errors_total", tier="dram") == 28
    assert value(samples, "kvtier_tier_index_bytes_total", tier="disk") == 36
    assert value(samples, "kvtier_late_jobs") == 19


def test_each_plain_figure_reaches_the_scraper() -> None:
    """All numbers of the fixture differ, so one that is left out or mixed up is missed."""
    shown = {amount for _, amount in scraped(snapshot(tier(Tier.DRAM)))}
    assert shown >= {*range(1, 29), *range(31, 37), 40.5, 41.5, 42, 0.045, 46, 47, 0.048, 49}
    tenants = {amount for _, amount in scrape(snapshot(tier(Tier.DRAM)), ENGINE_TENANT_SERIES)}
    assert tenants == {43, 44}


def test_tenants_are_told_apart_only_on_request() -> None:
    samples = scraped(snapshot(tier(Tier.DRAM)))
    assert not any("tenant" in dict(labels) for (_, labels), _ in samples)
    samples = scrape(snapshot(tier(Tier.DRAM)), ENGINE_SERIES + ENGINE_TENANT_SERIES)
    name = "kvtier_tenant_miss_tokens_total"
    assert value(samples, name, tenant="0a1b", tier="disk", reason="corrupt") == 44


def test_histograms_are_cumulative_and_end_at_infinity() -> None:
    samples = scraped(snapshot())
    name = "kvtier_inter_token_seconds"
    assert value(samples, f"{name}_bucket", le="0.001") == 1
    assert value(samples, f"{name}_bucket", le="10.0") == 1
    assert value(samples, f"{name}_bucket", le="+Inf") == 2
    assert value(samples, f"{name}_count") == 2
    assert value(samples, f"{name}_sum") == pytest.approx(20.001)


def test_without_a_cache_there_are_no_tiers_below_hbm() -> None:
    samples = scraped(snapshot())
    tiers = {dict(labels)["tier"] for (_, labels), _ in samples if "tier" in dict(labels)}
    assert tiers == {tier.value for tier in Tier}  # Hits are told for each, at zero.
    below = [key for key, _ in samples if key[0] == "kvtier_tier_hit_tokens_total"]
    assert not below


def test_a_dead_engine_is_down() -> None:
    shot = snapshot()
    dead = replace(shot, engine=replace(shot.engine, error="gone"))
    assert value(scraped(dead), "kvtier_engine_up") == 0


def test_names_follow_prometheus_customs() -> None:
    for series in ALL_SERIES:
        assert series.name.startswith("kvtier_")
        assert (series.kind is Kind.COUNTER) == series.name.endswith("_total")
        assert series.kind is not Kind.HISTOGRAM or series.name.endswith("_seconds")
        assert series.help.endswith(".")


def test_a_cache_server_tells_of_its_tiers_what_an_engine_tells() -> None:
    """The same names, and but for the engine's own blocks the same values."""
    shot = snapshot(tier(Tier.DRAM), tier(Tier.DISK, "unavailable"))
    assert shot.cache is not None
    counters = DaemonCounters(*range(50, 50 + len(fields(DaemonCounters))))
    server = DaemonSnapshot(shot.cache, counters, 91, 92, 93, 94.0, draining=False)
    told = scrape(server, SERVER_SERIES)
    own = [each for each in told if each[0][0].startswith("kvtier_daemon_")]
    assert [value for _, value in own] == [91, 92, 93, *astuple(counters)]
    names = tuple(series.name for series in TIER_SERIES)
    assert [each for each in told if each not in own] == [
        ((name, labels), value)
        for (name, labels), value in scraped(shot)
        if name.startswith(names) and ("tier", "hbm") not in labels
    ]


def test_the_page_lists_every_metric_as_it_is() -> None:
    rows = re.findall(
        r"^\| `(kvtier_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE
    )
    listed = [(name, kind, labels.replace("`", ""), text) for name, kind, labels, text in rows]
    assert listed == [
        (series.name, series.kind.value, ", ".join(series.labels), series.help)
        for series in ENGINE_SERIES + ENGINE_TENANT_SERIES + DAEMON_SERIES
    ]
