"""The bench of the byte codec on the way to a remote still runs, and its gate holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_bench_of_remotes_and_zstd_runs_small() -> None:
    results = ROOT / "bench" / "results" / "remote_codec.jsonl"
    before = results.read_bytes() if results.exists() else None
    command = [sys.executable, "bench/tiers/remote_codec.py", "--smoke"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for case in ("bfloat16 at 100 MB/s", "float32 at 1000 MB/s"):
        assert f"{case}: " in done.stdout
    assert (results.read_bytes() if results.exists() else None) == before, "smoke writes no row"
