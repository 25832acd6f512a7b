"""One directory of the disk tier: its files and its index at rest. Blocking, without the lock.

::

    PATH/lock                          held by the one process that uses the directory
    PATH/incoming/NAME                 being written; removed at the next open
    PATH/shards/ab/KEY-GENERATION.kvs  whole shards; KEY is the shard key in hex, ab its start
    PATH/index/                        what lies in shards, so that a start reads no headers
    PATH/quarantine/NAME               what failed verification, a bounded number of files

A file gets its final name only when all of its bytes were accepted, and a name is never used
twice (the generation), so removing an old file can never hit a new one. After a power failure a
file may still be torn: its checksums tell. The index is a hint about names only: every read
verifies, and a sweep finds the files that it does not know.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier.config import Durability
from kvtier.constants import (
    ALIGN_BYTES,
    READ_FIRST_BYTES,
    READ_STEP_BYTES,
    SWEEP_WHOLE_CHUNKS,
)
from kvtier.errors import FormatError, TierUnavailableError
from kvtier.shard_format import ShardGeometry
from kvtier.stored_shard import stored_header_bytes
from kvtier.tiers.arrival import Arrival, Expected, Step, read_steps
from kvtier.tiers.decoding import ByteCodecs, DecodedArrival
from kvtier.tiers.disk.files import FileInfo, FileSystem
from kvtier.tiers.disk.journal import Changes, Journal
from kvtier.tiers.disk.rows import Rows
from kvtier.tiers.disk.scan import Scanned, scan, shard_path
from kvtier.tiers.scratch import Scratch
from kvtier.types import ChunkKey, ShardId


class DirectoryLostError(FileNotFoundError):
    """The directory is not the one that was opened (any more): unmounted, moved or removed."""

    def __init__(self, root: str) -> None:
        super().__init__(errno.ENOENT, "not the directory that was opened", root)


@dataclass(frozen=True, slots=True)
class Found:
    """What an open found. ``quarantined`` lists files from the oldest to the newest.

    ``scanned`` are the files that an open without an index found damaged or useless. ``unswept``
    names the parts of the directory where files may lie of which the index does not know.
    """

    rows: Rows
    quarantined: tuple[FileInfo, ...]
    scanned: Scanned | None
    unswept: tuple[str, ...]


class ShardFiles:
    """The directory of one disk tier. Reads run in any thread; all else in one thread at a time."""

    def __init__(self, root: str, durability: Durability, files: FileSystem) -> None:
        self.root = os.path.abspath(root)
        self._durability = durability
        self._files = files
        self._lock_descriptor = -1
        self._journal = Journal(self.root, files)
        self._scratch = Scratch()
        self._byte_codecs = ByteCodecs()
        # Rows of an index that could not be written at open; it is tried again with every change.
        self._unwritten: Rows | None = None
        # Unique over restarts as long as the clock does not run backwards by whole restarts; a
        # clash would only make a write fail, since files are created exclusively.
        self._next_generation = time.time_ns()
        self._unsynced: list[str] = []
        self._unsynced_lock = threading.Lock()
        # Directories whose own names are safe, and what failed writes could not clean up.
        self._safe_directories: set[str] = set()
        self._leftovers: list[str] = []

    @property
    def index_bytes(self) -> int:
        """Bytes written for the index since the start: what writing costs beside the chunks."""
        return self._journal.written_bytes

    def open(self) -> Found:
        """Take the directory, drop what was being written, read the index or all headers.

        Raises ``TierUnavailableError`` when another process holds it, ``OSError`` when it cannot
        be used.
        """
        os.makedirs(self.root, exist_ok=True)
        self.lock()
        for leftover in self._files.list(self._path("incoming")):
            self._files.remove(leftover.path)
        rows, scanned = self._journal.load(), None
        if rows is None:
            scanned = scan(self._files, self._files.list(self._path("shards")))
            rows = Rows.of(scanned.rows)
            self._unwritten = rows
            with contextlib.suppress(OSError):  # A full disk can still be read from.
                self._begin_journal()
        if self._durability is not Durability.NONE:
            self._safe_directories.clear()
            self._files.sync_directory(self.root)
        quarantined = sorted(self._files.list(self._path("quarantine")), key=lambda f: f.modified_s)
        return Found(rows, tuple(quarantined), scanned, () if scanned else _parts(len(rows)))

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

    def new_generations(self, count: int) -> int:
        """Return the first of ``count`` numbers in a row that no file here ever had."""
        first = self._next_generation
        self._next_generation += count
        return first

    def path(self, chunk: ChunkKey, shard: ShardId, generation: int) -> str:
        """Return where a shard lies."""
        return shard_path(self.root, chunk, shard, generation)

    def write(self, path: str, slot: memoryview) -> None:
        """Write a sealed slot whole under ``path``. The caller has the slot pinned.

        Raises ``OSError``, ``DirectoryLostError`` above all; then nothing lies under ``path``, or
        it goes before the next write.
        """
        self._raise_if_lost()
        self._clear_leftovers()
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

    def note(self, changes: Changes) -> None:
        """Bring the index up to date with files that were written or removed.

        Raises ``OSError``, ``DirectoryLostError`` above all; the caller notes the same again later.
        An index that can no longer be trusted is a lost directory: opened anew, it is read from
        the files.
        """
        self._raise_if_lost()
        try:
            self._begin_journal()
            for part in changes.parts():
                self._journal.append(part)
            if self._durability is Durability.EACH:
                self._journal.sync()
            if self._journal.compact_due():
                self._journal.compact()
        except OSError as error:
            self._raise_if_lost()
            if self._unwritten is None and not self._journal.started:
                raise DirectoryLostError(self.root) from error
            raise

    def sweep(self, part: str, unknown: Callable[[Sequence[FileInfo]], list[FileInfo]]) -> Scanned:
        """Look through a part of the directory for files that nobody knows.

        ``unknown`` is called with the part's files and returns those to look at. Raises
        ``OSError``, ``DirectoryLostError`` above all.
        """
        self._raise_if_lost()
        return scan(self._files, unknown(self._files.list(self._path(part))))

    def commit_group(self) -> None:
        """Make durable what was written since the last call (durability ``batch``)."""
        with self._unsynced_lock:
            group, self._unsynced = self._unsynced, []
        written = [path for path in group if os.path.exists(path)]
        try:
            for path in written:
                self._files.sync_file(path)
            self._sync_names(written)
            self._journal.sync()
        except OSError:
            with self._unsynced_lock:
                self._unsynced = written + self._unsynced
            self._raise_if_lost()
            raise

    def read(
        self,
        path: str,
        slot: memoryview,
        expected: Expected,
        progress: Callable[[int], None],
        *,
        first_bytes: int = READ_FIRST_BYTES,
    ) -> None:
        """Read a shard into its slot, verifying as it comes.

        ``progress(n)`` is called in this thread each time the first ``n`` sections are verified.
        The first read of a shard of ``first_bytes`` and more is short, to tell how fast it goes.
        The caller owns the slot until this returns. Raises ``OSError``, ``DirectoryLostError``
        above all, ``ShardError`` when the bytes are not the expected shard, ``RegistryError`` or
        ``MissingExtraError`` where the byte codec that encoded it is not installed.
        """
        if expected.encoded:
            self._read_encoded(path, slot, expected, progress)
            return
        arrival = Arrival(slot, expected)
        for step in _steps(expected.geometry, first_bytes):
            self._read(path, step.start, slot[step.start : step.end])
            arrival.take(step)
            progress(step.sections.stop)

    def _read_encoded(
        self, path: str, slot: memoryview, expected: Expected, progress: Callable[[int], None]
    ) -> None:
        nbytes = expected.stored_bytes or 0
        if nbytes > expected.geometry.shard_bytes:
            raise FormatError(f"{path} is said to have {nbytes} bytes, more than its shard")
        step_bytes = max(READ_STEP_BYTES, stored_header_bytes(expected.layout.sections))
        with self._scratch.lent(nbytes) as buffer:
            data = buffer[:nbytes]
            arrival = DecodedArrival(data, slot, expected, self._byte_codecs)
            for start in range(0, nbytes, step_bytes):
                end = min(start + step_bytes, nbytes)
                self._read(path, start, data[start:end])
                progress(arrival.take(end))

    def _read(self, path: str, start: int, into: memoryview) -> None:
        try:
            count = self._files.read(path, start, into)
        except OSError:
            self._raise_if_lost()
            raise
        if count != len(into):
            raise FormatError(f"{path} ends before byte {start + len(into)}")

    def probe(self) -> None:
        """Read a page, to see whether the device answers. Raises ``OSError``."""
        page = memoryview(mmap.mmap(-1, ALIGN_BYTES))
        self._files.read(self._path("lock"), 0, page)

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

    def _begin_journal(self) -> None:
        if self._unwritten is not None:
            self._journal.start(self._unwritten)
            self._unwritten = None


def _steps(geometry: ShardGeometry, first_bytes: int) -> list[Step]:
    """Cut a shard into reads; the first one of a large shard is short."""
    if geometry.shard_bytes < first_bytes:
        return read_steps(geometry, READ_STEP_BYTES)
    end = (*geometry.section_offsets[1:], geometry.shard_bytes)[0]
    first, *rest = read_steps(geometry, READ_STEP_BYTES)
    if first.end == end:
        return [first, *rest]
    sections = range(1, first.sections.stop)
    return [Step(0, end, range(1)), Step(end, first.end, sections), *rest]


def _parts(row_count: int) -> tuple[str, ...]:
    """Cut a directory of many chunks into parts, so that writes go on between them."""
    if row_count <= SWEEP_WHOLE_CHUNKS:
        return ("shards",)
    return tuple(f"shards/{start:02x}" for start in range(256))
