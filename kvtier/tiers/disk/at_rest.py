"""What the index at rest of a directory says, without opening the directory."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from kvtier.tiers.disk.files import FileSystem
from kvtier.tiers.disk.journal import Journal


@dataclass(frozen=True, slots=True)
class HeldKind:
    """Chunks of one namespace and codec. Times are seconds of Unix time, of their last uses."""

    namespace: bytes
    codec: str
    chunks: int
    nbytes: int
    used_first_s: float
    used_last_s: float


@dataclass(frozen=True, slots=True)
class AtRest:
    """A directory. ``indexed`` False: the index is missing or damaged, so ``held`` is empty."""

    root: str
    indexed: bool
    held: tuple[HeldKind, ...]
    quarantined_files: int
    quarantined_bytes: int

    @property
    def chunks(self) -> int:
        """Chunks in the directory."""
        return sum(each.chunks for each in self.held)

    @property
    def nbytes(self) -> int:
        """Bytes of their files."""
        return sum(each.nbytes for each in self.held)


def at_rest(root: str, files: FileSystem) -> AtRest:
    """Read the index of a directory, most bytes first; blocks, and changes nothing.

    Of a directory in use it may lack the latest changes. Raises ``OSError``.
    """
    quarantined = list(files.list(os.path.join(root, "quarantine")))
    rows = Journal(root, files).load()
    held: dict[tuple[bytes, str], HeldKind] = {}
    for number, kind in enumerate(rows.kinds if rows is not None else ()):
        assert rows is not None, "it has kinds"
        used_ms = rows.array["used_ms"][rows.array["kind"] == number]
        if len(used_ms):
            first, last = float(np.min(used_ms)) / 1000, float(np.max(used_ms)) / 1000
            count, name = len(used_ms), (kind.namespace, kind.codec)
            found = HeldKind(*name, count, count * kind.nbytes, first, last)
            # Compressed chunks are of many sizes, and so of many kinds.
            held[name] = _merged(held[name], found) if name in held else found
    largest_first = sorted(held.values(), key=lambda each: each.nbytes, reverse=True)
    nbytes = sum(file.nbytes for file in quarantined)
    return AtRest(root, rows is not None, tuple(largest_first), len(quarantined), nbytes)


def _merged(one: HeldKind, other: HeldKind) -> HeldKind:
    return HeldKind(
        one.namespace,
        one.codec,
        one.chunks + other.chunks,
        one.nbytes + other.nbytes,
        min(one.used_first_s, other.used_first_s),
        max(one.used_last_s, other.used_last_s),
    )
