"""What ``/health`` and the figures say of a state that is made by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from kvtier.obs.stats import CacheStats, CostStats, Histogram, LinkStats, TierCounters, TierStats
from kvtier.obs.told import told_tier
from kvtier.types import MissReason, Tier
from kvtier_engine.api.ports import ServedModel
from kvtier_engine.api.service import RequestCounters
from kvtier_engine.engine_stats import EngineStats
from kvtier_engine.snapshot import Snapshot
from kvtier_engine.status import Facts, health_of, is_degraded, stats_of

MODEL = ServedModel("toy", 128, 100, "w" * 64, 1)
FACTS = Facts("cpu", "float32", 4, 1000, 8, "raw", 10.0)
ENGINE = EngineStats(
    running=0, waiting=0, loading=0, blocks_total=10, blocks_used=1, blocks_cached=2,
    blocks_evicted=0, preemptions=0, loads_given_up=0, cache_faults=0, steps=0, step_errors=0,
    prompt_tokens=9, generated_tokens=1, refound_tokens=0, hit_tokens={Tier.DISK: 8},
    finished={}, ttft=Histogram(), itl=Histogram(),
)  # fmt: skip


def tier(which: Tier, state: str = "ok", codec: str = "raw") -> TierStats:
    detail = "" if state == "ok" else "no answer"
    return TierStats(which, state, detail, 100, 50, 3, 0, 0, TierCounters(), codec=codec)


def cache(*tiers: TierStats) -> CacheStats:
    costs = CostStats(
        {Tier.DISK: LinkStats(0.001, 1e9)}, {}, None, None, {(Tier.DISK, "faster"): 2}
    )
    return CacheStats(tiers, 0, 0, 0, 0, costs=costs)


@pytest.mark.parametrize("broken", [Tier.DRAM, Tier.DISK, Tier.REMOTE])
@pytest.mark.parametrize("state", ["failing", "unavailable", "slow", "full", "opening"])
def test_b119_health_is_never_ok_while_a_tier_is_not(broken: Tier, state: str) -> None:
    tiers = [tier(each, state if each is broken else "ok") for each in list(Tier)[1:]]
    health = health_of(MODEL, FACTS, ENGINE, cache(*tiers), draining=False)
    assert health.serving, "requests are answered all the same"
    assert health.report["status"] == "degraded"
    (told,) = (each for each in health.report["tiers"] if each["name"] == broken.value)
    assert (told["state"], told["detail"]) == (state, "no answer")
    assert is_degraded(FACTS, cache(*tiers))


def test_health_is_ok_again_when_every_tier_is() -> None:
    tiers = [tier(Tier.DRAM, codec="int8"), tier(Tier.DISK, codec="int4"), tier(Tier.REMOTE)]
    health = health_of(MODEL, FACTS, ENGINE, cache(*tiers), draining=False)
    assert health.report["status"] == "ok"
    assert [(each["name"], each["codec"]) for each in health.report["tiers"]] == [
        ("hbm", "float32"), ("dram", "int8"), ("disk", "int4"), ("remote", "raw"),
    ]  # fmt: skip


def test_what_a_remote_without_a_bound_holds_is_null() -> None:
    remote = replace(tier(Tier.REMOTE), capacity_bytes=0, used_bytes=0)
    now = cache(tier(Tier.DRAM), remote)
    told = health_of(MODEL, FACTS, ENGINE, now, draining=False).report["tiers"]
    assert [each["capacity_bytes"] for each in told] == [10_000, 100, None]
    (shown,) = [each for each in map(told_tier, now.tiers) if each["name"] == "remote"]
    for name in ("used_bytes", "capacity_bytes", "chunks", "pinned_chunks"):
        assert shown[name] is None, name


def test_figures_are_json_with_no_number_that_is_none() -> None:
    counters = TierCounters(miss_tokens=Counter({MissReason.DEADLINE: 4}))
    counters.read_latency.observe(1e6)
    slow = TierStats(Tier.DISK, "ok", "", 1, 1, 1, 0, 0, counters)
    now = Snapshot(ENGINE, cache(tier(Tier.DRAM), slow), RequestCounters(), 1000, degraded=False)
    text = json.dumps(stats_of(MODEL, FACTS, now, uptime_s=1.5, tenants=True), allow_nan=False)
    report = json.loads(text)
    assert report["tiers"][2]["miss_tokens"] == {"deadline": 4}
    assert report["tiers"][2]["read_s"]["p99"] == 10.0
    assert report["tiers"][2]["write_s"]["p50"] is None
    assert report["costs"]["links"] == {"disk": {"latency_s": 0.001, "bytes_per_s": 1e9}}
    assert report["costs"]["decisions"] == {"disk": {"faster": 2}}
    assert report["tenants"] == {}
