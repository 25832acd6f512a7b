"""One process of real vLLM with a model of full attention and sliding windows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.lib.vllm_hybrid import ENGINE, write_hybrid
from tests.lib.vllm_runs import CHUNK_TOKENS, PATIENT, VllmRun, prompts, whole_chunks

pytestmark = pytest.mark.timeout(1000)


def test_windows_that_vllm_loads_give_the_same_tokens_as_computing(
    tmp_path: Path, rng: random.Random
) -> None:
    asked = prompts(rng, families=2, members=2)
    options = {"dram": "256MiB", "chunk_tokens": CHUNK_TOKENS, **PATIENT}
    run = VllmRun(options, engine=ENGINE, model=write_hybrid(tmp_path / "model"))
    cold, warm = run.serve(asked).forget().serve(asked).served()
    assert warm.tokens == cold.tokens
    assert 0 in cold.cached
    assert all(
        count >= whole_chunks(len(each.tokens))
        for count, each in zip(warm.cached, asked, strict=True)
    )
