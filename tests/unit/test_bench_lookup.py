"""The bench of lookups still runs, and its gate holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_bench_of_lookups_runs_small() -> None:
    results = ROOT / "bench" / "results" / "lookup.jsonl"
    before = results.read_bytes() if results.exists() else None
    command = [sys.executable, "bench/micro/lookup.py", "--smoke"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for tier in ("dram", "disk"):
        assert f"{tier}, 1000 chunks: match" in done.stdout
    assert "hash_list" in done.stdout
    assert (results.read_bytes() if results.exists() else None) == before, "smoke writes no row"
