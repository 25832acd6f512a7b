"""Two servers on one directory: the first has it, the second serves without and takes over."""

from __future__ import annotations

import random
from pathlib import Path

from tests.lib.prompts import tale
from tests.lib.reference import Tally
from tests.lib.server import LOAD_ALWAYS, idle, series, serving

CHUNK = 32
NEW_TOKENS = 6


def test_the_second_server_on_a_disk_waits_and_takes_over(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = tmp_path / "kv"
    options = [f"--chunk-tokens={CHUNK}", "--kv-bytes=24MiB", "--dram=64MiB", f"--disk={disk}"]
    options.append(LOAD_ALWAYS)
    prompts = [tale(rng, 4 * CHUNK + 3) for _ in range(2)]
    tally = Tally()
    with serving(*options) as first, serving(*options) as second:
        first.wait_for_disk("ok")
        tally.check(prompts[0], first.ask(prompts[0], NEW_TOKENS).tokens)
        held = second.wait_for_disk("unavailable")
        assert held["detail"] == f"{disk} is in use by process {first.process.pid}"
        assert second.health()["status"] == "degraded"
        for prompt in prompts:
            answer = second.ask(prompt, NEW_TOKENS)
            assert answer.cached["disk"] == 0
            tally.check(prompt, answer.tokens)
        # Whatever the second one did, the first one still has its disk to itself.
        first.wait_until(idle)
        assert first.tier("disk")["state"] == "ok"
        assert first.stop() == 0
        second.wait_for_disk("ok")
        metrics = second.wait_until(idle)
        assert metrics[series("tier_chunks", tier="disk")] >= 4
        # The second prompt is in its DRAM and goes to disk when it is met again.
        tally.check(prompts[1], second.ask(prompts[1], NEW_TOKENS).tokens)
        assert second.stop() == 0
    with serving(*options) as third:
        third.wait_for_disk("ok")
        for prompt in prompts:
            answer = third.ask(prompt, NEW_TOKENS)
            assert answer.cached["disk"] == 4 * CHUNK
            tally.check(prompt, answer.tokens)
        assert third.stop() == 0
    tally.assert_few_ties()
