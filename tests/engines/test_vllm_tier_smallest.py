"""Real vLLM with KVTier below its CPU tier: what is promoted gives the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.lib.vllm_runs import BLOCK_TOKENS, prompts
from tests.lib.vllm_tier_runs import served, tier_table

pytestmark = pytest.mark.timeout(1000)


def test_what_vllm_promotes_gives_the_same_tokens_as_computing(
    tmp_path: Path, rng: random.Random
) -> None:
    asked = prompts(rng, families=1, members=2, shared=100, own=30)
    cold, warm = served(tier_table(tmp_path / "kv"), asked, None, asked)
    assert warm.tokens == cold.tokens
    # The first to be computed had nothing; which one it is depends on whose lookup was quicker.
    assert 0 in cold.cached
    assert warm.cached == [(len(each.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for each in asked]
