"""Invalidation under load, cut off by a kill: what is of an earlier epoch never comes back."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.epoch_child import CHUNK_TOKENS, CHUNKS, PROMPTS, NumberEngine, Weights, open_cache

ROUNDS = 4


def killed(folder: Path, seed: int, settled: int, *, tenant: bool) -> int:
    """Run a child for some invalidations, kill it within one, return the last that returned."""
    draws = random.Random(seed)
    command = [sys.executable, "-m", "tests.lib.epoch_child", str(folder), str(seed)]
    command += [str(settled), str(int(tenant))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        done = settled
        for _ in range(draws.randint(2, 5)):
            word, number, *_ = child.stdout.readline().split()
            assert word == "done", f"of weights {number} although later ones were told"
            done = int(number)
        # No further line is waited for: the child is in the middle of whatever comes next.
        child.kill()
        for line in child.stdout:
            word, number, *_ = line.split()
            assert word == "done"
            done = int(number)
    return done


@pytest.mark.parametrize("tenant", [False, True], ids=["namespace", "tenant"])
def test_b11_nothing_of_an_earlier_epoch_comes_back_after_a_kill(
    tmp_path: Path, *, tenant: bool
) -> None:
    settled = 1
    for seed in range(ROUNDS):
        settled = killed(tmp_path, seed, settled, tenant=tenant)
        weights = Weights(settled)
        cache = open_cache(tmp_path)
        engine = NumberEngine(cache, weights)
        for prompt in range(PROMPTS):
            engine.load(engine.match(prompt))
        assert not weights.wrong, weights.wrong
        engine.store(0)
        assert engine.load(engine.match(0)) == CHUNKS * CHUNK_TOKENS
        cache.close()
        assert not weights.wrong, weights.wrong
