"""One process of real vLLM: what comes from a tier gives the same tokens as computing it."""

from __future__ import annotations

import random

import pytest

from tests.lib.vllm_runs import CHUNK_TOKENS, PATIENT, VllmRun, prompts, whole_chunks

pytestmark = pytest.mark.timeout(1000)


def test_what_vllm_loads_gives_the_same_tokens_as_computing(rng: random.Random) -> None:
    asked = prompts(rng, families=2, members=2)
    run = VllmRun({"dram": "256MiB", "chunk_tokens": CHUNK_TOKENS, **PATIENT})
    cold, warm = run.serve(asked).forget().serve(asked).served()
    assert warm.tokens == cold.tokens
    # Of each prompt at least what a tier can give comes back, though vLLM has forgotten it.
    assert 0 in cold.cached
    assert all(
        count >= whole_chunks(len(each.tokens))
        for count, each in zip(warm.cached, asked, strict=True)
    )
