"""The index of a directory at rest: a snapshot of its rows and a log of what changed since.

::

    ROOT/index/snapshot         rows in order of their last use, and the number of its log
    ROOT/index/snapshot.new     being written
    ROOT/index/log-NUMBER       batches of changes since the snapshot that names it

A snapshot is synced before it takes its name, and the old log goes only after that name is safe:
whatever is cut off when, one snapshot and its own log are there. What the log loses is its tail,
and files of which no index knows are found again by looking through the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import Final

from kvtier.constants import ALIGN_BYTES, JOURNAL_CHANGES_LOGGED, JOURNAL_LOG_BYTES_MAX
from kvtier.tiers.disk.files import FileSystem
from kvtier.tiers.disk.index_format import (
    Batch,
    Changes,
    SnapshotHeader,
    buffer,
    decode_batches,
    decode_snapshot,
    decode_snapshot_header,
    encode_batch,
    encode_snapshot,
)
from kvtier.tiers.disk.replay import replay
from kvtier.tiers.disk.rows import Rows

_LOG_NAME: Final = re.compile(r"log-(0[0-9a-f]{15})")

__all__ = ["Changes", "Journal"]


class Journal:
    """The index of one directory at rest. Blocking; one thread at a time."""

    def __init__(self, root: str, files: FileSystem) -> None:
        self._root = root
        self._directory = os.path.join(root, "index")
        self._files = files
        # What the snapshot on disk is and what its log holds; no number: start comes first.
        self._number: int | None = None
        self._row_count = 0
        self._change_count = 0
        self._log_bytes = 0
        # Whether the log may end in garbage, behind which nothing would be found again.
        self._torn = False
        # Whether the log's bytes are on the medium, and the names of all files.
        self._synced = False
        self._named = False
        self._written_bytes = 0

    @property
    def written_bytes(self) -> int:
        """Bytes of snapshots and logs that were written since this was made."""
        return self._written_bytes

    @property
    def started(self) -> bool:
        """False while nothing can be appended: before a load or start that succeeded."""
        return self._number is not None

    def load(self) -> Rows | None:
        """Return the rows in order of their last use, oldest first.

        None: there is no index, or none that can be trusted, and the caller looks through the
        directory and calls ``start``. Raises ``OSError`` where the disk does not answer.
        """
        sizes = self._sizes()
        read = self._read_snapshot(sizes.get("snapshot", 0))
        if read is None:
            self._number = None
            return None
        header, rows = read
        log_bytes = sizes.get(_log_name(header.log_number), 0)
        batches, end = self._read_log(header.log_number, log_bytes)
        self._number = header.log_number
        self._row_count = len(rows)
        self._change_count = sum(map(len, batches))
        self._log_bytes = log_bytes
        self._torn = end < log_bytes
        self._synced = self._named = False
        return replay(rows, batches)

    def start(self, rows: Rows) -> None:
        """Make ``rows``, in order of their last use, all that is known, durably.

        Raises ``OSError``; then nothing can be appended until it has succeeded.
        """
        self._number = None
        self._write_snapshot(rows)

    def append(self, changes: Changes) -> None:
        """Write changes behind all others, in one call; a load finds all of them or none.

        They take at most ``JOURNAL_BATCH_BYTES_MAX``. Raises ``OSError``: they are not written,
        or not for certain. Since nothing may follow what was torn, the next append compacts first.
        """
        if self._torn or self._log_bytes > JOURNAL_LOG_BYTES_MAX:
            self.compact()
        if self._number is None:
            raise OSError(errno.EIO, "the index was not started", self._directory)
        data = encode_batch(changes, self._number)
        self._torn = True
        self._synced = False
        self._named = self._named and self._log_bytes > 0
        self._files.append(self._path(_log_name(self._number)), data)
        self._torn = False
        self._log_bytes += len(data)
        self._change_count += len(changes)
        self._written_bytes += len(data)

    def compact_due(self) -> bool:
        """Tell whether the log has grown so long that a new snapshot is worth its bytes."""
        return self._change_count > max(JOURNAL_CHANGES_LOGGED, self._row_count // 2)

    def compact(self) -> None:
        """Fold the log into a new snapshot.

        Raises ``OSError``: nothing is lost, and what was there is tried again by the next append;
        or what was there cannot be trusted any more, and only ``start`` helps.
        """
        torn, change_count = self._torn, self._change_count
        rows = self.load()
        if rows is None:
            raise OSError(errno.EIO, "the index cannot be trusted", self._directory)
        if not torn and self._change_count != change_count:
            # What was read is not what was written: nothing is lost as long as the log stays.
            self._torn, self._change_count = False, change_count
            raise OSError(errno.EIO, "the index was misread", self._directory)
        # A snapshot that took its name before something failed has a log of its own.
        self._torn = True
        self._write_snapshot(rows)

    def sync(self) -> None:
        """Return when everything appended is on the medium. Raises ``OSError``."""
        if self._number is None:
            return
        if self._log_bytes and not self._synced:
            self._files.sync_file(self._path(_log_name(self._number)))
            self._synced = True
        self._sync_names()

    def _sync_names(self) -> None:
        if not self._named:
            self._files.sync_directory(self._directory)
            self._files.sync_directory(self._root)
            self._named = True

    def _write_snapshot(self, rows: Rows) -> None:
        number = 1 + max([self._number or 0, *self._logs()])
        data = encode_snapshot(rows, number)
        if data is None:
            raise OSError(errno.EFBIG, "more rows than an index holds", self._directory)
        new = self._path("snapshot.new")
        self._files.remove(new)
        self._files.create(new, data)
        self._written_bytes += len(data)
        self._files.sync_file(new)
        self._named = False
        self._files.replace(new, self._path("snapshot"))
        self._sync_names()
        self._number = number
        self._row_count = len(rows)
        self._change_count = self._log_bytes = 0
        self._torn = False
        # What old logs waste until the next snapshot is no reason to call this one failed.
        with contextlib.suppress(OSError):
            for log in self._logs():
                self._files.remove(self._path(_log_name(log)))

    def _read_snapshot(self, nbytes: int) -> tuple[SnapshotHeader, Rows] | None:
        page = buffer(ALIGN_BYTES)
        if nbytes < ALIGN_BYTES or self._files.read(self._path("snapshot"), 0, page) != len(page):
            return None
        header = decode_snapshot_header(page, nbytes)
        if header is None:
            return None
        data = buffer(nbytes)
        if self._files.read(self._path("snapshot"), 0, data) != nbytes:
            return None
        rows = decode_snapshot(header, data)
        return None if rows is None else (header, rows)

    def _read_log(self, number: int, nbytes: int) -> tuple[list[Batch], int]:
        """Return the batches of a log and where the last one ends."""
        nbytes = min(nbytes, 2 * JOURNAL_LOG_BYTES_MAX)
        if not nbytes:
            return [], 0
        data = buffer(nbytes)
        count = self._files.read(self._path(_log_name(number)), 0, data)
        found = list(decode_batches(data[:count], number))
        return [batch for batch, _ in found], found[-1][1] if found else 0

    def _sizes(self) -> dict[str, int]:
        files = self._files.list(self._directory)
        return {os.path.basename(file.path): file.nbytes for file in files}

    def _logs(self) -> list[int]:
        names = map(_LOG_NAME.fullmatch, self._sizes())
        return [int(match[1], 16) for match in names if match]

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)


def _log_name(number: int) -> str:
    return f"log-{number:016x}"
