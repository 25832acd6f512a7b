"""What a server that stops in order leaves on disk, and what the next one makes of it."""

from __future__ import annotations

import random
import statistics
from contextlib import AbstractContextManager
from pathlib import Path

from tests.lib.disk_folder import shard_files
from tests.lib.prompts import tale
from tests.lib.reference import Tally
from tests.lib.server import LOAD_ALWAYS, Answer, Served, idle, series, serving
from tests.lib.soak_report import report

PROMPT_TOKENS = 1800
CHUNK = 256
NEW_TOKENS = 16


def ask_first(disk: Path, prompt: tuple[int, ...]) -> Answer:
    """Ask a new server, which gets this as its first request; stop it in order."""
    with serving(f"--disk={disk}", "--dram=256MiB", LOAD_ALWAYS) as served:
        served.wait_for_disk("ok")
        answer = served.ask(prompt, NEW_TOKENS)
        served.wait_until(idle)
        assert served.stop() == 0
    return answer


def test_a_long_prompt_comes_back_from_disk_in_a_fraction_of_the_time(
    tmp_path: Path, rng: random.Random, scale: int
) -> None:
    # On a machine that does other things too, one repetition says no more than this.
    repetitions, ratio_min = (1, 2.5) if scale == 1 else (3, 5.0)
    runs = []
    tally = Tally()
    for number in range(repetitions):
        prompt = tale(rng, PROMPT_TOKENS)
        disk = tmp_path / str(number)
        cold, restarted = ask_first(disk, prompt), ask_first(disk, prompt)
        assert sum(cold.cached.values()) == 0
        disk_tokens = PROMPT_TOKENS // CHUNK * CHUNK
        assert restarted.cached == {"hbm": 0, "dram": 0, "disk": disk_tokens, "remote": 0}
        assert restarted.text == cold.text
        tally.check(prompt, cold.tokens)
        runs.append((cold.ttft_s, restarted.ttft_s))
    tally.assert_few_ties()
    cold_s, restarted_s = (statistics.median(times) for times in zip(*runs, strict=True))
    report("restart", scale, prompt_tokens=PROMPT_TOKENS, cold_s=cold_s, restarted_s=restarted_s)
    assert cold_s / restarted_s >= ratio_min, runs


def test_write_back_writes_at_the_end_what_it_held_back(tmp_path: Path, rng: random.Random) -> None:
    prompt = tale(rng, 200)

    def start() -> AbstractContextManager[Served]:
        options = ["--disk-mode=back", "--chunk-tokens=32", "--dram=128MiB", LOAD_ALWAYS]
        return serving(f"--disk={tmp_path}/kv", *options)

    with start() as served:
        served.wait_for_disk("ok")
        cold = served.ask(prompt, NEW_TOKENS)
        metrics = served.wait_until(lambda seen: not seen[series("stores_inflight")])
        # 192 tokens of prompt, and 16 of the answer that made another chunk with the rest.
        assert metrics[series("tier_chunks", tier="dram")] == 6
        assert metrics[series("tier_chunks", tier="disk")] == 0
        assert shard_files(tmp_path / "kv") == []
        assert served.stop() == 0
    assert len(shard_files(tmp_path / "kv")) == 6
    with start() as served:
        served.wait_for_disk("ok")
        again = served.ask(prompt, NEW_TOKENS)
        assert again.cached == {"hbm": 0, "dram": 0, "disk": 192, "remote": 0}
        assert served.stop() == 0
    tally = Tally()
    tally.check(prompt, cold.tokens)
    tally.check(prompt, again.tokens)
    tally.assert_few_ties()
