"""Run inside vLLM's environment: serve rounds of prompts, one prompt at a time, a line per round.

Reads its orders as JSON from standard input; ``cross_engine.py`` gives them.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

#: As many as vLLM gives unless it is told otherwise.
TOP: Final = 20
#: How long stores may hold blocks.
FORGET_S: Final = 60.0


def open_engine(asked: dict[str, Any]) -> Any:
    """Start vLLM with the connector."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        asked["model"],
        skip_tokenizer_init=True,
        dtype=asked["dtype"],
        enforce_eager=True,
        seed=0,
        max_num_seqs=4,
        max_logprobs=TOP,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier_adapters.vllm",
            kv_role=asked["role"],
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=asked["options"],
        ),
        **asked["engine"],
    )


def ask(engine: Any, tokens: list[int], salt: str, count: int) -> dict[str, Any]:
    """Answer one prompt greedily: tokens, their likeliest alternatives, tokens not computed."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=TOP
    )
    prompt = {"prompt_token_ids": tokens, "cache_salt": salt}
    (output,) = engine.generate([prompt], sampling, use_tqdm=False)
    answer = output.outputs[0]
    return {
        "tokens": list(answer.token_ids),
        "top": [
            {str(token): each.logprob for token, each in step.items()} for step in answer.logprobs
        ],
        "found": output.num_cached_tokens or 0,
    }


def forget(engine: Any) -> None:
    """Have vLLM forget its own prefixes, so that what is found lies in a tier."""
    end = time.monotonic() + FORGET_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > end:
            raise SystemExit("vLLM does not forget: stores still hold blocks")
        ask(engine, [1, 2, 3], "aside", 1)


def serve(engine: Any, orders: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer a round. What is read is looked for in the tiers alone."""
    answers = []
    for tokens in orders["prompts"]:
        if orders["reads"]:
            forget(engine)
        found = ask(engine, tokens, orders["salt"], orders["count"])
        # Of a round that writes, vLLM's own prefixes are what was found.
        found["tier"] = found["found"] if orders["reads"] else 0
        answers.append(found)
    forget(engine)
    return answers


def main() -> None:
    """Do what was ordered, round by round."""
    asked: dict[str, Any] = json.load(sys.stdin)
    engine = open_engine(asked)
    for orders in asked["rounds"]:
        print("ROUND " + json.dumps(serve(engine, orders)), flush=True)
    # Whatever is still to be written is written now.
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
