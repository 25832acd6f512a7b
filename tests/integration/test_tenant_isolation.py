"""What one tenant may learn of another's cache: nothing, by figures, errors, work or time.

Two hundred prompts of a tenant, in random order: half of them another tenant has cached in every
tier, half nobody has. Whatever tells a hit from a miss must not tell these halves apart. The same
measures are taken of the tenant's own cached prompts, to see that they do tell a hit.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.clock import SystemClock
from kvtier_engine.serve import Server
from tests.lib.server import POLL_S, STATE_TIMEOUT_S
from tests.lib.tiny_llama import VOCAB_SIZE, tiny_config, tiny_tensors, write_folder
from tests.lib.tiny_server import made, running

REQUESTS = 200
PROMPT_TOKENS = 41
#: A difference of two samples of one distribution goes beyond this once in some 40,000 runs.
DEVIATIONS_MAX = 4.2
#: Figures that move with time alone, or with what other requests left.
RESTLESS = ("_seconds", "_bucket", "kvtier_compute", "process_", "python_")


@dataclass(frozen=True)
class Observation:
    """All that a tenant can see of one request, and how long it took."""

    answer: dict[str, Any]
    work: dict[str, float]
    seconds: float


def rank_deviations(some: Sequence[float], others: Sequence[float]) -> float:
    """How many standard deviations the ranks of two samples lie apart (Mann and Whitney, 1947)."""
    ordered = sorted([(value, 0) for value in some] + [(value, 1) for value in others])
    ranks = sum(rank for rank, (_, sample) in enumerate(ordered, 1) if sample == 0)
    n, m = len(some), len(others)
    mean, variance = n * (n + m + 1) / 2, n * m * (n + m + 1) / 12
    return (ranks - mean) / float(variance**0.5)


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {
        name: float(value)
        for name, value in pairs
        if not any(restless in name for restless in RESTLESS)
    }


async def settled(server: Server, client: httpx.AsyncClient) -> dict[str, float]:
    """The figures once nothing is under way any more.

    Looks now and then: one that only looked would keep the writing thread, which needs the
    interpreter after each system call, from getting on.
    """
    async with asyncio.timeout(STATE_TIMEOUT_S):
        while True:
            now = server.snapshot()
            assert now.cache is not None
            moving = now.cache.loads_inflight + now.cache.stores_inflight + now.cache.writes_queued
            if not moving and not now.engine.running and not now.engine.blocks_used:
                seen = await figures(client)
                if seen == await figures(client):
                    return seen
            await asyncio.sleep(POLL_S)


async def ask(client: httpx.AsyncClient, prompt: list[int], salt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    response = await client.post("/v1/completions", json=body)
    answer = response.json()
    del answer["id"], answer["created"]
    del answer["choices"]  # The text follows from the prompt.
    return {"status": response.status_code, **answer}


async def observe(
    server: Server, client: httpx.AsyncClient, prompt: list[int], salt: str
) -> Observation:
    clock = SystemClock()
    before = await settled(server, client)
    began = clock.now()
    answer = await ask(client, prompt, salt)
    seconds = clock.now() - began
    after = await settled(server, client)
    return Observation(answer, {n: after[n] - before.get(n, 0.0) for n in after}, seconds)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return write_folder(tmp_path_factory.mktemp("tiny"), config, tiny_tensors(config))


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def server_over(folder: Path, disk: Path) -> Server:
    return made(folder, f"--disk={disk}", "--kv-bytes=64MiB")


async def test_another_tenants_cache_cannot_be_told_from_none(
    folder: Path, tmp_path: Path, rng: random.Random
) -> None:
    theirs, nobodys = prompts_of(rng, REQUESTS // 2), prompts_of(rng, REQUESTS // 2)
    server = server_over(folder, tmp_path)
    async with running(server) as client:
        for prompt in theirs:
            await ask(client, prompt, "theirs")
        order = [(prompt, kind) for kind, all_ in enumerate((theirs, nobodys)) for prompt in all_]
        rng.shuffle(order)
        seen: tuple[list[Observation], list[Observation]] = ([], [])
        for prompt, kind in order:
            seen[kind].append(await observe(server, client, prompt, "ours"))
        again = [await observe(server, client, prompt, "ours") for prompt in theirs[:20]]
    # A hit shows, in the answer and in the work that was done for it.
    assert again[0].answer != seen[0][0].answer
    assert again[0].work != seen[0][0].work
    # Another tenant's does not.
    assert [each.answer for each in seen[0]] == [each.answer for each in seen[1]]
    works = [sorted(sorted(each.work.items()) for each in half) for half in seen]
    assert works[0] == works[1]
    times = [[each.seconds for each in half] for half in seen]
    assert abs(rank_deviations(*times)) < DEVIATIONS_MAX, [statistics.median(t) for t in times]


async def test_refusals_do_not_tell_either(
    folder: Path, tmp_path: Path, rng: random.Random
) -> None:
    theirs, nobodys = prompts_of(rng, 2)
    wrong = {"max_tokens": -1}
    async with running(server_over(folder, tmp_path)) as client:
        await ask(client, theirs, "theirs")
        told = []
        for prompt in (theirs, nobodys):
            body = {"prompt": prompt, "cache_salt": "ours", **wrong}
            response = await client.post("/v1/completions", json=body)
            told.append((response.status_code, response.json()))
    assert told[0] == told[1]


def test_the_measure_tells_samples_apart_that_differ() -> None:
    rng = random.Random(5)
    some = [rng.gauss(1.0, 0.1) for _ in range(100)]
    same = [rng.gauss(1.0, 0.1) for _ in range(100)]
    slower = [rng.gauss(1.08, 0.1) for _ in range(100)]
    assert abs(rank_deviations(some, same)) < DEVIATIONS_MAX
    assert rank_deviations(some, slower) < -DEVIATIONS_MAX
