"""What the operating system says of a process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figures:
    """One look at a process: resident bytes of its own, threads, open descriptors."""

    anonymous_bytes: int
    threads: int
    descriptors: int


def figures(process_id: int) -> Figures:
    """Look at a process that runs."""
    folder = Path("/proc") / str(process_id)
    status = (folder / "status").read_text()

    def number(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
        assert found, f"no {name} in {status}"
        return int(found[1])

    count = len(list((folder / "fd").iterdir()))
    return Figures(number("RssAnon") * 1024, number("Threads"), count)
