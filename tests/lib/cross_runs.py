"""``bench/engines/cross_engine.py`` as a program, and its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.lib.peers import peer

ROOT: Final = Path(__file__).parents[2]
#: Longer than any run here on a busy machine, all processes together.
RUN_S: Final = 900.0


def cross_engine(folder: Path, *options: str, vllm: bool) -> list[dict[str, Any]]:
    """Run it on few short prompts; return its rows. ``AssertionError`` unless it ends well."""
    rows = folder / "rows.jsonl"
    peers = ["--vllm-python", str(peer("vllm") / "bin" / "python")] if vllm else []
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "bench" / "engines" / "cross_engine.py"),
            *("--prompts=3", "--scale=0.7", "--count=6", "--kv-bytes=256MiB", "--limit-s=400"),
            *("--out", str(rows), "--logs", str(folder / "logs")),
            *peers,
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in rows.read_text().splitlines()]


def cell(rows: list[dict[str, Any]], writer: str, reader: str) -> dict[str, Any]:
    """Return the row of a cell that is no control."""
    named = [(row["writer"], row["reader"], row["control"]) for row in rows]
    return rows[named.index((writer, reader, False))]
