"""The codecs' kernels compile for a GPU: the interpreter takes more than the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "lib" / "compile_rotated.py"


def test_kernels_compile_and_fuse_no_multiply_add(tmp_path: Path) -> None:
    """A fused multiply-add would round otherwise than the reference; rows move 16 bytes at once.

    But for levels, whose rounding does not depend on it.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 14
    for report in reports:
        levels = report["kernel"].startswith("rotated-lm") and report["way"] == "unpack"
        assert levels == bool(report["fused"]), report
        assert "v4.b32" in report["st" if report["way"] == "unpack" else "ld"], report
