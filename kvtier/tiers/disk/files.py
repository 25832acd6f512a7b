"""Whole files of aligned bytes, past the page cache where the file system allows.

The seam between the disk tier and the operating system: five calls that raise ``OSError`` as the
system does, plus two that make bytes durable and one that lengthens a log. Fault tests stand here.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvtier.constants import ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a listing: path, length, time of its last change."""

    path: str
    nbytes: int
    modified_s: float


class Files(Protocol):
    """What the disk tier asks of a file system. Every call may block and may raise ``OSError``."""

    def list(self, directory: str) -> list[FileInfo]:
        """Return every regular file below a directory, which is created when missing."""
        ...

    def read(self, path: str, offset: int, into: memoryview) -> int:
        """Read into a 4096-aligned buffer; return how many bytes were there."""
        ...

    def create(self, path: str, data: memoryview) -> None:
        """Write a new file whole, or raise; the directory is created when missing."""
        ...

    def replace(self, source: str, target: str) -> None:
        """Rename, atomically; the target's directory is created when missing."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; one that is not there is removed already."""
        ...


class Syncs(Protocol):
    """Making bytes survive a power failure."""

    def sync_file(self, path: str) -> None:
        """Return when the file's bytes are on the medium."""
        ...

    def sync_directory(self, path: str) -> None:
        """Return when the directory's names are on the medium."""
        ...


class Appends(Protocol):
    """Making a file longer."""

    def append(self, path: str, data: memoryview) -> None:
        """Write at the end of a file in one call; file and directory are created when missing.

        Goes through the page cache, so any length is right. Raises ``OSError``; then any part of
        the bytes may be there.
        """
        ...


class Pieces(Protocol):
    """Writing what does not lie in one place."""

    def create_from(self, path: str, pieces: Iterable[memoryview]) -> None:
        """Write pieces of whole 4096 bytes as one new file; otherwise as ``Files.create``.

        A piece is written before the next is asked for, which may lie in the same memory.
        """
        ...


class FileSystem(Files, Syncs, Appends, Protocol):
    """All that the disk tier asks of a file system."""


class LocalFiles:
    """``FileSystem`` over the operating system. Safe from any thread."""

    def list(self, directory: str) -> list[FileInfo]:
        """See ``Files.list``."""
        os.makedirs(directory, exist_ok=True)
        found: list[FileInfo] = []
        pending = [directory]
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        info = entry.stat(follow_symlinks=False)
                        found.append(FileInfo(entry.path, info.st_size, info.st_mtime))
        return found

    def read(self, path: str, offset: int, into: memoryview) -> int:
        """See ``Files.read``."""
        with _opened(path, os.O_RDONLY) as descriptor:
            position = 0
            while position < len(into):
                count = os.preadv(descriptor, [into[position:]], offset + position)
                position += count
                # Past O_DIRECT's alignment there is only the file's end.
                if count == 0 or count % ALIGN_BYTES:
                    break
            return position

    def create(self, path: str, data: memoryview) -> None:
        """See ``Files.create``."""
        self.create_from(path, (data,))

    def create_from(self, path: str, pieces: Iterable[memoryview]) -> None:
        """See ``Pieces.create_from``."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            start = 0
            for data in pieces:
                position = 0
                while position < len(data):
                    count = os.pwritev(descriptor, [data[position:]], start + position)
                    if count == 0 or count % ALIGN_BYTES:
                        raise OSError(errno.EIO, "short write", path)
                    position += count
                start += position

    def replace(self, source: str, target: str) -> None:
        """See ``Files.replace``."""
        try:
            os.replace(source, target)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(source, target)

    def remove(self, path: str) -> None:
        """See ``Files.remove``."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def sync_file(self, path: str) -> None:
        """See ``Syncs.sync_file``."""
        _sync(path, os.O_RDONLY)

    def sync_directory(self, path: str) -> None:
        """See ``Syncs.sync_directory``."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def append(self, path: str, data: memoryview) -> None:
        """See ``Appends.append``."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.EIO, "short write", path)
        finally:
            os.close(descriptor)


class _opened:  # noqa: N801 - reads as a verb where it is used
    """A descriptor that bypasses the page cache, or an ordinary one where that is refused."""

    def __init__(self, path: str, flags: int) -> None:
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The file system has no O_DIRECT. With O_EXCL the refused open may have made the file.
            self._descriptor = os.open(path, (flags & ~os.O_EXCL) | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _sync(path: str, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        if flags & os.O_DIRECTORY:
            os.fsync(descriptor)
        else:
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
