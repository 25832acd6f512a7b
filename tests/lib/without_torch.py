"""The command line where torch is not installed."""

from __future__ import annotations

import subprocess
import sys

_CODE = (
    "import sys\nsys.modules['torch'] = None\nfrom kvtier.cli.main import run\nrun(sys.argv[1:])"
)


def without_torch(argument: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvtier`` with one argument."""
    return subprocess.run(
        [sys.executable, "-c", _CODE, argument],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
