"""One shard of a named chunk as a file: written, read, and what it must hold."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvtier.shard_format import seal
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk.shard_files import Found, ShardFiles
from kvtier.types import Entry, ShardId
from tests.lib.disk_lab import (
    SECTION_BYTES,
    aligned,
    describe,
    expect,
    fill_slot,
    geometry_of,
    section_of,
)

SHARD = ShardId(0, 0, 0)
NBYTES = geometry_of(SHARD).shard_bytes


def put(shards: ShardFiles, name: object, parent: object | None = None) -> Path:
    above = None if parent is None else chunk_key(parent)
    entry = Entry(chunk_key(name), above, NBYTES, 0 if parent is None else 1)
    path = shards.path(entry.key, SHARD, shards.new_generations(1))
    slot = aligned(NBYTES)
    fill_slot(slot, entry.key, SHARD)
    seal(slot, describe(entry, SHARD))
    shards.write(path, slot)
    return Path(path)


def rescan(shards: ShardFiles) -> Found:
    """Open as if the index had been lost: all headers are read."""
    shutil.rmtree(Path(shards.root, "index"), ignore_errors=True)
    return shards.open()


def paths_of(shards: ShardFiles, found: Found) -> list[Path]:
    rows = [found.rows.row(i) for i in range(len(found.rows))]
    return [Path(shards.path(row.key, SHARD, row.generation)) for row in rows]


def corrupt_of(found: Found) -> list[str]:
    assert found.scanned is not None, "an index was read instead"
    return [info.path for info in found.scanned.corrupt]


def get(shards: ShardFiles, path: Path, name: object) -> list[bytes]:
    """Read a chunk's shard; return its sections."""
    slot = aligned(NBYTES)
    seen: list[int] = []
    shards.read(str(path), slot, expect(chunk_key(name), SHARD), seen.append)
    assert seen[-1] == len(geometry_of(SHARD).section_offsets)
    return [bytes(slot[o : o + SECTION_BYTES]) for o in geometry_of(SHARD).section_offsets]


def right(name: object) -> list[bytes]:
    count = len(geometry_of(SHARD).section_offsets)
    return [section_of(chunk_key(name), SHARD, section) for section in range(count)]
