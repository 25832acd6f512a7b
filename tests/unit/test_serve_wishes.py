"""Hints and warming through the whole server: what the tiers then hold, and for how long."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lib.api_harness import error_of
from tests.lib.tiny_llama import VOCAB_SIZE, tiny_config, tiny_tensors, write_folder
from tests.lib.tiny_server import made, running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return write_folder(tmp_path_factory.mktemp("tiny"), config, tiny_tensors(config))


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(tokens)]


async def warm(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/kvtier/warm", json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def cached(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> dict[str, int]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    tiers: dict[str, int] = response.json()["usage"]["prompt_tokens_details"]["kvtier"]
    return tiers


async def test_what_was_warmed_is_found_by_whoever_has_the_salt(
    folder: Path, tmp_path: Path, rng: random.Random
) -> None:
    prompt = prompt_of(rng, 41)
    async with running(made(folder, f"--disk={tmp_path}")) as client:
        answer = await warm(client, prompt, cache_salt="ours")
        assert answer["prompts"] == [{"prompt_tokens": 41, "held_tokens": 40}]
        assert sum((await cached(client, prompt, cache_salt="theirs")).values()) == 0
    # HBM forgets; what was stored is there.
    async with running(made(folder, f"--disk={tmp_path}")) as client:
        assert (await cached(client, prompt, cache_salt="ours"))["disk"] == 40


async def test_a_pin_is_told_and_kept(folder: Path, rng: random.Random) -> None:
    prompt = prompt_of(rng, 41)
    async with running(made(folder)) as client:
        answer = await warm(client, prompt, kvtier={"pin": 60})
        assert answer["usage"]["prompt_tokens_details"]["kvtier"]["pinned"] == 40
        tiers = await cached(client, prompt, kvtier={"pin": 60})
        assert tiers["pinned"] == 40
        assert "pinned" not in await cached(client, prompt)


async def test_what_a_request_pinned_is_unpinned_for_its_salt_alone(
    folder: Path, rng: random.Random
) -> None:
    async with running(made(folder)) as client:
        prompt = prompt_of(rng, 41)
        for salt in ("ours", "theirs"):
            await warm(client, prompt, kvtier={"pin": 60}, cache_salt=salt)
        for unpinned in (40, 0):
            body = {"prompt": prompt, "cache_salt": "ours"}
            answer = (await client.post("/v1/kvtier/unpin", json=body)).json()
            assert answer["prompts"] == [{"prompt_tokens": 41, "unpinned_tokens": unpinned}]
        body = {"prompt": prompt, "cache_salt": "theirs"}
        answer = (await client.post("/v1/kvtier/unpin", json=body)).json()
        assert answer["prompts"] == [{"prompt_tokens": 41, "unpinned_tokens": 40}]


async def test_a_quota_bounds_what_one_salt_holds(folder: Path, rng: random.Random) -> None:
    async with running(made(folder)) as client:
        first = await warm(client, prompt_of(rng, 17))
    assert first["prompts"] == [{"prompt_tokens": 17, "held_tokens": 16}]
    server = made(folder, "--tenant-quota=4KiB")
    async with running(server) as client:
        answer = await warm(client, prompt_of(rng, 17))
        assert answer["prompts"][0]["held_tokens"] == 16, "who has no salt is no tenant"
        body = {"prompt": prompt_of(rng, 17), "max_tokens": 1, "cache_salt": "ours"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        metrics = (await client.get("/metrics")).text
    refused = 'kvtier_tier_refused_chunks_total{reason="quota",tier="dram"}'
    assert any(
        line.startswith(refused) and float(line.split()[-1]) > 0 for line in metrics.splitlines()
    ), [line for line in metrics.splitlines() if "quota" in line]


async def test_without_tiers_nothing_is_held(folder: Path, rng: random.Random) -> None:
    async with running(made(folder, "--no-cache")) as client:
        answer = await warm(client, prompt_of(rng, 9), kvtier={"pin": 60})
    assert answer["prompts"] == [{"prompt_tokens": 9, "held_tokens": 0}]
    assert answer["usage"]["prompt_tokens_details"]["kvtier"]["pinned"] == 0


async def test_a_prompt_that_fills_the_context_is_refused(folder: Path) -> None:
    server = made(folder)
    async with running(server) as client:
        body = {"prompt": [1] * server.model.context_tokens}
        response = await client.post("/v1/kvtier/warm", json=body)
    assert error_of(response)["code"] == "context_length_exceeded"
