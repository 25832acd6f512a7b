"""What a server lets be seen of itself: metrics, figures as JSON, KV events, spans."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from kvtier.errors import ConfigError
from kvtier.keys import tenant_digest
from kvtier.obs.counters import NO_TENANT, tenant_name
from kvtier.obs.event_publisher import EventPublisher
from kvtier.obs.spans import Attribute
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import STUCK_S
from tests.lib.server import POLL_S
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder
from tests.lib.tiny_server import SEVENTEEN, complete, made, running

UNDER_WAY = ("loads_inflight", "stores_inflight", "writes_queued")
NAME = re.compile(r"kvtier_[a-z0-9_]+")
LABEL = re.compile(r"[a-z_]+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), tiny_config(), tiny_tensors(tiny_config()))


async def figures(client: httpx.AsyncClient) -> dict[str, Any]:
    response = await client.get("/v1/kvtier/stats")
    assert response.status_code == 200, response.text
    report: dict[str, Any] = response.json()
    return report


async def at_rest(client: httpx.AsyncClient) -> dict[str, Any]:
    """Wait until nothing is under way, and return the figures then."""
    async with asyncio.timeout(STUCK_S):
        while True:
            report = await figures(client)
            if not any(report["cache"][name] for name in UNDER_WAY):
                return report
            await asyncio.sleep(POLL_S)  # The writing thread needs the interpreter too.


def tier(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    (found,) = (each for each in report["tiers"] if each["name"] == name)
    return dict(found)


async def test_figures_agree_with_usage_and_metrics(folder: Path, tmp_path: Path) -> None:
    server = made(folder, f"--disk={tmp_path}")
    async with running(server) as client:
        usage = [(await complete(client))["usage"]]
        await at_rest(client)
        server.engine.forget_prefixes()
        usage.append((await complete(client))["usage"])
        report = await at_rest(client)
        text = (await client.get("/metrics")).text
    assert report["prompt_tokens"] == sum(each["prompt_tokens"] for each in usage)
    told = usage[1]["prompt_tokens_details"]["kvtier"]
    assert report["hit_tokens"]["dram"] == told["dram"] == 16
    dram, disk = tier(report, "dram"), tier(report, "disk")
    assert (dram["chunks"], dram["hit_tokens"], dram["miss_tokens"]) == (2, 16, {"absent": 16})
    assert (disk["chunks"], disk["miss_tokens"]) == (2, {"absent": 16})
    assert disk["write_s"]["count"] == 2
    assert 0 < disk["write_s"]["p50"] <= disk["write_s"]["p99"]
    assert f'kvtier_tier_written_bytes_total{{tier="disk"}} {disk["written_bytes"]:.1f}' in text
    assert 0 < report["uptime_s"] < 600
    assert "tenants" not in report


async def test_figures_need_the_key_that_requests_need(folder: Path) -> None:
    async with running(made(folder, "--api-key=secret")) as client:
        assert (await client.get("/v1/kvtier/stats")).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        assert (await figures(client))["model"]


async def test_pins_are_told(folder: Path, tmp_path: Path) -> None:
    async with running(made(folder, f"--disk={tmp_path}")) as client:
        assert (await client.get("/v1/kvtier/pins")).json() == {"pins": []}
        await complete(client, kvtier={"pin": 600}, cache_salt="ours")
        await at_rest(client)
        (row,) = (await client.get("/v1/kvtier/pins")).json()["pins"]
    assert row["tenant"] == tenant_digest("ours").hex()
    assert (row["objects"], 500 < row["seconds"] <= 600) == (2, True)
    assert row["dram_bytes"] > 0


async def test_a_server_without_tiers_has_figures_too(folder: Path) -> None:
    async with running(made(folder, "--no-cache")) as client:
        report = await figures(client)
        assert (await client.get("/v1/kvtier/pins")).json() == {"pins": []}
    assert [each["name"] for each in report["tiers"]] == ["hbm"]
    assert "cache" not in report


async def test_health_tells_each_tiers_codec_and_state(folder: Path, tmp_path: Path) -> None:
    arguments = (f"--disk={tmp_path}", "--codec=int8", "--disk-codec=int4")
    async with running(made(folder, *arguments)) as client:
        report = (await client.get("/health")).json()
    assert [(each["name"], each["codec"]) for each in report["tiers"]] == [
        ("hbm", "float32"), ("dram", "int8"), ("disk", "int4"),
    ]  # fmt: skip
    assert {each["state"] for each in report["tiers"]} <= {"ok", "opening"}


async def test_tenants_are_told_apart_on_request_by_a_digest(folder: Path) -> None:
    async with running(made(folder, "--tenant-metrics")) as client:
        await complete(client)
        await complete(client, cache_salt="sesame")
        report = await at_rest(client)
        text = (await client.get("/metrics")).text
    assert set(report["tenants"]) == {NO_TENANT, tenant_name("sesame")}
    for tenant in report["tenants"].values():
        assert tenant["miss_tokens"] == {"dram": {"absent": 16}}
    name = "kvtier_tenant_miss_tokens_total"
    assert f'{name}{{reason="absent",tenant="{tenant_name("sesame")}",tier="dram"}} 16.0' in text
    assert "sesame" not in text + str(report)


async def test_b102_no_figure_of_one_tenant_tells_what_another_holds(folder: Path) -> None:
    """Whether or not another has the same prompt in the tiers, the sums grow by the same."""
    grown = []
    for others_first in (True, False):
        async with running(made(folder)) as client:
            if others_first:
                await complete(client, cache_salt="sesame")
            before = tier(await at_rest(client), "dram")
            await complete(client, cache_salt="poppy")
            after = tier(await at_rest(client), "dram")
        assert before["hit_tokens"] == after["hit_tokens"] == 0
        misses = [each["miss_tokens"].get("absent", 0) for each in (before, after)]
        grown.append((misses[1] - misses[0], after["chunks"] - before["chunks"]))
    assert grown == [(16, 2)] * 2


def samples_of(text: str) -> dict[str, float]:
    """Every sample of a scrape, once it is seen to be what Prometheus takes."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert NAME.fullmatch(family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert family.type in {"counter", "gauge", "histogram"}, family.name
        for sample in family.samples:
            assert all(LABEL.fullmatch(name) for name in sample.labels)
            assert math.isfinite(sample.value), sample
            assert sample.value >= 0, sample
            key = f"{sample.name}{sorted(sample.labels.items())}"
            assert key not in found, key
            found[key] = sample.value
    return found


def grows(name: str) -> bool:
    return bool(re.match(r"\w+(_total|_count|_sum|_bucket)\[", name))


def hit_rate_is_one_at_most(samples: Mapping[str, float]) -> None:
    hits = sum(v for name, v in samples.items() if name.startswith("kvtier_prompt_hit_tokens"))
    assert hits <= samples["kvtier_prompt_tokens_total[]"]


async def test_b165_random_traffic_makes_no_counter_fall(
    folder: Path, tmp_path: Path, rng: random.Random
) -> None:
    """And no series comes twice, none is infinite, no hit rate passes one, no gauge stays up."""
    server = made(
        folder, f"--disk={tmp_path}", "--tenant-metrics", "--dram=64MiB", "--kv-bytes=64KiB"
    )
    before: dict[str, float] = {}
    async with running(server) as client:

        async def ask() -> None:
            prompt = SEVENTEEN[: rng.choice([3, 9, 17])] * rng.choice([1, 2])
            salt = rng.choice(["a", "b", None])
            fields = {} if salt is None else {"cache_salt": salt}
            await complete(client, prompt=prompt, max_tokens=rng.choice([1, 5]), **fields)

        for _ in range(8):
            await asyncio.gather(*(ask() for _ in range(rng.choice([1, 3]))))
            if rng.random() < 0.5:
                server.engine.forget_prefixes()
            bad = await client.post("/v1/completions", json={"prompt": 3.5})
            assert bad.status_code == 400
            now = samples_of((await client.get("/metrics")).text)
            for name in filter(grows, before):
                assert now[name] >= before[name], name
            hit_rate_is_one_at_most(now)
            before = now
        await at_rest(client)
        now = samples_of((await client.get("/metrics")).text)
    for name in ("loads_inflight", "stores_inflight", "writes_queued", "late_jobs"):
        assert now[f"kvtier_{name}[]"] == 0
    for where in ("dram", "disk"):
        assert now[f"kvtier_tier_pinned_chunks[('tier', '{where}')]"] == 0


async def test_events_tell_a_reader_what_lies_where(folder: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    server = made(folder, f"--disk={tmp_path / 'disk'}", f"--kv-events={endpoint}")
    context = zmq.asyncio.Context()
    reader = context.socket(zmq.SUB)
    reader.connect(endpoint)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    picture: dict[bytes, set[str]] = {}
    tokens: dict[bytes, list[int]] = {}
    try:
        async with running(server) as client, asyncio.timeout(60):
            await complete(client)
            report = await at_rest(client)
            chunks = tier(report, "dram")["chunks"], tier(report, "disk")["chunks"]
            while sum(map(len, picture.values())) < sum(chunks):
                _, _, payload = await reader.recv_multipart()
                for event in msgspec.msgpack.decode(payload)[1]:
                    believe(event, picture, tokens)
    finally:
        context.destroy(linger=0)
    assert chunks == (2, 2)
    assert list(picture.values()) == [{"dram", "disk"}] * 2
    assert list(tokens.values()) == [SEVENTEEN[:8], SEVENTEEN[8:16]]


def believe(
    event: Mapping[str, Any], picture: dict[bytes, set[str]], tokens: dict[bytes, list[int]]
) -> None:
    if event["type"] == "AllBlocksCleared":
        picture.clear()
    elif event["type"] == "BlockStored":
        (key,) = event["block_hashes"]
        assert event["parent_block_hash"] in {None, *picture}
        picture.setdefault(key, set()).add(event["ownership"])
        tokens[key] = event["token_ids"]


def test_b115_events_that_cannot_be_published_end_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-events"):
        made(folder, "--kv-events=nonsense")
    with pytest.raises(ConfigError, match="--dram"):
        made(folder, f"--kv-events=ipc://{tmp_path}/events", "--dram=1048576GiB")
    EventPublisher(f"ipc://{tmp_path}/events", clock=FakeClock()).close()


class Told:
    """A listener of spans that keeps them."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Mapping[str, Attribute]]] = []

    def record(self, name: str, seconds: float, attributes: Mapping[str, Attribute]) -> None:
        assert seconds >= 0
        self.spans.append((name, attributes))


async def test_traces_tell_of_requests_and_of_no_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    monkeypatch.setattr("kvtier_engine.serve.OtelSpans", lambda: told)
    server = made(folder, "--traces")
    async with running(server) as client:
        await complete(client, cache_salt="sesame")
        await at_rest(client)
        server.engine.forget_prefixes()
        await complete(client, cache_salt="sesame")
    names = [name for name, _ in told.spans]
    assert names.count("kvtier.store") == 1
    assert names.count("kvtier.load") == 1
    assert "kvtier.match" in names
    assert "sesame" not in str(told.spans)


def test_traces_that_go_nowhere_end_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ConfigError("no provider")

    monkeypatch.setattr("kvtier_engine.serve.OtelSpans", refuse)
    with pytest.raises(ConfigError, match="--traces: no provider"):
        made(folder, "--traces")
