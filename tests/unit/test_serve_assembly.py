"""The whole server in one process: a tiny model, its pool, the tiers, the API.

B155 (``cached_tokens`` on the decode side of a split) cannot apply: this server computes prefill
and decode in one engine, and what it counts as cached is what it did not compute.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.cache.cache import Cache
from kvtier.codecs.calibrator import Calibrator
from kvtier.config import CacheConfig
from kvtier.constants import HEALTH_BACKOFF_S_MIN
from kvtier.types import Move
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.program import banner
from kvtier_engine.types import FinishReason
from tests.lib.api_harness import RawCall, error_of, events
from tests.lib.tiny_llama import (
    VOCAB_SIZE,
    Tensors,
    reference_tokens,
    tiny_config,
    tiny_tensors,
    write_folder,
)
from tests.lib.tiny_server import made, running

#: Long enough for a chunk of eight tokens and a block of four, with one token to compute.
NINE = [10, 20, 30, 40, 50, 60, 70, 80, 90]
#: How many requests a test may make while it waits for something that happens beside them.
TRIES_MAX = 5000


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors(tiny_config())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), tiny_config(), tensors)


async def complete(
    client: httpx.AsyncClient, prompt: Sequence[int] = NINE, **fields: Any
) -> dict[str, Any]:
    body = {"prompt": list(prompt), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json={**body, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def cached(answer: dict[str, Any]) -> dict[str, int]:
    tiers: dict[str, int] = answer["usage"]["prompt_tokens_details"]["kvtier"]
    return tiers


async def health(client: httpx.AsyncClient) -> dict[str, Any]:
    report: dict[str, Any] = (await client.get("/health")).json()
    return report


async def test_the_text_is_what_the_model_says(folder: Path, tensors: Tensors) -> None:
    server = made(folder)
    expected = reference_tokens(tiny_config(), tensors, tuple(NINE), 6)
    async with running(server) as client:
        answers = [await complete(client, max_tokens=6, logprobs=0) for _ in range(3)]
    for answer in answers:
        names = answer["choices"][0]["logprobs"]["tokens"]
        assert names == [
            server.tokenizer.token_bytes(each).decode(errors="ignore")
            or "bytes:" + "".join(f"\\x{b:02x}" for b in server.tokenizer.token_bytes(each))
            for each in expected
        ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_b115_every_dtype_caches_and_says_what_it_is(folder: Path, dtype: str) -> None:
    server = made(folder, f"--dtype={dtype}")
    async with running(server) as client:
        await complete(client)
        again = await complete(client)
        assert sum(cached(again).values()) == 8
        assert (await health(client))["dtype"] == dtype
        settings = (await client.get("/version")).json()["settings"]
        assert settings["dtype"] == {"value": dtype, "source": "command line"}
        assert settings["no_cache"]["value"] is False


async def test_b102_a_salt_isolates_in_the_real_engine(folder: Path) -> None:
    async with running(made(folder)) as client:
        found = [
            sum(cached(await complete(client, cache_salt=salt)).values())
            for salt in ("a", "a", "b", None)
        ]
    assert found == [0, 8, 0, 0]


async def test_b103_bad_parameters_leave_the_engine_well(folder: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"logit_bias": {"999999": 1}},
        {"logit_bias": {"AI": 1}},
        {"stop_token_ids": [VOCAB_SIZE]},
        {"stop_token_ids": [-1]},
        {"allowed_token_ids": [1] * 5000},
        {"prompt": [VOCAB_SIZE]},
        {"top_p": 0},
    ]
    server = made(folder)
    async with running(server) as client:
        before = await complete(client)
        for fields in bad:
            response = await client.post("/v1/completions", json={"prompt": NINE, **fields})
            error_of(response)
        nan = b'{"prompt": [1], "temperature": NaN}'
        error_of(await client.post("/v1/completions", content=nan))
        after = await complete(client)
        assert after["choices"] == before["choices"]
        assert server.engine.stats().step_errors == 0


async def test_b156_the_context_is_the_models_or_the_pools(folder: Path) -> None:
    async with running(made(folder, "--max-model-len=16", "--no-cache")) as client:
        fits = await complete(client, [1] * 15, max_tokens=1)
        assert fits["usage"]["prompt_tokens"] == 15
        for count, output in ((20, 1), (10, 10), (16, 1)):
            body = {"prompt": [1] * count, "max_tokens": output}
            error = error_of(await client.post("/v1/completions", json=body))
            assert error["code"] == "context_length_exceeded"
            assert f"({count} in the prompt, {output} for" in error["message"]
    small = made(folder, "--kv-bytes=64KiB")
    held = small.model.context_tokens
    assert 8 <= held < 512
    async with running(small) as client:
        whole = await complete(client, [1] * (held - 1), max_tokens=1)
        assert whole["choices"][0]["finish_reason"] == "length"


async def test_b153_prompt_logprobs_are_those_of_no_cache(folder: Path) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 1}
    longer = [*NINE, 100, 110, 120]
    async with running(made(folder, "--no-cache")) as client:
        plain = [(await complete(client, p, **fields))["choices"][0] for p in (NINE, longer)]
    async with running(made(folder)) as client:
        first, again, more = [
            (await complete(client, prompt, **fields))["choices"][0]
            for prompt in (NINE, NINE, longer)
        ]
    assert first == again
    for mine, theirs in ((first, plain[0]), (more, plain[1])):
        assert mine["text"] == theirs["text"]
        values = mine["logprobs"]["token_logprobs"]
        assert values[0] is None
        assert values[1:] == pytest.approx(theirs["logprobs"]["token_logprobs"][1:], abs=1e-4)
    assert len(first["logprobs"]["tokens"]) == len(NINE) + 4


async def test_b150_streaming_usage_of_the_real_engine(folder: Path) -> None:
    async with running(made(folder)) as client:
        fields: dict[str, Any] = {"max_tokens": 5, "stream_options": {"include_usage": True}}
        whole = (await complete(client, NINE[:7], **fields))["usage"]
        body = {"prompt": NINE[:7], "ignore_eos": True, "stream": True, **fields}
        streamed = events(await client.post("/v1/completions", json=body))[-1]["usage"]
    for usage in (whole, streamed):
        figures = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
        assert figures == (7, 5, 12)


async def test_seeded_choices_come_again_and_differ(folder: Path) -> None:
    async with running(made(folder)) as client:
        fields: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 12}
        first = await complete(client, **fields)
        again = await complete(client, **fields)
        second_alone = await complete(client, **{**fields, "n": 1, "seed": 6})
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts)) == 3
    assert second_alone["choices"][0]["text"] == texts[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_b95_a_client_gone_frees_its_blocks(folder: Path, stream: bool) -> None:
    server = made(folder, "--no-cache")
    app = server.application()
    async with app.router.lifespan_context(app):
        body = {"prompt": NINE, "max_tokens": 400, "stream": stream, "ignore_eos": True}
        call = RawCall(app, "/v1/completions", body)
        task = asyncio.create_task(call.run())
        for _ in range(TRIES_MAX):
            if server.engine.stats().generated_tokens:
                break
            await asyncio.sleep(0)
        call.hang_up.set()
        await task
        # A later request is served after the abort has been seen.
        after = RawCall(app, "/v1/completions", {"prompt": [1], "max_tokens": 1})
        await after.run()
        stats = server.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.finished[FinishReason.ABORT] == 1
    assert stats.generated_tokens < 400


async def test_b119_a_dead_disk_degrades_and_comes_back(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "tier"
    place.write_text("a file where the directory should be")
    async with running(made(folder, "--no-cache")) as client:
        expected = (await complete(client))["choices"]
    async with running(made(folder, f"--disk={place}/kv")) as client:
        for _ in range(3):
            assert (await complete(client))["choices"] == expected
        response = await client.get("/health")
        assert response.status_code == 200
        report = response.json()
        assert report["status"] == "degraded"
        (disk,) = (tier for tier in report["tiers"] if tier["name"] == "disk")
        assert disk["state"] != "ok"
        assert disk["detail"]
        assert "\nkvtier_degraded 1.0\n" in (await client.get("/metrics")).text
        place.unlink()
        async with asyncio.timeout(20 * HEALTH_BACKOFF_S_MIN):
            while (await health(client))["status"] != "ok":
                assert (await complete(client))["choices"] == expected
        assert "\nkvtier_degraded 0.0\n" in (await client.get("/metrics")).text


async def test_b119_a_cache_that_cannot_be_had_degrades(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(config: CacheConfig, **how: Any) -> Cache:
        raise RuntimeError(f"no {config.codec} today")

    monkeypatch.setattr("kvtier_engine.serve.Cache", broken)
    server = made(folder)
    async with running(server) as client:
        assert sum(cached(await complete(client)).values()) == 0
        report = await health(client)
        assert report["status"] == "degraded"
        assert [tier["name"] for tier in report["tiers"]] == ["hbm", "dram"]
        assert report["tiers"][1]["detail"] == "RuntimeError: no raw today"
        assert "cache  none: RuntimeError" in banner(server, 1)
        assert "\nkvtier_degraded 1.0\n" in (await client.get("/metrics")).text
    assert "no raw today" in caplog.text


async def test_an_int4_server_starts_without_a_calibration_and_learns_from_requests_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught: list[int] = []

    def observe(calibrator: Calibrator, pool: object, move: Move) -> None:
        del calibrator, pool
        taught.append(move.position_start)

    monkeypatch.setattr(Calibrator, "observe", observe)
    server = made(folder, "--codec=int4")
    assert taught == [], "the chunk of the warm-up is no model's"
    async with running(server) as client:
        await complete(client, list(range(65)), max_tokens=1)
        for _ in range(TRIES_MAX):
            if metric(await client.get("/metrics"), "kvtier_tier_chunks", "dram") == 8:
                break
    assert sorted(set(taught)) == list(range(0, 64, 8))


async def test_b121_bytes_per_token_are_those_stored(folder: Path, tmp_path: Path) -> None:
    async with running(made(folder, f"--disk={tmp_path}/kv")) as client:
        await complete(client, list(range(65)), max_tokens=1)
        for _ in range(TRIES_MAX):
            written = metric(await client.get("/metrics"), "kvtier_tier_chunks", "disk")
            if written == 8:
                break
        report = await health(client)
        tiers = {tier["name"]: tier for tier in report["tiers"]}
    expected = pytest.approx(64 * report["bytes_per_token"]["stored"], rel=0.01)
    assert tiers["dram"]["used_bytes"] == expected
    assert tiers["disk"]["used_bytes"] == expected
    assert bytes_below(tmp_path) == pytest.approx(
        64 * report["bytes_per_token"]["stored"], rel=0.05
    )


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.kvs"))


def metric(response: httpx.Response, name: str, tier: str) -> float:
    found = re.search(rf'^{name}{{tier="{tier}"}} (\S+)$', response.text, re.MULTILINE)
    assert found, f"{name} of {tier} is not told"
    return float(found[1])


async def test_b165_counters_only_grow_and_agree_with_usage(folder: Path) -> None:
    async with running(made(folder)) as client:
        totals: dict[str, float] = {}
        prompt = output = 0
        for count in range(3):
            usage = (await complete(client, [*NINE, count]))["usage"]
            prompt += usage["prompt_tokens"]
            output += usage["completion_tokens"]
            text = (await client.get("/metrics")).text
            lines = [line for line in text.splitlines() if line and line[0] != "#"]
            assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)
            for line in lines:
                name, _, amount = line.rpartition(" ")
                if "_total" in name or "_bucket" in name or "_count" in name:
                    assert float(amount) >= totals.get(name, 0.0), name
                    totals[name] = float(amount)
    assert totals["kvtier_prompt_tokens_total"] == prompt
    assert totals["kvtier_generated_tokens_total"] == output
    assert totals['kvtier_requests_total{endpoint="completions",outcome="ok"}'] == 3


async def test_a_stopping_server_says_so(folder: Path) -> None:
    server = made(folder)
    async with running(server) as client:
        assert (await client.get("/health")).status_code == 200
        server.admission.drain()
        response = await client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "draining")
        response = await client.post("/v1/completions", json={"prompt": NINE})
        assert error_of(response, 503)["code"] == "shutting_down"


async def test_a_stopped_engine_answers_503(folder: Path) -> None:
    server = made(folder)
    async with running(server) as client:
        await asyncio.to_thread(server.engine.stop, 0)
        response = await client.post("/v1/completions", json={"prompt": NINE})
        assert error_of(response, 503)["code"] == "engine_stopped"


async def test_b27_other_positions_or_dtype_never_share_what_is_declared_equal(
    folder: Path, tensors: Tensors, tmp_path: Path
) -> None:
    other = write_folder(tmp_path / "other", tiny_config(rope_theta=200.0), tensors)
    kept = [f"--disk={tmp_path}/kv", "--weights-id=declared-equal"]
    found = []
    for model, dtype in ((folder, "float32"), (other, "float32"), (folder, "float16")):
        async with running(made(model, *kept, f"--dtype={dtype}")) as client:
            found.append(sum(cached(await complete(client)).values()))
    async with running(made(folder, *kept)) as client:
        again = cached(await complete(client))
    assert found == [0, 0, 0]
    assert again == {"hbm": 0, "dram": 0, "disk": 8, "remote": 0}


async def test_a_dead_engine_is_told_by_health_and_metrics(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: BlockPool) -> None:
        raise RuntimeError("the books are wrong")

    monkeypatch.setattr(BlockPool, "check_integrity", broken)
    async with running(made(folder)) as client:
        await client.post("/v1/completions", json={"prompt": NINE, "max_tokens": 1})
        async with asyncio.timeout(10):
            while (await client.get("/health")).status_code == 200:
                await client.get("/version")
        assert (await health(client))["status"] == "failed"
        assert "\nkvtier_engine_up 0.0\n" in (await client.get("/metrics")).text
        response = await client.post("/v1/completions", json={"prompt": NINE})
        assert error_of(response, 503)["code"] == "engine_stopped"
        assert "books" not in response.text
    assert "books" in caplog.text
