"""Memory whose parts belong to owners: each has a file of its own, which its processes may map.

One range of addresses, as ``Memory`` is, made of one file (a memfd) for each owner. Every file is
as long as all of the memory, and a byte lies at the same offset in it as here; where a part is not
its owner's, the file has a hole. So whoever maps a file sees what is its own, and zeros::

    memory    | ann's   | ben's          | ann's | nobody's |
    of ann    | pages   | hole           | pages | hole     |
    of ben    | hole    | pages          | hole            |

A part changes hands when a slab is made over it: its pages go back to the system, whoever maps
them, and those of the new owner come zeroed, as they are touched.

What is handed out is a descriptor that is open for reading only, of a file whose mode lets nobody
open it again, sealed against another length: to touch it never raises a signal. It is not sealed
against writing (``F_SEAL_FUTURE_WRITE``): the kernel would not let us take its pages back.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Final

from kvtier.constants import ARENA_OWNERS_MAX, HUGE_PAGE_BYTES
from kvtier.errors import ConfigError
from kvtier.tiers.memory import (
    ArenaHandle,
    Progress,
    ProgressLog,
    available_bytes,
    huge_on_advice,
    populate,
)

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_NOBODY: Final = b""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]


@dataclass(frozen=True, slots=True)
class Region:
    """An owner's file. ``descriptor`` is for reading only and the memory's, until it is closed.

    ``number`` names it among all regions of all processes.
    """

    number: int
    owner: bytes
    descriptor: int
    nbytes: int


class SharedFile:
    """A file in memory that others may map. ``writable`` is ours; close it after use."""

    def __init__(self, name: str, nbytes: int) -> None:
        """Raises ``OSError``: no descriptor is left, or the system has no such files."""
        self.nbytes = nbytes
        self.number = int.from_bytes(os.urandom(8), "little") >> 1
        self.writable = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.writable, nbytes)
            fcntl.fcntl(self.writable, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(self.writable)
            raise

    def open_readable(self) -> int:
        """Return a descriptor for reading only; nobody opens the file by its name after that."""
        path = f"/proc/self/fd/{self.writable}"
        readable = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.fchmod(self.writable, 0)
        return readable

    def close(self) -> None:
        """Close our descriptor; what is mapped stays."""
        os.close(self.writable)


class OwnedMemory:
    """A mapping of this process whose parts belong to owners. Used under the cache's lock.

    ``view`` is all of it. Everything belongs to ``owner`` at first and is touched now, which blocks
    as that of ``Memory`` does. Raises ``ConfigError`` when the machine does not have as much, or
    has no such files.
    """

    def __init__(self, nbytes: int, owner: bytes, *, progress: Progress | None = None) -> None:
        available = available_bytes()
        if nbytes > available:
            raise ConfigError(f"arena of {nbytes} bytes: the machine has {available} available")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._mapping = mmap.mmap(-1, nbytes, flags=flags)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.view = memoryview(self._mapping)
        self.handle: ArenaHandle | None = None
        self.huge = nbytes >= HUGE_PAGE_BYTES and huge_on_advice("shmem_enabled")
        self._files: dict[bytes, tuple[SharedFile, Region]] = {}
        # Runs of one owner, side by side and without a gap; no two beside each other have one.
        self._starts = [0]
        self._owners = [owner]
        try:
            self._back(0, nbytes, self._file(owner))
            populate(self._mapping, nbytes, progress or ProgressLog())
        except OSError as error:
            self.close()
            raise ConfigError(f"arena of {nbytes} bytes for others to map: {error}") from error

    def own(self, offset: int, nbytes: int, owner: bytes) -> bool:
        """Let a part that nobody uses belong to an owner; False: the system refuses.

        Beyond ``ARENA_OWNERS_MAX`` owners it belongs to nobody, whose file is never handed out.
        """
        parts = self._foreign(offset, offset + nbytes, owner)
        if not parts:
            return True
        try:
            if owner not in self._files and len(self._files) >= ARENA_OWNERS_MAX:
                owner = _NOBODY
            file = self._file(owner)
            for start, end in parts:
                self._mapping.madvise(mmap.MADV_REMOVE, start, end - start)
                self._back(start, end - start, file)
                self._note(start, end, owner)
        except OSError:
            return False
        return True

    def region_at(self, offset: int) -> Region | None:
        """Return the file that a byte lies in, at the same offset; None: it is nobody's."""
        owner = self._owners[bisect.bisect_right(self._starts, offset) - 1]
        return self._files[owner][1] if owner != _NOBODY else None

    def close(self) -> None:
        """Give the memory back but what others have mapped, which stays as it is.

        Every view given out must be gone or unused. A second call does nothing.
        """
        if self._mapping.closed:
            return
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mapping.close()
        for file, region in self._files.values():
            os.close(region.descriptor)
            file.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the runs are not what they shall be."""
        beside = zip(self._owners, self._owners[1:], strict=False)
        ordered = self._starts == sorted(set(self._starts)) and self._starts[0] == 0
        if not ordered or any(left == right for left, right in beside):
            raise AssertionError("runs of owners overlap or are not joined")
        if not set(self._owners) <= set(self._files):
            raise AssertionError("a run whose owner has no file")

    def _file(self, owner: bytes) -> SharedFile:
        if owner not in self._files:
            file = SharedFile("kvtier-objects", len(self.view))
            try:
                region = Region(file.number, owner, file.open_readable(), file.nbytes)
            except OSError:
                file.close()
                raise
            self._files[owner] = (file, region)
        return self._files[owner][0]

    def _back(self, start: int, nbytes: int, file: SharedFile) -> None:
        """Put a part of a file in the place of what is mapped there."""
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | _MAP_FIXED
        where = self._address + start
        if _libc.mmap(where, nbytes, access, flags, file.writable, start) != where:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if self.huge:  # The advice was that of what lay there before. It is no more than that.
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes)

    def _foreign(self, start: int, end: int, owner: bytes) -> list[tuple[int, int]]:
        """Return the parts of a range that are not an owner's."""
        parts: list[tuple[int, int]] = []
        run = bisect.bisect_right(self._starts, start) - 1
        for begin, whose in zip(self._starts[run:], self._owners[run:], strict=True):
            if begin >= end:
                break
            after = self._starts[run + 1] if run + 1 < len(self._starts) else len(self.view)
            if whose != owner:
                parts.append((max(start, begin), min(end, after)))
            run += 1
        return parts

    def _note(self, start: int, end: int, owner: bytes) -> None:
        """Write down whose a range is, and join it with its neighbours."""
        for cut in (start, end):
            run = bisect.bisect_right(self._starts, cut) - 1
            if self._starts[run] != cut and cut < len(self.view):
                self._starts.insert(run + 1, cut)
                self._owners.insert(run + 1, self._owners[run])
        first = bisect.bisect_left(self._starts, start)
        last = bisect.bisect_left(self._starts, end)
        if first and self._owners[first - 1] == owner:
            first -= 1
        if last < len(self._owners) and self._owners[last] == owner:
            last += 1
        self._starts[first:last] = [self._starts[first]]
        self._owners[first:last] = [owner]
