"""A file system that goes wrong on purpose: ``FaultyFiles`` around the disk tier's own seam.

Faults are ordered by number and path and drawn from a seed, so a failing test replays; nothing
here waits by the clock. To fail an operation at its second call and heal it again::

    files = FaultyFiles()
    files.inject(FileFailure(operations=(FileOperation.CREATE,), nth=2, errno=errno.ENOSPC))
    ...
    files.inject()
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

from kvtier.tiers.disk.files import FileInfo, FileSystem, LocalFiles

#: As ``last`` of a fault: every call from the ``nth`` on.
EVER: Final = 0
#: Real seconds after which a wait for another thread is taken for a deadlock.
_STUCK_S: Final = 30.0
#: What lies where a short read placed nothing.
_FILL: Final = b"\xee"


class FileOperation(StrEnum):
    """The calls of a file system that can go wrong."""

    LIST = "list"
    READ = "read"
    CREATE = "create"
    REPLACE = "replace"
    REMOVE = "remove"
    SYNC_FILE = "sync_file"
    SYNC_DIRECTORY = "sync_directory"
    APPEND = "append"


ALL_OPERATIONS: Final = tuple(FileOperation)


@dataclass(frozen=True, slots=True)
class FileCall:
    """A call that was made. ``target`` is set for ``replace`` only."""

    operation: FileOperation
    path: str
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class FileFault:
    """Which calls a fault hits: those from ``nth`` to ``last`` among the ones that match.

    A call matches when it is one of ``operations`` and its path (or target) contains ``path``.
    They are counted from 1 from the moment the fault is injected. ``last`` None: one call only;
    ``EVER``: all from ``nth`` on.
    """

    operations: tuple[FileOperation, ...] = ALL_OPERATIONS
    path: str = ""
    nth: int = 1
    last: int | None = None

    def matches(self, call: FileCall) -> bool:
        """Tell whether a call counts."""
        return call.operation in self.operations and (
            self.path in call.path or self.path in call.target
        )

    def hits(self, count: int) -> bool:
        """Tell whether the matching call of that number is hit."""
        last = self.nth if self.last is None else self.last
        return self.nth <= count and (last == EVER or count <= last)


@dataclass(frozen=True, kw_only=True)
class FileFailure(FileFault):
    """The call raises ``OSError(errno)`` and does nothing."""

    errno: int = errno.EIO


@dataclass(frozen=True, kw_only=True)
class ShortRead(FileFault):
    """A read places at most ``nbytes`` and says so."""

    operations: tuple[FileOperation, ...] = (FileOperation.READ,)
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class BitFlip(FileFault):
    """A read has one bit flipped and nothing tells of it.

    ``offset`` is the byte in the file; a read without that byte is left as it is. None: the seed
    chooses among what was read.
    """

    operations: tuple[FileOperation, ...] = (FileOperation.READ,)
    offset: int | None = None


@dataclass(frozen=True, kw_only=True)
class TornWrite(FileFault):
    """A create or an append leaves its first ``nbytes`` bytes and raises ``OSError(errno)``."""

    operations: tuple[FileOperation, ...] = (FileOperation.CREATE, FileOperation.APPEND)
    nbytes: int = 0
    errno: int = errno.EIO


@dataclass(frozen=True, kw_only=True)
class FileCrash(FileFault):
    """The process dies at this call, as far as its files can tell.

    The call does nothing, except that a create or an append leaves its first ``nbytes`` bytes
    behind (None: not even a file). It and every later call raise ``OSError(EIO)`` and do nothing,
    until ``FaultyFiles.restart``.
    """

    nbytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class FileGate(FileFault):
    """Calls wait before the gate until somebody opens it, then go on as if nothing had been.

    A test opens the gate before it ends, or its threads wait until they are taken for stuck.
    """

    last: int | None = EVER
    _changed: threading.Condition = field(default_factory=threading.Condition, compare=False)
    _state: dict[str, int] = field(default_factory=lambda: {"open": 0, "arrived": 0}, compare=False)

    def hold(self) -> None:
        """Block until the gate is open."""
        with self._changed:
            self._state["arrived"] += 1
            self._changed.notify_all()
            passed = self._changed.wait_for(lambda: self._state["open"], _STUCK_S)
        assert passed, "nobody opened the gate"

    def wait_for_arrivals(self, count: int = 1) -> None:
        """Block until ``count`` calls have come to the gate."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._state["arrived"] >= count, _STUCK_S)
        assert came, f"fewer than {count} calls came to the gate"

    def open(self) -> None:
        """Let everyone pass, now and later."""
        with self._changed:
            self._state["open"] = 1
            self._changed.notify_all()


FaultT = TypeVar("FaultT", bound=FileFault)
# Named out here: within the class ``list`` is a method.
_Hits = list[FileFault]
# Puts the part of a write in place that happened.
_Leave = Callable[[str, memoryview], None]
_NOTHING: Final = memoryview(b"")


class FaultyFiles:
    """A ``FileSystem`` around another one, with faults. Without faults it changes nothing.

    Safe from any thread. ``calls`` holds every call made since the start, in order of arrival.
    """

    def __init__(self, inner: FileSystem | None = None, *, seed: int = 0) -> None:
        """Wrap ``inner``, by default the operating system's files."""
        self.calls: Final[list[FileCall]] = []
        self._inner = inner if inner is not None else LocalFiles()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._faults: tuple[FileFault, ...] = ()
        self._counts: list[int] = []
        self._crashed = False

    @property
    def crashed(self) -> bool:
        """True from a ``FileCrash`` until ``restart``."""
        return self._crashed

    def inject(self, *faults: FileFault) -> None:
        """Replace the faults; each starts to count. Without arguments everything is well again."""
        with self._lock:
            self._faults = faults
            self._counts = [0] * len(faults)

    def restart(self) -> None:
        """Come back after a crash, without faults."""
        self.inject()
        self._crashed = False

    def count(self, operation: FileOperation) -> int:
        """Return how many calls of an operation were made since the start."""
        with self._lock:
            return sum(call.operation is operation for call in self.calls)

    def list(self, directory: str) -> list[FileInfo]:
        """See ``Files.list``."""
        with self._faults_of(FileCall(FileOperation.LIST, directory)):
            return self._inner.list(directory)

    def read(self, path: str, offset: int, into: memoryview) -> int:
        """See ``Files.read``."""
        with self._faults_of(FileCall(FileOperation.READ, path)) as hits:
            count = self._inner.read(path, offset, into)
            for flip in _only(hits, BitFlip):
                self._flip(flip, offset, into[:count])
            for short in _only(hits, ShortRead):
                if count > short.nbytes:
                    into[short.nbytes : count] = _FILL * (count - short.nbytes)
                    count = short.nbytes
            return count

    def create(self, path: str, data: memoryview) -> None:
        """See ``Files.create``."""
        leave = _create_part
        with self._faults_of(FileCall(FileOperation.CREATE, path), leave, data) as hits:
            _tear(hits, leave, path, data)
            self._inner.create(path, data)

    def replace(self, source: str, target: str) -> None:
        """See ``Files.replace``."""
        with self._faults_of(FileCall(FileOperation.REPLACE, source, target)):
            self._inner.replace(source, target)

    def remove(self, path: str) -> None:
        """See ``Files.remove``."""
        with self._faults_of(FileCall(FileOperation.REMOVE, path)):
            self._inner.remove(path)

    def sync_file(self, path: str) -> None:
        """See ``Syncs.sync_file``."""
        with self._faults_of(FileCall(FileOperation.SYNC_FILE, path)):
            self._inner.sync_file(path)

    def sync_directory(self, path: str) -> None:
        """See ``Syncs.sync_directory``."""
        with self._faults_of(FileCall(FileOperation.SYNC_DIRECTORY, path)):
            self._inner.sync_directory(path)

    def append(self, path: str, data: memoryview) -> None:
        """See ``Appends.append``."""
        leave = self._inner.append
        with self._faults_of(FileCall(FileOperation.APPEND, path), leave, data) as hits:
            _tear(hits, leave, path, data)
            leave(path, data)

    @contextmanager
    def _faults_of(
        self, call: FileCall, leave: _Leave | None = None, data: memoryview = _NOTHING
    ) -> Iterator[_Hits]:
        """Count a call and raise, block or crash as ordered; yield what else hits it."""
        hits = self._arrive(call)
        for gate in _only(hits, FileGate):
            gate.hold()
        with self._lock:
            crashes = _only(hits, FileCrash)
            if crashes and not self._crashed:
                self._crashed = True
                nbytes = crashes[0].nbytes
                if leave is not None and nbytes is not None:
                    leave(call.path, data[:nbytes])
            if self._crashed:
                raise OSError(errno.EIO, "crashed on purpose", call.path)
        for failure in _only(hits, FileFailure):
            raise OSError(failure.errno, os.strerror(failure.errno), call.path)
        yield hits

    def _arrive(self, call: FileCall) -> _Hits:
        with self._lock:
            self.calls.append(call)
            hits: _Hits = []
            for index, fault in enumerate(self._faults):
                if fault.matches(call):
                    self._counts[index] += 1
                    if fault.hits(self._counts[index]):
                        hits.append(fault)
            return hits

    def _flip(self, flip: BitFlip, offset: int, data: memoryview) -> None:
        with self._lock:
            bit = self._random.randrange(8 * max(len(data), 1))
        byte = bit // 8 if flip.offset is None else flip.offset - offset
        if 0 <= byte < len(data):
            data[byte] ^= 1 << bit % 8


def _only(hits: _Hits, kind: type[FaultT]) -> list[FaultT]:
    return [fault for fault in hits if isinstance(fault, kind)]


def _tear(hits: _Hits, leave: _Leave, path: str, data: memoryview) -> None:
    for torn in _only(hits, TornWrite):
        leave(path, data[: torn.nbytes])
        raise OSError(torn.errno, os.strerror(torn.errno), path)


def _create_part(path: str, part: memoryview) -> None:
    """Write what a torn create left, of whatever length, past the inner file system."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("xb") as file:
        file.write(part)
