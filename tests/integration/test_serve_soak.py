"""Many clients at once, some of which leave: nobody starves, nothing leaks, every text is right."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.constants import MIB
from tests.lib.disk_folder import bytes_below, shard_files
from tests.lib.process_figures import figures
from tests.lib.prompts import family
from tests.lib.reference import Tally
from tests.lib.server import Answer, Metrics, Served, idle, series, serving
from tests.lib.soak_report import report

NEW_TOKENS = 12
DISK_BYTES = 96 * MIB
#: What allocators and libraries may add after the first period, and do at a falling rate.
GROWTH_BYTES_MAX = 128 * MIB
TTFT_S_MAX = 60.0

Prompt = tuple[int, ...]


def keep_asking(
    served: Served, prompts: Sequence[Prompt], seed: int, seconds: float
) -> list[tuple[int, Answer]]:
    """Be one client. Return what was wanted of each answer (0: it left) and what came."""
    rng = random.Random(seed)
    got: list[tuple[int, Answer]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        prompt, count = rng.choice(prompts), rng.randint(2, NEW_TOKENS)
        if rng.random() < 0.3:
            answer = served.ask(prompt, NEW_TOKENS, leave_after=rng.randint(0, NEW_TOKENS - 2))
            got.append((0, answer))
        else:
            got.append((count, served.ask(prompt, count)))
    return got


def period(
    served: Served, prompts: Sequence[Prompt], rng: random.Random, clients: int, seconds: float
) -> list[Answer]:
    """Have all clients ask for so long; return the answers, each checked, once all is idle."""
    with ThreadPoolExecutor(clients) as pool:
        seeds = [rng.getrandbits(32) for _ in range(clients)]
        runs = list(pool.map(lambda seed: keep_asking(served, prompts, seed, seconds), seeds))
    assert all(runs), "a client got no turn"
    served.wait_until(idle)
    tally = Tally()
    answers = []
    for wanted, answer in (each for run in runs for each in run):
        assert not wanted or (len(answer.tokens), answer.finish) == (wanted, "length")
        answers.append(answer)
    tally.check_all(answers)
    tally.assert_few_ties()
    return answers


def check_books(metrics: Metrics, disk: Path) -> None:
    """Every block and file has its place, and nothing failed on the way."""
    assert idle(metrics)
    for name in ("step_errors_total", "cache_faults_total", "degraded"):
        assert metrics[series(name)] == 0
    for tier in ("dram", "disk"):
        assert metrics[series("tier_corrupt_shards_total", tier=tier)] == 0
        assert metrics[series("tier_io_errors_total", tier=tier)] == 0
        used = metrics[series("tier_used_bytes", tier=tier)]
        assert used <= metrics[series("tier_capacity_bytes", tier=tier)]
    assert metrics[series("tier_chunks", tier="disk")] == len(shard_files(disk))
    assert bytes_below(disk / "shards") == metrics[series("tier_used_bytes", tier="disk")]


def test_many_clients_of_which_some_leave(tmp_path: Path, rng: random.Random, scale: int) -> None:
    clients, seconds = (12, 5.0) if scale == 1 else (32, 3.0 * scale)
    disk = tmp_path / "kv"
    # Three long requests fill HBM, and the tiers hold a part of all prompts each.
    options = ["--chunk-tokens=32", "--kv-bytes=32MiB", "--dram=64MiB", "--max-num-seqs=8"]
    prompts = family(rng, roots=6, branches=3, leaves=1)
    with serving(*options, f"--disk={disk}", f"--disk-bytes={DISK_BYTES}") as served:
        served.wait_for_disk("ok")
        answers = period(served, prompts, rng, clients, seconds)
        before = figures(served.process.pid)
        answers += period(served, prompts, rng, clients, seconds)
        after = figures(served.process.pid)
        metrics = served.wait_until(idle)
        check_books(metrics, disk)
        assert served.stop() == 0
    stayed = [answer for answer in answers if answer.finish]
    ttft_s = max(answer.ttft_s for answer in stayed)
    report(
        "many clients",
        scale,
        clients=clients,
        seconds=2 * seconds,
        answers=len(stayed),
        left=len(answers) - len(stayed),
        ttft_s_max=ttft_s,
        preemptions=metrics[series("preemptions_total")],
        growth_bytes=after.anonymous_bytes - before.anonymous_bytes,
        **{tier: sum(answer.cached[tier] for answer in stayed) for tier in ("dram", "disk")},
    )
    assert ttft_s < TTFT_S_MAX
    assert metrics[series("sequences_finished_total", reason="abort")] > 0
    assert after.anonymous_bytes - before.anonymous_bytes < GROWTH_BYTES_MAX
    assert (after.threads, after.descriptors) == (before.threads, before.descriptors)
