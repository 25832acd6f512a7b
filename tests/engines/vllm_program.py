"""Run inside vLLM's own environment: serve rounds of prompts and print what came as JSON.

Reads its orders as JSON from standard input; ``tests/lib/vllm_runs.py`` says what they are.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

#: What a round of metrics tells.
COUNTED = ("vllm:num_preemptions", "vllm:kvtier_hit_tokens", "vllm:kvtier_miss_tokens")
#: How long stores may hold blocks, on a busy machine.
FORGET_S = 120


def sabotage() -> None:
    """Let every load bring zeros, as if nobody looked at what is loaded."""
    from kvtier.codecs.raw import RawCodec

    honest = RawCodec.unpack

    def unpack(self: Any, payload: memoryview, pool: Any, move: Any) -> None:
        honest(self, memoryview(bytes(len(payload))), pool, move)

    RawCodec.unpack = unpack  # type: ignore[method-assign]


def open_engine(asked: dict[str, Any]) -> Any:
    """Start vLLM, with the connector if there are options for it."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if asked["options"] is not None:
        transfer = KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier_adapters.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=asked["policy"],
            kv_connector_extra_config=asked["options"],
        )
    return LLM(
        asked["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        disable_log_stats=False,
        kv_transfer_config=transfer,
        **asked["engine"],
    )


def serve(engine: Any, prompts: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """Answer prompts greedily with so many tokens each."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=1
    )
    began = time.monotonic()
    asked = [
        {"prompt_token_ids": each["tokens"]}
        | ({"cache_salt": each["salt"]} if each["salt"] else {})
        for each in prompts
    ]
    outputs = engine.generate(asked, sampling, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return {
        "seconds": time.monotonic() - began,
        "tokens": [list(answer.token_ids) for answer in answers],
        "logprobs": [
            [
                step[token].logprob
                for step, token in zip(answer.logprobs, answer.token_ids, strict=True)
            ]
            for answer in answers
        ],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def forget(engine: Any, *, tiers: bool) -> bool:
    """Have vLLM forget its own prefixes, and the tiers theirs; stores may still hold blocks."""
    end = time.monotonic() + FORGET_S
    while not (done := engine.reset_prefix_cache(reset_connector=tiers)) and time.monotonic() < end:
        serve(engine, [{"tokens": [1, 2, 3], "salt": ""}], 1)
    return bool(done)


def main() -> None:
    """Do what was ordered, round by round."""
    asked: dict[str, Any] = json.load(sys.stdin)
    if asked["zeros"]:
        sabotage()
    engine = open_engine(asked)
    rounds: list[dict[str, Any]] = []
    for orders in asked["rounds"]:
        if orders["do"] == "serve":
            rounds.append(serve(engine, orders["prompts"], orders["count"]))
        elif orders["do"] == "metrics":
            found = [each for each in engine.get_metrics() if each.name in COUNTED]
            rounds.append({each.name + json.dumps(each.labels): each.value for each in found})
        else:
            rounds.append({"done": forget(engine, tiers=orders["do"] == "reset")})
    print("RESULT " + json.dumps(rounds), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
