"""A server over a remote that outlives it: what one has computed another one loads."""

from __future__ import annotations

import random
from pathlib import Path

from tests.lib.prompts import tale
from tests.lib.reference import Tally
from tests.lib.server import LOAD_ALWAYS, idle, serving

NEW_TOKENS = 16


def test_what_one_server_has_computed_another_loads_from_the_remote(
    tmp_path: Path, rng: random.Random
) -> None:
    prompt = tale(rng, 200)
    (tmp_path / "shared").mkdir()
    options = [f"--remote=file://{tmp_path}/shared", "--chunk-tokens=32", "--dram=128MiB"]
    options.append(LOAD_ALWAYS)
    with serving(*options) as served:
        cold = served.ask(prompt, NEW_TOKENS)
        served.wait_until(idle)
        assert served.stop() == 0
    with serving(*options) as served:
        served.wait_for_tier("remote", "ok")
        tiers = {tier["name"]: tier["state"] for tier in served.health()["tiers"]}
        assert tiers == {"hbm": "ok", "dram": "ok", "remote": "ok"}
        warm = served.ask(prompt, NEW_TOKENS)
        assert served.stop() == 0
    assert sum(cold.cached.values()) == 0
    assert warm.cached == {"hbm": 0, "dram": 0, "disk": 0, "remote": 192}
    assert warm.text == cold.text
    tally = Tally()
    tally.check(prompt, cold.tokens)
    tally.assert_few_ties()
