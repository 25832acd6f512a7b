"""The bench of codecs on a CPU still runs, and its gate holds."""

from __future__ import annotations

import subprocess
import sys

from tests.tidy.sources import ROOT


def test_the_bench_of_codecs_runs_small() -> None:
    results = ROOT / "bench" / "results" / "codecs_cpu.jsonl"
    before = results.read_bytes() if results.exists() else None
    command = [sys.executable, "bench/tiers/codecs_cpu.py", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("raw", "lossless", "fp8", "int8", "int6", "int5k4v", "int4", "int4-g128"):
        assert f"{name}: packed" in done.stdout
    assert "unpack / memcpy" in done.stdout
    assert (results.read_bytes() if results.exists() else None) == before, "smoke writes no row"
