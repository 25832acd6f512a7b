"""Run inside vLLM's own environment: rounds of prompts over vLLM's tiering with a secondary tier.

Reads its orders as JSON from standard input: the model, the secondary tier's table, whether loads
are sabotaged, and the rounds. ``cpu_copies.py`` lies beside it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm_program import forget, serve  # type: ignore[import-not-found]

CPU_TIER_BYTES = 256 * 2**20


def sabotage(tier: str) -> None:
    """Let every load bring zeros, as if nobody looked at what is loaded.

    Ours from KVTier; vLLM's own tier, whose reads are not ours to spoil, into vLLM's pool.
    """
    if tier == "KVTierTier":
        from kvtier_adapters.payloads.store import Face

        honest = Face.get

        def get(self: Any, keys: Any, into: Any) -> Any:
            filled = yield from honest(self, keys, into)
            for target in into:
                target[:] = bytes(len(target))
            return filled

        Face.get = get  # type: ignore[method-assign]
    else:
        from cpu_copies import CopyingWorker  # type: ignore[import-not-found]

        CopyingWorker.zeros = True


def open_engine(asked: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_copies",
            "cpu_bytes_to_use": CPU_TIER_BYTES,
            "secondary_tiers": [asked["tier"]],
        },
    )
    return LLM(
        asked["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        disable_log_stats=False,
        kv_transfer_config=transfer,
        block_size=32,
        max_model_len=1024,
        max_num_seqs=4,
    )


def settle(engine: Any) -> None:
    """Have what is deferred submitted, and wait until the tier has it: forgetting drains it."""
    serve(engine, [{"tokens": [1, 2, 3], "salt": ""}], 2)


def main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    if asked["zeros"]:
        sabotage(asked["tier"]["type"])
    engine = open_engine(asked)
    rounds: list[dict[str, Any]] = []
    for orders in asked["rounds"]:
        if orders["do"] == "serve":
            rounds.append(serve(engine, orders["prompts"], orders["count"]))
        else:
            settle(engine)
            rounds.append({"done": forget(engine, tiers=True)})
    engine.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(rounds), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
