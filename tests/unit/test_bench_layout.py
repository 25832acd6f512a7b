"""The bench of disk layouts still runs, and its gate holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tidy.sources import ROOT


def test_the_bench_of_layouts_runs_small(tmp_path: Path) -> None:
    results = ROOT / "bench" / "results" / "layout.jsonl"
    before = results.read_bytes() if results.exists() else None
    command = [sys.executable, "bench/tiers/layout.py", "--smoke", "--path", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in ("write segment holes", "compaction at 80%", "a start over 100 files"):
        assert line in done.stdout
    assert (results.read_bytes() if results.exists() else None) == before, "smoke writes no row"
