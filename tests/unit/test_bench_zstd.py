"""The bench of the byte codec still runs, and its gate holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_bench_of_zstd_runs_small() -> None:
    results = ROOT / "bench" / "results" / "zstd.jsonl"
    before = results.read_bytes() if results.exists() else None
    command = [sys.executable, "bench/micro/zstd.py", "--smoke"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for case in ("raw bfloat16", "int8 bfloat16", "raw float32"):
        assert f"{case}: " in done.stdout
    assert "encode_plain" in done.stdout
    assert (results.read_bytes() if results.exists() else None) == before, "smoke writes no row"
