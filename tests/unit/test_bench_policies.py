"""The bench of policies still runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_bench_of_policies_runs_small() -> None:
    results = ROOT / "bench" / "results" / "policies.jsonl"
    before = results.read_bytes() if results.exists() else None
    command = [sys.executable, "bench/micro/policies.py", "--smoke"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for policy in ("dict", "lru", "arc", "gittins", "gittins-cost"):
        assert f"{policy:13}      200 blocks" in done.stdout
    assert (results.read_bytes() if results.exists() else None) == before, "smoke writes no row"
