"""Finding out from files alone which chunks a directory holds. Blocking, without the lock.

The slow way, for what no index tells of: a directory whose index is lost, and files that were
written while the index was not.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.constants import ALIGN_BYTES, HEADER_BYTES_MAX, QUARANTINE_FILES_MAX
from kvtier.errors import FormatError, IdentityError, ShardError
from kvtier.keys import shard_key
from kvtier.shard_format import ShardHeader, parse_header, shard_geometry
from kvtier.stored_shard import first_bytes, parse_stored
from kvtier.tiers.disk.files import FileInfo, Files
from kvtier.tiers.disk.rows import Kind, Row
from kvtier.types import ChunkKey, ShardId

_NAME = re.compile(r"([0-9a-f]{76})-([0-9a-f]{16})\.kvs")


@dataclass(frozen=True, slots=True)
class Scanned:
    """What files turned out to be: whole chunks, files that are damaged, files of no use."""

    rows: tuple[Row, ...]
    corrupt: tuple[FileInfo, ...]
    useless: tuple[FileInfo, ...]


class FileHeader(NamedTuple):
    """What a file says of itself: its shard, and how long the file is."""

    shard: ShardHeader
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Shard:
    header: ShardHeader
    info: FileInfo
    generation: int


def shard_path(root: str, chunk: ChunkKey, shard: ShardId, generation: int) -> str:
    """Return where a shard lies below a tier's directory."""
    name = shard_key(chunk, shard).hex()
    return os.path.join(root, "shards", name[:2], f"{name}-{generation:016x}.kvs")


def parse_name(path: str) -> tuple[bytes, int] | None:
    """Return the shard key and generation that a file's name says; None for another name."""
    match = _NAME.fullmatch(os.path.basename(path))
    return (bytes.fromhex(match[1]), int(match[2], 16)) if match else None


def file_header(data: memoryview) -> FileHeader:
    """Read the header that a file begins with, encoded or not. Raises ``FormatError``."""
    if first_bytes(data)[1]:
        stored = parse_stored(data)
        return FileHeader(stored.header, stored.stored_bytes)
    header = parse_header(data)
    return FileHeader(header, shard_geometry(header.section_bytes).shard_bytes)


def check_file(header: FileHeader, info: FileInfo) -> int:
    """Return a file's generation. Raises ``ShardError`` unless name and length fit its header."""
    named = parse_name(info.path)
    if named is None or named[0] != shard_key(header.shard.chunk, header.shard.shard):
        raise IdentityError(f"{info.path} holds another shard than its name says")
    if header.nbytes != info.nbytes:
        raise FormatError(f"{info.path} has {info.nbytes} bytes, not what its header says")
    return named[1]


def scan(files: Files, infos: Iterable[FileInfo]) -> Scanned:
    """Read the headers of shard files; all files of a chunk are among them.

    Raises ``OSError`` when so many files cannot be read that the disk must be ill.
    """
    latest: dict[bytes, _Shard] = {}
    corrupt: list[FileInfo] = []
    useless: list[FileInfo] = []
    unreadable = 0
    buffer = memoryview(mmap.mmap(-1, HEADER_BYTES_MAX))
    for info in sorted(infos, key=lambda each: each.path):
        try:
            found = _read_header(files, info, buffer)
            header = found.shard
            shard = _Shard(header, info, check_file(found, info))
            place = shard_path("/", header.chunk, header.shard, shard.generation)
            if not info.path.endswith(place):
                useless.append(info)  # A copy of a folder: nobody would find it here.
                continue
        except FileNotFoundError:
            continue
        except (ShardError, OSError) as error:
            corrupt.append(info)
            unreadable += isinstance(error, OSError)
            if unreadable > QUARANTINE_FILES_MAX:
                raise  # The disk is ill, not so many files: they wait until it is well.
            continue
        key = shard_key(header.chunk, header.shard)
        if key in latest:  # Sorted by name, so this one is the later generation.
            useless.append(latest[key].info)
        latest[key] = shard
    chunks: dict[ChunkKey, list[_Shard]] = {}
    for shard in latest.values():
        chunks.setdefault(shard.header.chunk, []).append(shard)
    rows: list[Row] = []
    for shards in chunks.values():
        row = _row(shards)
        if row is None:
            useless += [shard.info for shard in shards]
        else:
            rows.append(row)
    # Oldest first, so that the order of leaving survives; parents, which were written first, too.
    rows.sort(key=lambda row: (row.used_ms, row.position))
    return Scanned(tuple(rows), tuple(corrupt), tuple(useless))


def _read_header(files: Files, info: FileInfo, buffer: memoryview) -> FileHeader:
    page = buffer[:ALIGN_BYTES]
    if files.read(info.path, 0, page) != len(page):
        raise FormatError(f"{info.path} has {info.nbytes} bytes, less than a header")
    page = buffer[: first_bytes(page)[0]]
    if len(page) > ALIGN_BYTES and files.read(info.path, 0, page) != len(page):
        raise FormatError(f"{info.path} has {info.nbytes} bytes, less than its header")
    return file_header(page)


def _row(shards: Sequence[_Shard]) -> Row | None:
    """Make one row of a chunk's files, which were numbered in a row when they were written.

    None where one between them is missing or they tell different things of their chunk.
    """
    in_order = sorted(shards, key=lambda shard: shard.generation)
    first = in_order[0]
    header = first.header
    told = {
        (s.header.parent, s.header.position, s.header.namespace, s.header.codec) for s in shards
    }
    numbers = [shard.generation - first.generation for shard in in_order]
    if len(told) > 1 or numbers != list(range(len(in_order))):
        return None
    sizes = tuple((shard.header.shard, shard.info.nbytes) for shard in in_order)
    return Row(
        header.chunk,
        header.parent,
        header.position,
        Kind(header.namespace, header.codec, sizes),
        first.generation,
        int(first.info.modified_s * 1000),
    )
