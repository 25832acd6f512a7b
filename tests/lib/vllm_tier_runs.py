"""Starting vLLM with KVTier below its own CPU tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvtier_engine.weights.load import model_folder
from tests.lib.peers import PATIENT
from tests.lib.vllm_runs import ROOT, RUN_S, Ended, Prompt, Served, run_vllm

PROGRAM: Final = ROOT / "tests" / "engines" / "vllm_tier_program.py"


def tier_table(folder: Path, **options: Any) -> dict[str, Any]:
    """The secondary tier as a user writes it; it keeps what it has when vLLM resets its cache."""
    return {
        "type": "KVTierTier",
        "module_path": "kvtier_adapters.vllm_tier",
        "keep_on_reset": True,
        "dram": "256MiB",
        "disk": str(folder),
        "disk_bytes": "2GiB",
        "weights_id": "smollm2-135m",
        **PATIENT,
        **options,
    }


def start_tiers(
    table: dict[str, Any],
    *rounds: list[Prompt] | None,
    count: int = 4,
    zeros: bool = False,
    run_s: float = RUN_S,
) -> Ended:
    """Run vLLM; answer prompts, or for None have vLLM and its CPU tier forget."""
    orders = {
        "model": str(model_folder("smollm2-135m")),
        "tier": table,
        "zeros": zeros,
        "rounds": [
            {"do": "forget"}
            if asked is None
            else {
                "do": "serve",
                "count": count,
                "prompts": [{"tokens": each.tokens, "salt": each.salt} for each in asked],
            }
            for asked in rounds
        ],
    }
    return run_vllm(PROGRAM, orders, run_s=run_s)


def served(
    table: dict[str, Any], *rounds: list[Prompt] | None, count: int = 4, zeros: bool = False
) -> list[Served]:
    """Run vLLM as ``start_tiers`` does. ``AssertionError`` unless it ended well."""
    return start_tiers(table, *rounds, count=count, zeros=zeros).served()
