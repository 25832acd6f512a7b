"""What the data plane has done since the start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts that never fall. ``unwritten`` had no room; ``refused`` were not allowed in.

    ``unleased`` were there and refused, ``lost_leases`` ended with their connection. What is leased
    counts among the reads, by ``leased_bytes`` of whole objects; what was ``taken`` from a staging
    file among the writes.
    """

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
    leases: int = 0
    leased_bytes: int = 0
    unleased: int = 0
    lost_leases: int = 0
    taken: int = 0
