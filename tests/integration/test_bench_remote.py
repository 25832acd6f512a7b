"""The benchmark of the stores runs, and its gate holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "tiers" / "remote.py"


def test_every_way_brings_every_byte_back(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--smoke", "--path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    ways = {tuple(line.split()[:3:2]) for line in done.stdout.splitlines()}
    for group in ("redis_tcp", "redis_unix"):
        assert {(group, name) for name in ("kvtier", "raw_whole", "raw_parts", "redis_py")} <= ways
    assert {("file", "kvtier"), ("file", "plain_copy")} <= ways
    assert {("s3", "kvtier"), ("s3", "boto3"), ("s3", "boto3_threads")} <= ways
