"""What a disk tier knows of a chunk at rest: columns of 96 bytes, no object per chunk."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.constants import DIGEST_BYTES
from kvtier.types import ChunkKey, ShardId

#: A row as it lies in memory and on disk. A parent of zeros is none.
ROW_DTYPE: Final[np.dtype[np.void]] = np.dtype(
    [
        ("key", f"V{DIGEST_BYTES}"),
        ("parent", f"V{DIGEST_BYTES}"),
        ("position", "<u4"),
        ("kind", "<u4"),
        ("generation", "<u8"),
        ("used_ms", "<u8"),
        ("nbytes", "<u8"),
    ]
)
ROW_BYTES: Final = ROW_DTYPE.itemsize
NO_PARENT: Final = bytes(DIGEST_BYTES)
#: Called with bytes and an offset, gives the key there in a tuple; faster than any slice.
key_at: Final = struct.Struct(f"{DIGEST_BYTES}s").unpack_from
_head_at: Final = struct.Struct("<Q").unpack_from
_WORDS: Final = DIGEST_BYTES // 8

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """What chunks of one namespace and codec have in common.

    ``shards`` holds each shard and the bytes of its file, in the order of their generations.
    """

    namespace: bytes
    codec: str
    shards: tuple[tuple[ShardId, int], ...]
    #: The shards alone, for lookups.
    shard_ids: frozenset[ShardId] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shard_ids", frozenset(shard for shard, _ in self.shards))

    @property
    def nbytes(self) -> int:
        """Bytes of all files of one chunk."""
        return sum(nbytes for _, nbytes in self.shards)


class Row(NamedTuple):
    """One chunk. The i-th shard's file has generation ``generation + i``.

    ``used_ms`` is the wall clock of its last use in milliseconds.
    """

    key: ChunkKey
    parent: ChunkKey | None
    position: int
    kind: Kind
    generation: int
    used_ms: int

    @property
    def nbytes(self) -> int:
        """Bytes of all of its files."""
        return self.kind.nbytes


class Rows:
    """Rows as columns. ``array`` has ``ROW_DTYPE``, its ``kind`` counts in ``kinds``.

    Whoever made the array promises that no kind is out of range and that ``nbytes`` is the
    kind's. Nobody writes to it afterwards.
    """

    def __init__(self, array: Array, kinds: list[Kind]) -> None:
        self.array = array
        self.kinds = kinds

    def __len__(self) -> int:
        return len(self.array)

    def row(self, i: int) -> Row:
        """Return one row as an object."""
        key, parent, position, kind, generation, used_ms, _ = self.array[i].item()
        above = None if parent == NO_PARENT else ChunkKey(parent)
        return Row(ChunkKey(key), above, position, self.kinds[kind], generation, used_ms)

    @staticmethod
    def of(rows: Iterable[Row]) -> Rows:
        """Put objects into columns, in their order."""
        kinds: dict[Kind, int] = {}
        table = [
            (
                row.key,
                row.parent or NO_PARENT,
                row.position,
                kinds.setdefault(row.kind, len(kinds)),
                row.generation,
                row.used_ms,
                row.nbytes,
            )
            for row in rows
        ]
        return Rows(np.array(table, dtype=ROW_DTYPE), list(kinds))


def key_words(array: Array, column: str) -> Array:
    """Return a column of keys, ``key`` or ``parent``, as uint64 of shape (rows, 4); a view."""
    fields = ROW_DTYPE.fields
    assert fields is not None, "rows have columns"
    words = np.ascontiguousarray(array).view(np.uint64).reshape(len(array), ROW_BYTES // 8)
    start = fields[column][1] // 8
    found: Array = words[:, start : start + _WORDS]
    return found


class KeyIndex:
    """Finds rows by their key: 8 to 12 bytes a row and no object.

    Keys are digests, so their first bits put them into buckets of about one row each. Of rows with
    one key the last counts. The array stays as it is while the index is used.
    """

    #: More rows than this in one bucket are made, not met; ``find_all`` looks no further.
    _PROBES_MAX: Final = 64

    def __init__(self, array: Array) -> None:
        self._words = key_words(array, "key")
        self._bytes = np.ascontiguousarray(array).view(np.uint8).data
        heads = np.ascontiguousarray(self._words[:, 0])
        bits = max(len(array).bit_length(), 1)
        self._shift = 64 - bits
        self._rows = np.argsort(heads, kind="stable").astype(np.uint32)
        ends = np.bincount((heads >> np.uint64(self._shift)).astype(np.int64), minlength=1 << bits)
        self._starts = np.zeros((1 << bits) + 1, np.uint32)
        np.cumsum(ends, out=self._starts[1:])
        # Item access through a memoryview takes a third of numpy's time.
        self._row_view = self._rows.data
        self._start_view = self._starts.data

    def find(self, key: bytes) -> int:
        """Return the number of the row of a key, or -1."""
        bucket = _head_at(key)[0] >> self._shift
        first, place = self._start_view[bucket], self._start_view[bucket + 1]
        while place > first:
            place -= 1
            row: int = self._row_view[place]
            if key_at(self._bytes, row * ROW_BYTES)[0] == key:
                return row
        return -1

    def find_all(self, words: Array) -> Array:
        """Return the row of each key as int32, -1 where there is none.

        ``words`` are keys as ``key_words`` gives them.
        """
        found = np.full(len(words), -1, np.int32)
        buckets = (words[:, 0] >> np.uint64(self._shift)).astype(np.int64)
        first = self._starts[buckets].astype(np.int64)
        place = self._starts[buckets + 1].astype(np.int64) - 1
        asking = np.flatnonzero(place >= first)
        for _ in range(self._PROBES_MAX):
            if not len(asking):
                break
            rows = self._rows[place[asking]]
            same = (self._words[rows] == words[asking]).all(axis=1)
            found[asking[same]] = rows[same]
            asking = asking[~same]
            place[asking] -= 1
            asking = asking[place[asking] >= first[asking]]
        return found

    def repeated(self) -> list[int]:
        """Return the rows whose key a later row has too."""
        heads = self._words[self._rows, 0]
        suspects = self._rows[np.flatnonzero(heads[1:] == heads[:-1])]
        return [row for row in suspects.tolist() if self.find(self._words[row].tobytes()) != row]
