"""Figures of a soak, one line of JSON each, for whoever compares it with an earlier one."""

from __future__ import annotations

import json
import os
import platform
import time

from tests.tidy.sources import ROOT

PATH = ROOT / "bench" / "results" / "soak.jsonl"


def report(name: str, scale: int, **figures: float) -> None:
    """Append figures; in a run of normal size, where they say little, do nothing."""
    if scale == 1:
        return
    rounded = {key: round(value, 4) for key, value in figures.items()}
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}"
    line = {"when": when, "machine": machine, "scale": scale, "test": name, **rounded}
    PATH.parent.mkdir(parents=True, exist_ok=True)
    with PATH.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
