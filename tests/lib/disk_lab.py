"""A disk tier driven step by step in one thread: what the cache does with it, without the cache.

Chunks are named; every byte of a chunk follows from its name, so that a stale, swapped or half
read chunk is recognised.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvtier.cache.below.encoder import ChunkEncoder
from kvtier.config import Durability
from kvtier.errors import KVTierError, ShardError
from kvtier.policies.lru import LRU
from kvtier.shard_format import ShardDescription, ShardGeometry, seal, shard_geometry
from kvtier.testing.clock import FakeClock
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.arrival import Expected
from kvtier.tiers.disk.files import FileInfo, FileSystem, LocalFiles
from kvtier.tiers.disk.shard_files import ShardFiles
from kvtier.tiers.disk.tier import DiskRecord, DiskTier, PolicyFactory
from kvtier.tiers.disk.volume import Volume, written
from kvtier.types import ChunkKey, Entry, Features, ShardId, ShardLayout

NAMESPACE = b"n" * 32
CODEC = "raw"
SECTION_BYTES = 512
FEATURES = Features()


def shard_layout(shard: ShardId) -> ShardLayout:
    """Two layers, or one more for each further group; a section is one layer of 512 bytes."""
    return ShardLayout(
        layers=2 + shard.group,
        kv_heads=1,
        k_dim=4,
        v_dim=4,
        dtype="float32",
        tokens=16,
        section_layers=1,
    )


def geometry_of(shard: ShardId) -> ShardGeometry:
    return shard_geometry([SECTION_BYTES] * shard_layout(shard).sections)


def aligned(nbytes: int) -> memoryview:
    """Return zeroed memory that direct I/O accepts."""
    return memoryview(mmap.mmap(-1, nbytes))


def section_of(chunk: ChunkKey, shard: ShardId, section: int) -> bytes:
    text = chunk + bytes(shard) + bytes([section])
    return hashlib.shake_128(text).digest(SECTION_BYTES)


def fill_slot(slot: memoryview, chunk: ChunkKey, shard: ShardId) -> None:
    """Pack what a codec would have packed."""
    for section, offset in enumerate(geometry_of(shard).section_offsets):
        slot[offset : offset + SECTION_BYTES] = section_of(chunk, shard, section)


def describe(entry: Entry, shard: ShardId) -> ShardDescription:
    return ShardDescription(
        chunk=entry.key,
        shard=shard,
        parent=entry.parent,
        position=entry.position,
        namespace=NAMESPACE,
        codec=CODEC,
        codec_params={},
        layout=shard_layout(shard),
        token_count=16,
        has_sinks=False,
        section_bytes=geometry_of(shard).section_bytes,
    )


def expect(chunk: ChunkKey, shard: ShardId) -> Expected:
    return Expected(
        chunk=chunk,
        shard=shard,
        namespace=NAMESPACE,
        codec=CODEC,
        layout=shard_layout(shard),
        geometry=geometry_of(shard),
    )


def files_below(root: str | Path, *folders: str) -> list[Path]:
    """Return the tier's files: all, or those in the named folders."""
    where = folders or ("incoming", "shards", "quarantine")
    return sorted(p for name in where for p in Path(root, name).rglob("*") if p.is_file())


def bytes_on_disk(root: str | Path, *folders: str) -> int:
    """Return what the tier's files take, or those in the named folders, whatever the books say."""
    total = 0
    for folder in folders or ("incoming", "shards", "quarantine"):
        for directory, _, names in os.walk(Path(root, folder)):
            total += sum(Path(directory, name).stat().st_size for name in names)
    return total


class BoundedFiles(LocalFiles):
    """The local file system, measured after every file that is made."""

    def __init__(self, root: str | Path, capacity_bytes: int) -> None:
        self.bytes_max = 0
        self._root = root
        self._capacity_bytes = capacity_bytes

    def create(self, path: str, data: memoryview) -> None:
        super().create(path, data)
        self.bytes_max = max(self.bytes_max, bytes_on_disk(self._root))
        assert self.bytes_max <= self._capacity_bytes, "more on disk than the bound"

    def sync_file(self, path: str) -> None:
        """Cost nothing: whether bytes are safe cannot be seen here anyway."""
        assert Path(path).is_file()

    def sync_directory(self, path: str) -> None:
        assert Path(path).is_dir()


class DiskLab:
    """One directory and the tier over it. ``restart`` forgets everything but the directory."""

    def __init__(
        self,
        root: str | Path,
        *,
        chunks: int,
        files: FileSystem | None = None,
        shards: int = 1,
        durability: Durability = Durability.NONE,
        policy: PolicyFactory = LRU,
        encoder: ChunkEncoder | None = None,
    ) -> None:
        self.root = str(root)
        self._encoder = encoder
        self.shards = tuple(ShardId(group, 0, 0) for group in range(shards))
        self.sizes = {shard: geometry_of(shard).shard_bytes for shard in self.shards}
        self.chunk_bytes = sum(self.sizes.values())
        self.capacity_bytes = chunks * self.chunk_bytes
        self.files = files or BoundedFiles(root, self.capacity_bytes)
        self.clock = FakeClock()
        self.corrupt = 0
        self.evicted: list[ChunkKey] = []
        self.names: set[object] = set()
        self.unswept: list[str] = []
        self._durability = durability
        self._policy = policy
        self._build()

    def _build(self) -> None:
        self.shard_files = ShardFiles(self.root, self._durability, self.files)
        self.volume = Volume(0, self.shard_files, self.capacity_bytes, self.clock)
        self.tier = DiskTier([self.volume], self._policy, self.clock, self.evicted.append)

    def open(self) -> bool:
        """Open as the cache does, and look for what the index did not know."""
        try:
            found = self.shard_files.open()
        except (OSError, KVTierError) as error:
            self.volume.open_failed(error)
            return False
        self.corrupt += len(found.scanned.corrupt) if found.scanned else 0
        self.tier.adopt(0, found, self.tier.cold_table(0, found))
        self.unswept = list(found.unswept)
        self.sweep()
        while self.tier.trim() and self.do_chores():
            pass
        return True

    def sweep(self) -> None:
        """Look for what the index did not know, as far as the disk allows."""
        while self.unswept and self.tier.opened:
            try:
                scanned = self.shard_files.sweep(self.unswept[-1], self._unknown)
            except OSError as error:
                self.volume.write_failed(error)
                return
            self.unswept.pop()
            self.corrupt += len(scanned.corrupt)
            self.tier.take_in(0, scanned)
        self.volume.swept = not self.unswept

    def _unknown(self, files: Sequence[FileInfo]) -> list[FileInfo]:
        return self.tier.unknown(0, files)

    def restart(self, *, capacity_chunks: int | None = None) -> bool:
        """Come back as another process would, after an end without any goodbye."""
        self.shard_files.close()
        if capacity_chunks is not None:
            self.capacity_bytes = capacity_chunks * self.chunk_bytes
        self._build()
        return self.open()

    def lose_index(self) -> None:
        """Have the next open find out from the files alone what is there."""
        shutil.rmtree(Path(self.root, "index"))

    def close(self) -> None:
        self.shard_files.close()

    def entry(self, name: object, parent: object | None = None) -> Entry:
        """Return a chunk's entry, one deeper than its parent if that is on disk."""
        if parent is None:
            return Entry(chunk_key(name), None, self.chunk_bytes, 0)
        above = self.tier.ready(chunk_key(parent))
        position = above.entry.position + 1 if above is not None else 1
        return Entry(chunk_key(name), chunk_key(parent), self.chunk_bytes, position)

    def write(self, name: object, parent: object | None = None) -> bool:
        """Write a chunk. False: refused or failed, and the tier knows why."""
        self.sweep()
        self.names.add(name)
        entry = self.entry(name, parent)
        sizes = {shard: len(data) for shard, data in self._stored(entry).items()}
        entry = replace(entry, nbytes=sum(sizes.values()))
        target = self.tier.reserve(entry, NAMESPACE, CODEC, sizes)
        if target is None:
            return False
        chores = self.volume.take_chores()
        try:
            self.volume.do(chores)
            self.write_files(target)
            self.shard_files.note(written(self.tier.row(target)))
        except (OSError, KVTierError) as error:
            self.tier.abort(target)
            self.volume.return_chores(chores)
            self.volume.write_failed(error)
            return False
        self.volume.finish_chores(chores)
        self.tier.commit(target)
        return True

    def write_files(self, target: DiskRecord) -> None:
        """Write the shards of a reserved chunk."""
        stored = self._stored(target.entry)
        for shard, place in target.places.items():
            self.shard_files.write(place.path, stored[shard])

    def _stored(self, entry: Entry) -> dict[ShardId, memoryview]:
        """A chunk's shards, sealed, and encoded where the lab does that."""
        slots = {shard: aligned(geometry_of(shard).shard_bytes) for shard in self.shards}
        for shard, slot in slots.items():
            fill_slot(slot, entry.key, shard)
            seal(slot, describe(entry, shard))
        if self._encoder is None:
            return slots
        encoded = self._encoder.encode(slots, {shard: describe(entry, shard) for shard in slots})
        stored = {shard: aligned(nbytes) for shard, nbytes in encoded.sizes.items()}
        for shard, data in stored.items():
            data[:] = encoded.shards[shard]
        self._encoder.give_back(encoded)
        return stored

    def do_chores(self) -> bool:
        """Do what is due between writes."""
        self.sweep()
        chores = self.volume.take_chores()
        try:
            self.volume.do(chores)
        except OSError as error:
            self.volume.return_chores(chores)
            self.volume.write_failed(error)
            return False
        self.volume.finish_chores(chores)
        return True

    def read(self, name: object, before: Callable[[], None] = lambda: None) -> bool:
        """Read a chunk and require that all of its bytes are right. False: a miss.

        ``before`` is called while the chunk is pinned and not read yet.
        """
        source = self.tier.ready(chunk_key(name))
        if source is None:
            return False
        lease = self.tier.index.lease([source])
        before()
        try:
            return self._read_shards(source)
        finally:
            lease.release()

    def _read_shards(self, source: DiskRecord) -> bool:
        for shard, place in source.places.items():
            slot = aligned(geometry_of(shard).shard_bytes)
            expected = replace(expect(source.entry.key, shard), stored_bytes=place.nbytes)
            try:
                self.shard_files.read(place.path, slot, expected, lambda _: None)
            except ShardError:
                self.corrupt += 1
                self.volume.read_succeeded()
                self.tier.condemn(source, shard)
                return False
            except OSError as error:
                if isinstance(error, FileNotFoundError) and self.shard_files.attached():
                    self.tier.forget(source)
                else:
                    self.volume.read_failed(error)
                return False
            for section, offset in enumerate(geometry_of(shard).section_offsets):
                found = bytes(slot[offset : offset + SECTION_BYTES])
                assert found == section_of(source.entry.key, shard, section), "wrong bytes served"
        self.volume.read_succeeded()
        return True

    def touch(self, *names: object) -> None:
        self.tier.touch([chunk_key(name) for name in names], FEATURES)

    def holds(self, *names: object) -> list[bool]:
        return [self.tier.holds(chunk_key(name)) for name in names]

    def path_of(self, name: object, group: int = 0) -> Path:
        return Path(self._record(name).places[ShardId(group, 0, 0)].path)

    def paths_of(self, name: object) -> list[str]:
        return [place.path for place in self._record(name).places.values()]

    def _record(self, name: object) -> DiskRecord:
        key = chunk_key(name)
        record = self.tier.ready(key) or self.tier.index.get(key)
        assert record is not None, f"{name} is not on disk"
        return record

    def known_paths(self) -> set[Path]:
        """Return the files that the books name, without using any chunk."""
        every = files_below(self.root, "shards")
        infos = [FileInfo(str(path), path.stat().st_size, 0.0) for path in every]
        unknown = {Path(info.path) for info in self.tier.unknown(0, infos)}
        return {*every} - unknown

    def check(self) -> None:
        """Require that books and directory agree, once nothing is left to be done."""
        assert self.do_chores(), "the chores could not be done"
        for name in self.names:
            self.read(name)  # What was lost with the power is found out now.
        assert self.do_chores(), "the chores could not be done"
        self.tier.check_integrity()
        away = self.volume.quarantine_bytes  # Counted as if nothing there had been cut short.
        assert away >= bytes_on_disk(self.root, "quarantine")
        there = bytes_on_disk(self.root, "incoming", "shards")
        assert self.tier.used_bytes - away == there, "the books and the disk differ"
        assert self.tier.used_bytes <= self.capacity_bytes
        known = self.known_paths()
        assert set(files_below(self.root, "shards")) == known, "an orphan"
        assert not files_below(self.root, "incoming")
        assert self.tier.quarantined_count == len(files_below(self.root, "quarantine"))


def write_chain(lab: DiskLab, name: str, length: int) -> list[str]:
    names = [f"{name}{depth}" for depth in range(length)]
    for depth, each in enumerate(names):
        assert lab.write(each, names[depth - 1] if depth else None)
    return names


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-4096] ^= 1
    path.write_bytes(data)
