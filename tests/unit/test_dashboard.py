"""The dashboard without a browser: what is sent, what is remembered, who is told apart."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections import Counter
from hashlib import sha256

import pytest
from fastapi import Depends, FastAPI, HTTPException
from starlette.testclient import TestClient

from kvtier.constants import HISTORY_SAMPLES_MAX, HISTORY_STEP_S
from kvtier.obs.counters import tenant_name
from kvtier.obs.dashboard.history import History
from kvtier.obs.dashboard.page import dashboard
from kvtier.obs.stats import CacheStats, TenantCounters, TierCounters, TierStats
from kvtier.types import MissReason, Tier
from kvtier_server.counters import Counters
from kvtier_server.dashboard import add_dashboard, recorded
from kvtier_server.figures import Snapshot, stats_of

PAGE_BYTES_MAX = 30_000
SHOWN_S = 900


def snapshot(uptime_s: float, *credentials: str) -> Snapshot:
    counters = TierCounters(hit_tokens=1, miss_tokens=Counter({MissReason.ABSENT: 2}))
    tier = TierStats(Tier.DRAM, "ok", "", 4, 3, 2, 1, 0, counters)
    tenants = {tenant_name(name): TenantCounters(Counter({Tier.DRAM: 7})) for name in credentials}
    cache = CacheStats((tier,), 0, 0, 0, 0, tenants=tenants)
    return Snapshot(cache, Counters(read_bytes=5), 0, 0, 0, uptime_s, draining=False)


def test_the_page_is_small_and_needs_nothing_else() -> None:
    html = dashboard("v1/stats").html
    assert len(html.encode()) < PAGE_BYTES_MAX
    assert re.findall(r"https?://[^\s\"']+", html) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"\b(?:src|@import|url)\s*[=(]", html) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", html)
    assert not re.search(r"<[^>]*\s(?:style|on\w+)=", html)


def test_the_policy_names_the_script_and_the_style() -> None:
    page = dashboard("v1/stats", "v1/history")
    rules = dict(rule.split(" ", 1) for rule in page.headers["Content-Security-Policy"].split("; "))
    for tag in ("script", "style"):
        inside = page.html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = b64encode(sha256(inside.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in page.headers["Content-Security-Policy"]


def test_where_figures_are_is_written_as_text() -> None:
    html = dashboard('a"b', "<history>").html
    assert '<meta name="kvtier-stats" content="a&quot;b">' in html
    assert '<meta name="kvtier-history" content="&lt;history&gt;">' in html
    assert '<meta name="kvtier-namespaces" content="">' in html


def test_a_history_keeps_a_quarter_of_an_hour() -> None:
    history = History()
    for step in range(HISTORY_SAMPLES_MAX + 5):
        history.note(stats_of(snapshot(step * HISTORY_STEP_S)))
    samples = history.told()["samples"]
    assert len(samples) == HISTORY_SAMPLES_MAX
    assert samples[-1]["uptime_s"] - samples[0]["uptime_s"] == SHOWN_S
    assert samples[-1]["connections"] == {"read_bytes": 5, "written_bytes": 0}
    (tier,) = samples[-1]["tiers"]
    assert (tier["hit_tokens"], tier["miss_tokens"]) == (1, {"absent": 2})
    assert (
        len(tier["read_s"]["counts"]) == len(stats_of(snapshot(0))["cache"]["latency_bounds_s"]) + 1
    )


async def test_the_first_sample_is_taken_at_once() -> None:
    history = History()
    async with recorded(history, lambda: stats_of(snapshot(0.5))):
        await asyncio.sleep(0)
    assert [sample["uptime_s"] for sample in history.told()["samples"]] == [0.5]


def test_credentials_are_told_apart_by_name_and_only_those_asked_for() -> None:
    now = snapshot(1.0, "search", "chat")
    assert stats_of(now)["tenants"] == {}
    told = stats_of(now, ["search", "never seen"])["tenants"]
    assert told == {"search": {"hit_tokens": {"dram": 7}, "miss_tokens": {}}}


@pytest.fixture
def client() -> TestClient:
    def nobody() -> None:
        raise HTTPException(401)

    app = FastAPI()
    add_dashboard(app, History(), [Depends(nobody)])
    return TestClient(app)


def test_the_page_is_everybodys_and_the_history_is_not(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert client.get("/v1/history").status_code == 401
