"""How fast memory and a disk are here, measured in a second or two with at most 64 MiB."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.constants import MIB
from kvtier.interfaces import Clock

_FILE_BYTES: Final = 64 * MIB
_STEP_BYTES: Final = 8 * MIB
_COPY_BYTES: Final = 32 * MIB
_FREE_BYTES_MIN: Final = 4 * _FILE_BYTES
#: A slow disk is measured for this long only.
_MEASURE_S_MAX: Final = 2.0


@dataclass(frozen=True, slots=True)
class DiskReport:
    """A directory as a place for the disk tier. Speeds in GB/s (1e9), None where not measured.

    ``small`` and ``huge`` say which pages the memory had: O_DIRECT into 4 KiB pages splits into
    many small requests on some devices.
    """

    path: str
    problem: str = ""
    free_bytes: int = 0
    direct_io: bool = False
    write_small: float | None = None
    read_small: float | None = None
    write_huge: float | None = None
    read_huge: float | None = None


def memory_copy_speed(clock: Clock) -> float:
    """Return GB/s of copying warm memory, one thread."""
    with _memory(_COPY_BYTES, huge=True) as source, _memory(_COPY_BYTES, huge=True) as target:
        target[:] = source
        started = clock.now()
        target[:] = source
        return _speed(len(source), clock.now() - started)


def disk_report(path: Path, clock: Clock) -> DiskReport:
    """Try a directory, or the nearest one above it that is there.

    Leaves nothing behind, even when the process dies: the file has no name while it is written.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return _try_directory(path, clock)
    except OSError as error:
        return DiskReport(str(path), problem=error.strerror or str(error))


def _try_directory(path: Path, clock: Clock) -> DiskReport:
    free_bytes = shutil.disk_usage(path).free
    with _unnamed_file(path) as (file, direct_io):
        if free_bytes < _FREE_BYTES_MIN:
            return DiskReport(str(path), "", free_bytes, direct_io)
        speeds = []
        for huge in (False, True):
            with _memory(_STEP_BYTES, huge=huge) as memory:
                speeds.append(_transfer(os.pwrite, file, memory, clock))
                speeds.append(_transfer(_read_into, file, memory, clock))
    return DiskReport(str(path), "", free_bytes, direct_io, *speeds)


@contextmanager
def _unnamed_file(path: Path) -> Iterator[tuple[int, bool]]:
    """An open file without a name, and whether it takes O_DIRECT."""
    named, name = tempfile.mkstemp(dir=path, prefix=".kvtier-doctor-")
    try:
        try:
            file = os.open(name, os.O_RDWR | os.O_DIRECT)
        except OSError:
            file = os.dup(named)
    finally:
        Path(name).unlink()
        os.close(named)
    try:
        yield file, _takes_direct_write(file)
    finally:
        os.close(file)


def _takes_direct_write(file: int) -> bool:
    """Some file systems open with O_DIRECT and refuse the first write."""
    if not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            return os.pwrite(file, page, 0) == mmap.PAGESIZE
        except OSError:
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_RDWR)
            return False


@contextmanager
def _memory(nbytes: int, *, huge: bool) -> Iterator[memoryview]:
    """Warm memory in huge or in small pages."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        # A kernel without huge pages has small ones only.
        with suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        area.write(b"\x5a" * nbytes)
        with memoryview(area) as view:
            yield view


def _transfer(
    step: Callable[[int, memoryview, int], int], file: int, memory: memoryview, clock: Clock
) -> float:
    """GB/s of moving the file step by step, until all is moved or the time is up."""
    done, started = 0, clock.now()
    while done < _FILE_BYTES and clock.now() - started < _MEASURE_S_MAX:
        moved = step(file, memory, done)
        if moved == 0:
            break
        done += moved
    return _speed(done, clock.now() - started)


def _read_into(file: int, memory: memoryview, offset: int) -> int:
    return os.preadv(file, [memory], offset)


def _speed(nbytes: int, seconds: float) -> float:
    return round(nbytes / 1e9 / max(seconds, 1e-9), 2)
