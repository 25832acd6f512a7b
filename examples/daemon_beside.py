"""What the examples share that talk to `kvtier daemon`: to start one on a Unix socket."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PROGRAM = Path(sys.executable).with_name("kvtier")


@contextlib.contextmanager
def daemon() -> Iterator[str]:
    """Run a daemon as long as the context lasts; give the URL of its connector."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(PROGRAM), "daemon", f"--listen=unix:{folder}/socket", "--dram=64MiB"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                lines = (line.split() for line in process.stderr)
                yield next(words[1] for words in lines if words[:1] == ["serves"])
            finally:
                process.terminate()
