"""Real vLLM publishes what KVTier's tiers hold, over ZeroMQ, as it publishes what HBM holds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvtier_engine.weights.load import model_folder
from tests.lib.vllm_runs import BLOCK_TOKENS, CHUNK_TOKENS, PATIENT, PROGRAM, prompts, run_vllm

pytestmark = pytest.mark.timeout(1000)

HBM = "GPU"
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS


def of(events: list[dict[str, Any]], kind: str, owner: str | None) -> list[dict[str, Any]]:
    return [each for each in events if (each["kind"], each["owner"]) == (kind, owner)]


def hashes(events: list[dict[str, Any]]) -> set[str]:
    return {each for event in events for each in event["hashes"]}


def test_events_tell_of_tiers_in_the_words_of_hbm(rng: random.Random, tmp_path: Path) -> None:
    (prompt,) = prompts(rng, families=1, members=1)
    ask = {"do": "serve", "prompts": [{"tokens": prompt.tokens, "salt": ""}], "count": 1}
    sizes = {"dram": "256MiB", "disk": str(tmp_path), "chunk_tokens": CHUNK_TOKENS}
    asked = {
        "model": str(model_folder("smollm2-135m")),
        "options": sizes | PATIENT,
        "engine": {"block_size": BLOCK_TOKENS, "max_model_len": 1024, "max_num_seqs": 4},
        "zeros": False,
        "policy": "recompute",
        "rounds": [ask, {"do": "reset"}],
    }
    ended = run_vllm(PROGRAM.with_name("vllm_events_program.py"), asked)
    served, reset = ended.rounds()
    events = served["events"]
    computed = of(events, "BlockStored", None)
    assert {each["medium"] for each in computed} == {HBM}
    for owner, medium in (("dram", "CPU"), ("disk", "STORAGE")):
        told = of(events, "BlockStored", owner)
        assert {each["medium"] for each in told} == {medium}
        ours = [each for each in told if each["tokens"][0] in prompt.tokens[::CHUNK_TOKENS]]
        whole = len(prompt.tokens) // CHUNK_TOKENS * CHUNK_TOKENS
        assert [token for each in ours for token in each["tokens"]] == prompt.tokens[:whole]
        assert {(len(each["hashes"]), each["block_size"]) for each in ours} == {
            (BLOCKS, BLOCK_TOKENS)
        }
        # They are the blocks that vLLM has told of itself, one behind the other.
        assert hashes(ours) <= hashes(computed)
        ends = [None, *(each["hashes"][-1] for each in ours[:-1])]
        assert [each["parent"] for each in ours] == ends
    # A reset of the connector takes all of it back.
    gone = of(reset["events"], "BlockRemoved", "dram")
    assert hashes(gone) >= hashes(of(events, "BlockStored", "dram"))
