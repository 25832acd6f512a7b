"""What the data plane has done since the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Under which a field's meaning stands in its metadata.
MEANING = "meaning"


def _count(meaning: str) -> Any:
    return field(default=0, metadata={MEANING: meaning})


@dataclass(slots=True)
class Counters:
    """Counts that never fall; each with what it means to an operator."""

    accepted: int = _count("Connections that were let in.")
    refused: int = _count(
        "Connections that were not: too many, a wrong token or certificate, another version of the"
        " wire, no TLS where it is spoken."
    )
    malformed: int = _count("Connections on which something came that is no frame.")
    stalled: int = _count(
        "Connections that were cut off: they said nothing, held a frame or a lease for too long, or"
        " took an answer too slowly."
    )
    lookups: int = _count("Keys that were asked about; these count as neither reads nor misses.")
    reads: int = _count("Reads and leases that were answered with an object.")
    read_bytes: int = _count("Bytes that went out by sockets.")
    absent: int = _count(
        "Reads and leases of what is in no tier, or in none that answered in time."
    )
    writes: int = _count("Objects that were stored.")
    written_bytes: int = _count("Bytes of them.")
    unwritten: int = _count("Objects for which there was no room, quota or time.")
    leases: int = _count("Of the reads, those in shared memory.")
    leased_bytes: int = _count("Bytes of what was leased, of whole objects.")
    unleased: int = _count(
        "Leases of what was there that were refused; a client reads it by the socket then."
    )
    lost_leases: int = _count("Leases that ended with their connection.")
    taken: int = _count("Of the writes, those from shared memory.")
