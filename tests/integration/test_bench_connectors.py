"""The benchmark of the connectors runs, and its gate holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "tiers" / "connectors.py"


def test_every_way_brings_every_byte_back(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--smoke", "--path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    ways = {line.split()[2] for line in done.stdout.splitlines()}
    assert {"file", "redis_tcp", "redis_unix", "redis_py_tcp", "plain_files"} <= ways
