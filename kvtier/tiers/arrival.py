"""A shard on its way into memory: what it must be, in which steps it comes, when it is verified.

The same for every medium: a step is read, the header with the first one, and each of its sections
is held against its checksum before anybody uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import IdentityError
from kvtier.shard_format import (
    ShardGeometry,
    ShardHeader,
    check_identity,
    parse_header,
    verify_section,
)
from kvtier.types import ChunkKey, ShardId, ShardLayout


@dataclass(frozen=True, slots=True)
class Expected:
    """What a shard must be for its reader.

    ``stored_bytes`` is the length that it has where it lies, which is another one than the
    geometry's where a byte codec has encoded it; None: it is not encoded.
    """

    chunk: ChunkKey
    shard: ShardId
    namespace: bytes
    codec: str
    layout: ShardLayout
    geometry: ShardGeometry
    stored_bytes: int | None = None

    @property
    def encoded(self) -> bool:
        """True where what lies there is not the sealed shard itself."""
        return self.stored_bytes not in {None, self.geometry.shard_bytes}


@dataclass(frozen=True, slots=True)
class Step:
    """Bytes ``start .. end`` of a shard, with which these sections are complete."""

    start: int
    end: int
    sections: range


def read_steps(geometry: ShardGeometry, step_bytes: int) -> list[Step]:
    """Cut a shard into reads of whole sections, the header going with the first.

    Sections go together until they have ``step_bytes``.
    """
    steps: list[Step] = []
    start, first = 0, 0
    ends = (*geometry.section_offsets[1:], geometry.shard_bytes)
    for section, end in enumerate(ends):
        if end - start >= step_bytes or section == len(ends) - 1:
            steps.append(Step(start, end, range(first, section + 1)))
            start, first = end, section + 1
    return steps


class Arrival:
    """Verifies one shard as it comes, step by step in their order; one thread at a time."""

    def __init__(self, slot: memoryview, expected: Expected) -> None:
        """``slot`` is the caller's; nobody else writes to it until the last step was taken."""
        self._slot = slot
        self._expected = expected
        self._header: ShardHeader | None = None

    def take(self, step: Step) -> None:
        """Verify a step whose bytes are in the slot. Blocks for one read of them, GIL released.

        Raises ``ShardError`` when the bytes are not the expected shard.
        """
        if self._header is None:
            header = parse_header(self._slot[: self._expected.geometry.header_bytes])
            check_expected(header, self._expected)
            self._header = header
        for section in step.sections:
            verify_section(self._slot, self._header, section)


def check_expected(header: ShardHeader, expected: Expected) -> None:
    """Raise ``IdentityError`` unless a sound header is the one that is expected."""
    check_identity(
        header,
        chunk=expected.chunk,
        shard=expected.shard,
        namespace=expected.namespace,
        layout=expected.layout,
        codec=expected.codec,
    )
    if header.section_bytes != expected.geometry.section_bytes:
        raise IdentityError("sections have other sizes than the codec makes")
