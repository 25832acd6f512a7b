"""The served bundled model says what transformers says, however its KV comes and goes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.lib.prompts import family, varied
from tests.lib.reference import Tally
from tests.lib.server import LOAD_ALWAYS, Answer, Served, idle, series, serving

NEW_TOKENS = 24
#: Enough to see whether what was loaded is right.
FEW = 8
CHUNK = 32
CLIENTS = 8
#: What a prompt of 300 tokens and its answer fill; two such requests do not fit at once.
CRAMPED = ["--kv-bytes=24MiB", "--dram=64MiB", "--disk-bytes=16MiB"]


def serving_chunks(disk: Path, *options: str) -> AbstractContextManager[Served]:
    return serving(f"--chunk-tokens={CHUNK}", f"--disk={disk}", *options)


def ask_all(
    served: Served, prompts: Iterable[Sequence[int]], new_tokens: int = NEW_TOKENS
) -> list[Answer]:
    """Ask everything at once, as far as there are clients, and check every answer."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda prompt: served.ask(prompt, new_tokens), prompts))
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == new_tokens
        assert answer.finish == "length"
        tally.check(answer.prompt, answer.tokens)
    tally.assert_few_ties()
    return answers


def chunk_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """Tokens in whole chunks that could come from a tier: of a prompt at least one is computed."""
    return sum((len(prompt) - 1) // CHUNK * CHUNK for prompt in prompts)


def cached(answers: Iterable[Answer], tier: str) -> int:
    return sum(answer.cached[tier] for answer in answers)


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server in which nothing stays anywhere for long."""
    disk = tmp_path_factory.mktemp("cramped") / "kv"
    with serving_chunks(disk, *CRAMPED) as served:
        yield served
        assert served.stop() == 0


def test_cold_warm_and_after_a_restart(tmp_path: Path) -> None:
    prompts = varied()
    assert len(prompts) == 20
    disk = tmp_path / "kv"
    with serving_chunks(disk, "--dram=256MiB") as served:
        assert cached(ask_all(served, prompts), "disk") == 0
        warm = ask_all(served, prompts, FEW)
        assert cached(warm, "hbm") >= chunk_tokens(prompts)
        served.wait_until(idle)
        assert served.stop() == 0
    with serving_chunks(disk, "--dram=256MiB", LOAD_ALWAYS) as served:
        served.wait_for_disk("ok")
        longest = max(prompts, key=len)
        assert cached(ask_all(served, [longest]), "disk") == chunk_tokens([longest])
        ask_all(served, prompts, FEW)
        assert served.stop() == 0


def test_without_a_cache() -> None:
    with serving("--no-cache") as served:
        answers = ask_all(served, varied())
        assert cached(answers, "dram") == cached(answers, "disk") == 0
        assert served.stop() == 0


def test_when_everything_is_evicted_and_preempted(cramped: Served) -> None:
    by_length = sorted(varied(), key=len)
    short, long = by_length[:CLIENTS], by_length[-10:]
    before = cramped.metrics()
    # Each begins with a block or two and ends with six or more, of which there are 34 in all.
    ask_all(cramped, short, 80)
    # Some of these are found below HBM when they come again.
    answers = ask_all(cramped, [*long, *reversed(long)], FEW)
    after = cramped.wait_until(idle)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown(series("preemptions_total")) > 0
    assert grown(series("blocks_evicted_total")) > 0
    assert cached(answers, "dram") > 0
    for tier in ("dram", "disk"):
        assert grown(series("tier_evicted_chunks_total", tier=tier)) > 0


def test_random_requests_that_share_prefixes_and_some_that_leave(
    cramped: Served, rng: random.Random, scale: int
) -> None:
    prompts = family(rng, roots=3, branches=3, leaves=2)
    jobs = [
        (rng.choice(prompts), rng.randint(1, NEW_TOKENS), rng.random() < 0.3)
        for _ in range(36 * scale)
    ]

    def run(job: tuple[tuple[int, ...], int, bool]) -> Answer:
        prompt, count, leaves = job
        if leaves:
            return cramped.ask(prompt, NEW_TOKENS, leave_after=count - 1)
        return cramped.ask(prompt, count)

    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(run, jobs))
    tally = Tally()
    for (_, count, leaves), answer in zip(jobs, answers, strict=True):
        assert len(answer.tokens) == count or leaves
    tally.check_all(answers)
    tally.assert_few_ties()
    metrics = cramped.wait_until(idle)
    assert metrics[series("engine_up")] == 1
    assert metrics[series("step_errors_total")] == metrics[series("cache_faults_total")] == 0
