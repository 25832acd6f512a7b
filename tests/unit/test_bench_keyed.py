"""The bench of foreign keys still runs, and its gate holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_bench_of_foreign_keys_runs_small() -> None:
    command = [sys.executable, "bench/micro/keyed.py", "--smoke"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for name in ("put", "get", "contains", "copy", "read"):
        assert f"{name}: " in done.stdout
