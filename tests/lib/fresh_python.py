"""Code in an interpreter of its own, which has imported nothing yet."""

from __future__ import annotations

import subprocess
import sys


def run_python(code: str) -> str:
    """Return what it prints; a warning or an error fails the test."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
