"""A disk tier over several directories, driven step by step in one thread.

Chunks are named and of different sizes; every byte follows from the name. ``DiskLab`` is the same
with one directory and more of what can happen there.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.config import Durability
from kvtier.errors import KVTierError, ShardError
from kvtier.policies.lru import LRU
from kvtier.shard_format import seal
from kvtier.testing.clock import FakeClock
from kvtier.testing.fault_files import FaultyFiles
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk.shard_files import ShardFiles
from kvtier.tiers.disk.tier import DiskRecord, DiskTier, PolicyFactory
from kvtier.tiers.disk.volume import Volume, written
from kvtier.types import ChunkKey, Entry, ShardId
from tests.lib.disk_lab import (
    CODEC,
    FEATURES,
    NAMESPACE,
    SECTION_BYTES,
    BoundedFiles,
    aligned,
    bytes_on_disk,
    describe,
    expect,
    files_below,
    fill_slot,
    geometry_of,
    section_of,
)

#: Bytes of a chunk of one shard. One of two shards takes more than twice as much.
CHUNK_BYTES = geometry_of(ShardId(0, 0, 0)).shard_bytes


def sizes_of(shards: int) -> dict[ShardId, int]:
    """Return the shards of a chunk that has so many, with their bytes."""
    every = [ShardId(group, 0, 0) for group in range(shards)]
    return {shard: geometry_of(shard).shard_bytes for shard in every}


class DiskShelves:
    """Directories ``0``, ``1``, ... below ``folder``, and the tier over them.

    Each has ``files`` of its own to let it go wrong, below which its bound is asserted after
    every file that is made. ``restart`` forgets everything but the directories.
    """

    def __init__(
        self, folder: Path, *, count: int, share_bytes: int, policy: PolicyFactory = LRU
    ) -> None:
        self.folder = folder
        self.policy = policy
        self.share_bytes = share_bytes
        self.roots = [folder / str(number) for number in range(count)]
        self.files = [FaultyFiles(BoundedFiles(root, share_bytes)) for root in self.roots]
        self.clock = FakeClock()
        self.evicted: list[ChunkKey] = []
        self.unswept: list[list[str]] = []
        self._build()

    def _build(self) -> None:
        self.shard_files = [
            ShardFiles(str(root), Durability.NONE, files)
            for root, files in zip(self.roots, self.files, strict=True)
        ]
        self.volumes = [
            Volume(number, files, self.share_bytes, self.clock)
            for number, files in enumerate(self.shard_files)
        ]
        self.tier = DiskTier(self.volumes, self.policy, self.clock, self.evicted.append)
        self.unswept = [[] for _ in self.volumes]

    def open(self, *numbers: int) -> list[bool]:
        """Open directories, by default all; tell which were opened."""
        return [self._open(number) for number in numbers or range(len(self.volumes))]

    def _open(self, number: int) -> bool:
        try:
            found = self.shard_files[number].open()
        except (OSError, KVTierError) as error:
            self.volumes[number].open_failed(error)
            return False
        self.tier.adopt(number, found, self.tier.cold_table(number, found))
        self.unswept[number] = list(found.unswept)
        self.do_chores(number)
        return True

    def restart(self, *, share_bytes: int | None = None) -> list[bool]:
        """Come back as another process would, after an end without any goodbye."""
        self.close()
        if share_bytes is not None:
            self.share_bytes = share_bytes
        self._build()
        return self.open()

    def close(self) -> None:
        for files in self.shard_files:
            files.close()

    def write(self, name: object, parent: object | None = None, *, shards: int = 1) -> bool:
        """Write a chunk. False: refused or failed, and the tier knows why."""
        for number in range(len(self.volumes)):
            self._sweep(number)
        target = self.reserve(name, parent, shards=shards)
        if target is None:
            return False
        volume = self.tier.volume_of(target)
        chores = volume.take_chores()
        try:
            volume.do(chores)
            for shard, place in target.places.items():
                slot = aligned(place.nbytes)
                fill_slot(slot, target.entry.key, shard)
                seal(slot, describe(target.entry, shard))
                volume.files.write(place.path, slot)
            volume.files.note(written(self.tier.row(target)))
        except OSError as error:
            self.tier.abort(target)
            volume.return_chores(chores)
            volume.write_failed(error)
            return False
        volume.finish_chores(chores)
        self.tier.commit(target)
        return True

    def reserve(
        self, name: object, parent: object | None = None, *, shards: int = 1
    ) -> DiskRecord | None:
        sizes = sizes_of(shards)
        above = None if parent is None else self.tier.ready(chunk_key(parent))
        position = int(parent is not None) if above is None else above.entry.position + 1
        over = None if parent is None else chunk_key(parent)
        entry = Entry(chunk_key(name), over, sum(sizes.values()), position)
        return self.tier.reserve(entry, NAMESPACE, CODEC, sizes)

    def do_chores(self, *numbers: int) -> bool:
        """Do what is due in directories, by default all that are open; True: all of it."""
        done = [self._do_chores(number) for number in numbers or range(len(self.volumes))]
        return all(done)

    def _do_chores(self, number: int) -> bool:
        volume = self.volumes[number]
        if not volume.opened:
            return True
        if not self._sweep(number):
            return False
        chores = volume.take_chores()
        try:
            volume.do(chores)
        except OSError as error:
            volume.return_chores(chores)
            volume.write_failed(error)
            return False
        volume.finish_chores(chores)
        return True

    def _sweep(self, number: int) -> bool:
        volume, parts = self.volumes[number], self.unswept[number]
        while parts and volume.opened:
            try:
                scanned = volume.files.sweep(
                    parts[-1], lambda files: self.tier.unknown(number, files)
                )
            except OSError as error:
                volume.write_failed(error)
                return False
            parts.pop()
            self.tier.take_in(number, scanned)
            volume.swept = not parts
        return True

    def read(self, name: object) -> bool:
        """Read a chunk and require that all of its bytes are right. False: a miss."""
        source = self.tier.ready(chunk_key(name))
        if source is None:
            return False
        volume = self.tier.volume_of(source)
        with self._leased(source):
            for shard, place in source.places.items():
                slot = aligned(place.nbytes)
                try:
                    volume.files.read(
                        place.path, slot, expect(source.entry.key, shard), lambda _: None
                    )
                except ShardError:
                    volume.read_succeeded()
                    self.tier.condemn(source, shard)
                    return False
                except OSError as error:
                    gone = error.errno == errno.ENOENT and volume.files.attached()
                    if gone:
                        self.tier.forget(source)
                    else:
                        volume.read_failed(error)
                    return False
                for section, offset in enumerate(geometry_of(shard).section_offsets):
                    found = bytes(slot[offset : offset + SECTION_BYTES])
                    assert found == section_of(source.entry.key, shard, section), "wrong bytes"
        volume.read_succeeded()
        return True

    @contextmanager
    def _leased(self, source: DiskRecord) -> Iterator[None]:
        lease = self.tier.index.lease([source])
        try:
            yield
        finally:
            lease.release()

    def touch(self, *names: object) -> None:
        self.tier.touch([chunk_key(name) for name in names], FEATURES)

    def holds(self, *names: object) -> list[bool]:
        return [self.tier.holds(chunk_key(name)) for name in names]

    def where(self, name: object) -> int:
        """Return the number of the directory in which a chunk lies."""
        record = self.tier.index.get(chunk_key(name))
        assert record is not None, f"{name} is not on disk, or not used yet"
        return record.places[ShardId(0, 0, 0)].volume

    def paths_of(self, name: object) -> list[Path]:
        """Return the files of a chunk, whatever the books say."""
        prefix = chunk_key(name).hex()
        every = [path for root in self.roots for path in files_below(root, "shards")]
        return [path for path in every if path.name.startswith(prefix)]

    def pull_out(self, number: int) -> None:
        """Take a directory away."""
        self.roots[number].rename(self.folder / f"away-{number}")

    def plug_in(self, number: int) -> None:
        """Bring a directory back that was taken away."""
        (self.folder / f"away-{number}").rename(self.roots[number])

    def check(self) -> None:
        """Require that books and directories agree, once nothing is left to be done."""
        assert self.do_chores(), "the chores could not be done"
        self.tier.check_integrity()
        for volume, root in zip(self.volumes, self.roots, strict=True):
            assert volume.used_bytes == bytes_on_disk(root), "the books and the disk differ"
            assert volume.used_bytes <= self.share_bytes
            assert not files_below(root, "incoming")
            assert volume.quarantined_count == len(files_below(root, "quarantine"))
        assert self.tier.used_bytes == sum(volume.used_bytes for volume in self.volumes)
        shards = [path for root in self.roots for path in files_below(root, "shards")]
        names = [path.name.partition("-")[0] for path in shards]
        assert len(set(names)) == len(names), "a shard lies in two places"
