"""Rows of bench/results: what ran, where, and how the figures spread."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return p20, p50 and p80."""
    if len(values) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}


def write_row(name: str, figures: dict[str, Any], packages: Sequence[str] = ()) -> None:
    """Append one row to ``bench/results/NAME.jsonl``: figures, command, commit, machine, date."""
    row = {
        "bench": name,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "commit": _commit(),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version()}
        | {package: metadata.version(package) for package in packages},
        **figures,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def _commit() -> str:
    def git(*args: str) -> str:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    dirty = "+dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("rev-parse", "--short", "HEAD") + dirty


def _hardware() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }
