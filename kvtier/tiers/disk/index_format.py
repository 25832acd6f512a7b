"""How the index of a directory lies on disk. Bytes in, values out; nothing read is trusted.

::

    snapshot   header  magic KVTI, version, log number, rows, bytes of kinds, checksum of the body,
                       checksum of the header; filled up to 4096 bytes
               body    kinds (msgpack), filled up to a multiple of 4096, then the rows

    log        batch*
    batch      header  magic KVTB, bytes of kinds, added, removed, used, wall clock in ms,
                       checksum of all else
               body    kinds (msgpack), added rows, removed keys and generations, used keys

All numbers are little-endian, all checksums xxh3_64. The number of the log goes into the checksum
of its batches, so that what another log has left behind is never taken for this one's.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import numpy as np
import xxhash

from kvtier.constants import (
    ALIGN_BYTES,
    DIGEST_BYTES,
    JOURNAL_BATCH_BYTES_MAX,
    JOURNAL_BATCH_CHANGES_MAX,
    JOURNAL_KINDS_BYTES_MAX,
    JOURNAL_ROWS_MAX,
    SHARD_BYTES_MAX,
)
from kvtier.tiers.disk.rows import ROW_BYTES, ROW_DTYPE, Array, Kind, Row, Rows
from kvtier.types import ChunkKey, ShardId

INDEX_FORMAT_VERSION: Final = 1

_SNAPSHOT: Final = struct.Struct("<4sIQQQQ")
_SUM: Final = struct.Struct("<Q")
_BATCH: Final = struct.Struct("<4sIIIIQ")
_REMOVED: Final[np.dtype[np.void]] = np.dtype([("key", f"V{DIGEST_BYTES}"), ("generation", "<u8")])
_USED: Final[np.dtype[np.void]] = np.dtype(f"V{DIGEST_BYTES}")


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened in a directory, to be written together.

    Takes effect in the order of the fields: rows that were added, keys and generations that were
    removed, keys that were used, at ``used_ms`` of the wall clock and in their order.
    """

    added: tuple[Row, ...] = ()
    removed: tuple[tuple[ChunkKey, int], ...] = ()
    used: tuple[ChunkKey, ...] = ()
    used_ms: int = 0

    def __len__(self) -> int:
        return len(self.added) + len(self.removed) + len(self.used)

    def parts(self) -> Iterator[Changes]:
        """Cut into changes that fit into a batch each, to be written one after the other."""
        most = JOURNAL_BATCH_CHANGES_MAX
        if len(self) <= most:
            yield self
            return
        for start in range(0, len(self.added), most):
            yield replace(self, added=self.added[start : start + most], removed=(), used=())
        for start in range(0, len(self.removed), most):
            yield replace(self, added=(), removed=self.removed[start : start + most], used=())
        for start in range(0, len(self.used), most):
            yield replace(self, added=(), removed=(), used=self.used[start : start + most])


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes as they were read: views of the log's bytes."""

    added: Rows
    removed: Array
    used: Array
    used_ms: int

    def __len__(self) -> int:
        return len(self.added) + len(self.removed) + len(self.used)

    @property
    def keys(self) -> Array:
        """The keys that it names, in order: added, removed, used."""
        return np.concatenate([self.added.array["key"], self.removed["key"], self.used])


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What a snapshot's first page says."""

    log_number: int
    row_count: int
    kinds_bytes: int
    body_sum: int

    @property
    def rows_offset(self) -> int:
        """Where the rows start, from the start of the file."""
        return ALIGN_BYTES + padded(self.kinds_bytes)

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return padded(self.rows_offset + self.row_count * ROW_BYTES)


def padded(nbytes: int) -> int:
    """Return the next multiple of 4096."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def buffer(nbytes: int) -> memoryview:
    """Return zeroed memory that direct I/O accepts: at least ``nbytes``, and one page."""
    return memoryview(mmap.mmap(-1, max(padded(nbytes), ALIGN_BYTES)))


def encode_snapshot(rows: Rows, log_number: int) -> memoryview | None:
    """Return a snapshot's file in aligned memory; None where the rows are more than it holds."""
    kinds = _pack_kinds(rows.kinds)
    if len(rows) > JOURNAL_ROWS_MAX or len(kinds) > JOURNAL_KINDS_BYTES_MAX:
        return None
    header = SnapshotHeader(log_number, len(rows), len(kinds), 0)
    data = buffer(header.nbytes)
    data[ALIGN_BYTES : ALIGN_BYTES + len(kinds)] = kinds
    end = header.rows_offset + rows.array.nbytes
    np.frombuffer(data[header.rows_offset : end], ROW_DTYPE)[:] = rows.array
    _SNAPSHOT.pack_into(
        data,
        0,
        b"KVTI",
        INDEX_FORMAT_VERSION,
        log_number,
        len(rows),
        len(kinds),
        xxhash.xxh3_64_intdigest(data[ALIGN_BYTES:]),
    )
    _SUM.pack_into(data, _SNAPSHOT.size, xxhash.xxh3_64_intdigest(data[: _SNAPSHOT.size]))
    return data


def decode_snapshot_header(page: memoryview, file_bytes: int) -> SnapshotHeader | None:
    """Return what the first page says; None where it is not one of a file of this length."""
    magic, version, log_number, row_count, kinds_bytes, body_sum = _SNAPSHOT.unpack_from(page)
    (header_sum,) = _SUM.unpack_from(page, _SNAPSHOT.size)
    header = SnapshotHeader(log_number, row_count, kinds_bytes, body_sum)
    sound = (
        magic == b"KVTI"
        and version == INDEX_FORMAT_VERSION
        and header_sum == xxhash.xxh3_64_intdigest(page[: _SNAPSHOT.size])
        and row_count <= JOURNAL_ROWS_MAX
        and kinds_bytes <= JOURNAL_KINDS_BYTES_MAX
        and header.nbytes == file_bytes
    )
    return header if sound else None


def decode_snapshot(header: SnapshotHeader, data: memoryview) -> Rows | None:
    """Return the rows of a whole file, views of ``data``; None where they cannot be trusted."""
    if xxhash.xxh3_64_intdigest(data[ALIGN_BYTES:]) != header.body_sum:
        return None
    kinds = _unpack_kinds(data[ALIGN_BYTES : ALIGN_BYTES + header.kinds_bytes])
    array = np.frombuffer(data, ROW_DTYPE, header.row_count, header.rows_offset)
    return _rows(array, kinds)


def encode_batch(changes: Changes, log_number: int) -> memoryview:
    """Return changes as one batch of a log. They take at most ``JOURNAL_BATCH_BYTES_MAX``."""
    added = Rows.of(changes.added)
    kinds = _pack_kinds(added.kinds)
    body = b"".join(
        (
            kinds,
            added.array.tobytes(),
            np.array(list(changes.removed), _REMOVED).tobytes(),
            *changes.used,
        )
    )
    counts = len(added), len(changes.removed), len(changes.used)
    data = _BATCH.pack(b"KVTB", len(kinds), *counts, changes.used_ms)
    data = data + _SUM.pack(_batch_sum(data, body, log_number)) + body
    assert len(data) <= JOURNAL_BATCH_BYTES_MAX, "too many changes were collected"
    return memoryview(data)


def decode_batches(data: memoryview, log_number: int) -> Iterator[tuple[Batch, int]]:
    """Yield each batch of a log and where it ends, up to the first that is not whole."""
    start = 0
    while found := _decode_batch(data[start:], log_number):
        batch, nbytes = found
        start += nbytes
        yield batch, start


def _decode_batch(data: memoryview, log_number: int) -> tuple[Batch, int] | None:
    prefix = _BATCH.size + _SUM.size
    if len(data) < prefix:
        return None
    magic, kinds_bytes, added, removed, used, used_ms = _BATCH.unpack_from(data)
    sizes = (kinds_bytes, added * ROW_BYTES, removed * _REMOVED.itemsize, used * DIGEST_BYTES)
    nbytes = prefix + sum(sizes)
    if magic != b"KVTB" or nbytes > min(len(data), JOURNAL_BATCH_BYTES_MAX):
        return None
    (batch_sum,) = _SUM.unpack_from(data, _BATCH.size)
    if batch_sum != _batch_sum(data[: _BATCH.size], data[prefix:nbytes], log_number):
        return None
    starts = [prefix + sum(sizes[:i]) for i in range(len(sizes))]
    kinds = _unpack_kinds(data[prefix : starts[1]])
    rows = _rows(np.frombuffer(data, ROW_DTYPE, added, starts[1]), kinds)
    if rows is None:
        return None
    removed_rows = np.frombuffer(data, _REMOVED, removed, starts[2])
    return Batch(rows, removed_rows, np.frombuffer(data, _USED, used, starts[3]), used_ms), nbytes


def _batch_sum(header: bytes | memoryview, body: bytes | memoryview, log_number: int) -> int:
    state = xxhash.xxh3_64(header, seed=log_number)
    state.update(body)
    return state.intdigest()


def _rows(array: Array, kinds: list[Kind] | None) -> Rows | None:
    """Return rows whose kinds are there and whose sizes are their kinds'."""
    if kinds is None:
        return None
    if len(array):
        if int(array["kind"].max()) >= len(kinds):
            return None
        sizes = np.array([kind.nbytes for kind in kinds], np.uint64)
        if (sizes[array["kind"]] != array["nbytes"]).any():
            return None
    return Rows(array, kinds)


def _pack_kinds(kinds: list[Kind]) -> bytes:
    packed: bytes = msgpack.packb(
        [
            (kind.namespace, kind.codec, [(*shard, nbytes) for shard, nbytes in kind.shards])
            for kind in kinds
        ]
    )
    return packed


def _unpack_kinds(data: memoryview) -> list[Kind] | None:
    try:
        items = msgpack.unpackb(data)
        return [_kind(*item) for item in items]
    except (ValueError, TypeError, msgpack.UnpackException):
        return None


def _kind(namespace: Any, codec: Any, shards: Any) -> Kind:
    """Build a kind from what was read. Raises ``TypeError`` or ``ValueError``."""
    if not isinstance(namespace, bytes) or not isinstance(codec, str):
        raise TypeError("a kind is a namespace, a codec and shards")
    found: list[tuple[ShardId, int]] = []
    for *shard, nbytes in shards:
        numbers = [*shard, nbytes]
        if any(type(number) is not int for number in numbers):
            raise TypeError("a shard is numbers")
        if min(numbers) < 0 or max(shard) > 0xFFFF or not 0 < nbytes <= SHARD_BYTES_MAX:
            raise ValueError("no such shard")
        found.append((ShardId(*shard), nbytes))
    return Kind(namespace, codec, tuple(found))
