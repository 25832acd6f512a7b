"""Starting vLLM with KVTier below its own CPU tier."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from kvtier_engine.weights.load import model_folder
from tests.lib.vllm_runs import PYTHON, ROOT, RUN_S, Prompt, Served

PROGRAM: Final = ROOT / "tests" / "engines" / "vllm_tier_program.py"


def tier_table(folder: Path, **options: Any) -> dict[str, Any]:
    """The secondary tier as a user writes it; it keeps what it has when vLLM resets its cache.

    Patient: how soon it gives up is tried elsewhere, on machines that are busy as well.
    """
    return {
        "type": "KVTierTier",
        "module_path": "kvtier_adapters.vllm_tier",
        "keep_on_reset": True,
        "dram": "256MiB",
        "disk": str(folder),
        "disk_bytes": "2GiB",
        "load_deadline_s": 60,
        "lookup_deadline_s": 30,
        "weights_id": "smollm2-135m",
        **options,
    }


def served(
    table: dict[str, Any], *rounds: list[Prompt] | None, count: int = 4, zeros: bool = False
) -> list[Served]:
    """Run vLLM; answer prompts, or for None have vLLM and its CPU tier forget.

    ``AssertionError`` unless it ended well.
    """
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
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [str(PYTHON), str(PROGRAM)],
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env=environment,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert (done.returncode, len(lines)) == (0, 1), done.stderr[-4000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    assert all(each.get("done", True) for each in found), "vLLM could not forget"
    return [Served(**each) for each in found if "tokens" in each]
