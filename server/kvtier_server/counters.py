"""What the data plane has done since the start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts that never fall. ``unwritten`` had no room; ``refused`` were not allowed in."""

    accepted: int = 0
    refused: int = 0
    malformed: int = 0
    stalled: int = 0
    lookups: int = 0
    reads: int = 0
    read_bytes: int = 0
    absent: int = 0
    writes: int = 0
    written_bytes: int = 0
    unwritten: int = 0
