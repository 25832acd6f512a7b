"""Shards as files: names, whole writes, verified reads, quarantine. Blocking, without the lock.

::

    PATH/lock                          held by the one process that uses the directory
    PATH/incoming/NAME                 being written; removed at the next open
    PATH/shards/ab/KEY-GENERATION.kvs  whole shards; KEY is the shard key in hex, ab its start
    PATH/quarantine/NAME               what failed verification, a bounded number of files

A file gets its final name only when all of its bytes were accepted, and a name is never used
twice (the generation), so removing an old file can never hit a new one. After a power failure a
file may still be torn: its checksums tell.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvtier.config import Durability
from kvtier.constants import (
    ALIGN_BYTES,
    HEADER_BYTES_MAX,
    QUARANTINE_FILES_MAX,
    READ_STEP_BYTES,
)
from kvtier.errors import FormatError, IdentityError, ShardError, TierUnavailableError
from kvtier.keys import shard_key
from kvtier.shard_format import (
    ShardDescription,
    ShardGeometry,
    ShardHeader,
    check_identity,
    header_length,
    parse_header,
    seal,
    shard_geometry,
    verify_section,
)
from kvtier.tiers.disk.files import FileInfo, Files, Syncs
from kvtier.types import ChunkKey, ShardId, ShardLayout

_SUFFIX = ".kvs"


class DirectoryLostError(FileNotFoundError):
    """The directory is not the one that was opened (any more): unmounted, moved or removed."""

    def __init__(self, root: str) -> None:
        super().__init__(errno.ENOENT, "not the directory that was opened", root)


class FileSystem(Files, Syncs, Protocol):
    """All that the disk tier asks of a file system."""


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A shard that was on disk at open: its sound header and where it lies."""

    header: ShardHeader
    path: str
    nbytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """What an open found. ``quarantined`` lists files from the oldest to the newest."""

    shards: tuple[FoundShard, ...]
    quarantined: tuple[FileInfo, ...]
    corrupt_count: int


@dataclass(frozen=True, slots=True)
class Expected:
    """What a shard must be for its reader."""

    chunk: ChunkKey
    shard: ShardId
    namespace: bytes
    codec: str
    layout: ShardLayout
    geometry: ShardGeometry


class ShardFiles:
    """The directory of one disk tier. Reads run in any thread; all else in one thread at a time."""

    def __init__(self, root: str, durability: Durability, files: FileSystem) -> None:
        self.root = os.path.abspath(root)
        self._durability = durability
        self._files = files
        self._lock_descriptor = -1
        # Unique over restarts as long as the clock does not run backwards by whole restarts; a
        # clash would only make a write fail, since files are created exclusively.
        self._generations = itertools.count(time.time_ns())
        self._unsynced: list[str] = []
        self._unsynced_lock = threading.Lock()
        # Directories whose own names are safe, and what failed writes could not clean up.
        self._safe_directories: set[str] = set()
        self._leftovers: list[str] = []

    def open(self) -> Found:
        """Take the directory, drop what was being written, read every header.

        Raises ``TierUnavailableError`` when another process holds it, ``OSError`` when it cannot
        be used.
        """
        os.makedirs(self.root, exist_ok=True)
        self.lock()
        for leftover in self._files.list(self._path("incoming")):
            self._files.remove(leftover.path)
        sound, corrupt = self._inspect_all()
        for path in corrupt:
            self.quarantine(path)
        if self._durability is not Durability.NONE:
            self._safe_directories.clear()
            self._files.sync_directory(self.root)
        quarantined = sorted(self._files.list(self._path("quarantine")), key=lambda f: f.modified_s)
        return Found(tuple(sound), tuple(quarantined), len(corrupt))

    def lock(self) -> None:
        """Make this process the one that uses the directory, until ``close``.

        Raises ``TierUnavailableError`` when another one does, ``OSError`` when it cannot be used.
        """
        if self.attached():
            return
        self.close()
        descriptor = os.open(self._path("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 32).decode("ascii", "replace") or "unknown"
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise TierUnavailableError(f"{self.root} is in use by process {holder}") from error
        # The number is for others to read; a disk without room for it can still be read from.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._lock_descriptor = descriptor

    def attached(self) -> bool:
        """Tell whether the directory is still the one that was opened."""
        if self._lock_descriptor < 0:
            return False
        try:
            there = os.stat(self._path("lock"))
        except OSError:
            return False
        held = os.fstat(self._lock_descriptor)
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def new_path(self, chunk: ChunkKey, shard: ShardId) -> str:
        """Return the final path of a shard that is about to be written, never used before."""
        name = shard_key(chunk, shard).hex()
        return self._path("shards", name[:2], f"{name}-{next(self._generations):016x}{_SUFFIX}")

    def write(self, path: str, slot: memoryview, description: ShardDescription) -> None:
        """Seal a slot and write it whole under ``path``. The caller has the slot pinned.

        Raises ``OSError``, ``DirectoryLostError`` above all; then nothing lies under ``path``, or
        it goes before the next write.
        """
        if not self.attached():
            raise DirectoryLostError(self.root)
        self._clear_leftovers()
        seal(slot, description)
        incoming = self._path("incoming", os.path.basename(path))
        try:
            self._files.create(incoming, slot)
            if self._durability is Durability.EACH:
                self._files.sync_file(incoming)
            self._files.replace(incoming, path)
            if self._durability is Durability.EACH:
                self._sync_names([path])
        except OSError:
            self._leftovers += [incoming, path]
            with contextlib.suppress(OSError):
                self._clear_leftovers()
            self._raise_if_lost()
            raise
        if self._durability is Durability.BATCH:
            with self._unsynced_lock:
                self._unsynced.append(path)

    def commit_group(self) -> None:
        """Make durable what was written since the last call (durability ``batch``)."""
        with self._unsynced_lock:
            group, self._unsynced = self._unsynced, []
        written = [path for path in group if os.path.exists(path)]
        try:
            for path in written:
                self._files.sync_file(path)
            self._sync_names(written)
        except OSError:
            with self._unsynced_lock:
                self._unsynced = written + self._unsynced
            self._raise_if_lost()
            raise

    def read(
        self, path: str, slot: memoryview, expected: Expected, progress: Callable[[int], None]
    ) -> None:
        """Read a shard into its slot, verifying as it comes.

        ``progress(n)`` is called in this thread each time the first ``n`` sections are verified.
        The caller owns the slot until this returns. Raises ``OSError``, ``DirectoryLostError``
        above all, or ``ShardError`` when the bytes are not the expected shard.
        """
        header: ShardHeader | None = None
        for start, end, sections in _steps(expected.geometry):
            try:
                count = self._files.read(path, start, slot[start:end])
            except OSError:
                self._raise_if_lost()
                raise
            if count != end - start:
                raise FormatError(f"{path} ends before byte {end}")
            if header is None:
                header = parse_header(slot[: expected.geometry.header_bytes])
                _check(header, expected)
            for section in sections:
                verify_section(slot, header, section)
            progress(sections.stop)

    def remove(self, path: str) -> None:
        """Remove a file for good."""
        self._files.remove(path)

    def quarantine(self, path: str) -> None:
        """Move a file that failed verification out of the way, for somebody to look at."""
        try:
            self._files.replace(path, self._path("quarantine", os.path.basename(path)))
        except FileNotFoundError:
            return

    def quarantine_path(self, path: str) -> str:
        """Return where ``quarantine`` puts a file."""
        return self._path("quarantine", os.path.basename(path))

    def close(self) -> None:
        """Let another process have the directory."""
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def _raise_if_lost(self) -> None:
        """Tell a lost directory from a fault of one file; here, where blocking is allowed."""
        if not self.attached():
            raise DirectoryLostError(self.root)

    def _path(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    def _clear_leftovers(self) -> None:
        while self._leftovers:
            self._files.remove(self._leftovers[-1])
            self._leftovers.pop()

    def _sync_names(self, paths: Iterable[str]) -> None:
        """Make files' names safe, and those of the directories that were made for them."""
        directories = sorted({os.path.dirname(path) for path in paths})
        for directory in directories:
            self._files.sync_directory(directory)
        if not self._safe_directories.issuperset(directories):
            self._files.sync_directory(self._path("shards"))
            self._safe_directories.update(directories)

    def _inspect_all(self) -> tuple[list[FoundShard], list[str]]:
        """Return what is sound and the paths of what is not; remove what has a later twin."""
        sound: dict[bytes, FoundShard] = {}
        corrupt: list[str] = []
        unreadable = 0
        buffer = memoryview(mmap.mmap(-1, HEADER_BYTES_MAX))
        for info in sorted(self._files.list(self._path("shards")), key=lambda f: f.path):
            try:
                found = self._inspect(info, buffer)
            except (ShardError, OSError) as error:
                corrupt.append(info.path)
                unreadable += isinstance(error, OSError)
                if unreadable > QUARANTINE_FILES_MAX:
                    raise  # The disk is ill, not so many files: they wait until it is well.
                continue
            key = shard_key(found.header.chunk, found.header.shard)
            if key in sound:  # Sorted by name, so this one is the later generation.
                self._files.remove(sound[key].path)
            sound[key] = found
        return list(sound.values()), corrupt

    def _inspect(self, info: FileInfo, buffer: memoryview) -> FoundShard:
        """Read a file's header and hold it against the file's name and length."""
        page = buffer[:ALIGN_BYTES]
        if self._files.read(info.path, 0, page) != len(page):
            raise FormatError(f"{info.path} has {info.nbytes} bytes, less than a header")
        page = buffer[: header_length(page)]
        if len(page) > ALIGN_BYTES and self._files.read(info.path, 0, page) != len(page):
            raise FormatError(f"{info.path} has {info.nbytes} bytes, less than its header")
        header = parse_header(page)
        check_file(header, info)
        return FoundShard(header, info.path, info.nbytes, info.modified_s)


def check_file(header: ShardHeader, info: FileInfo) -> None:
    """Raise ``ShardError`` unless a file's name and length are what its header says."""
    name = os.path.basename(info.path).removesuffix(_SUFFIX).partition("-")[0]
    if name != shard_key(header.chunk, header.shard).hex():
        raise IdentityError(f"{info.path} holds another shard than its name says")
    if shard_geometry(header.section_bytes).shard_bytes != info.nbytes:
        raise FormatError(f"{info.path} has {info.nbytes} bytes, not what its header says")


def _steps(geometry: ShardGeometry) -> list[tuple[int, int, range]]:
    """Cut a shard into reads: (start, end, sections), the header going with the first."""
    steps: list[tuple[int, int, range]] = []
    start, first = 0, 0
    ends = (*geometry.section_offsets[1:], geometry.shard_bytes)
    for section, end in enumerate(ends):
        if end - start >= READ_STEP_BYTES or section == len(ends) - 1:
            steps.append((start, end, range(first, section + 1)))
            start, first = end, section + 1
    return steps


def _check(header: ShardHeader, expected: Expected) -> None:
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
