"""One shard of a named chunk as a file: written, read, and what it must hold."""

from __future__ import annotations

from pathlib import Path

from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk.shard_files import ShardFiles
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
    path = shards.new_path(entry.key, SHARD)
    slot = aligned(NBYTES)
    fill_slot(slot, entry.key, SHARD)
    shards.write(path, slot, describe(entry, SHARD))
    return Path(path)


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
