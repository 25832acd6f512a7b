"""Memory that is mapped and touched before it is needed, in huge pages where there are any.

A fresh page costs microseconds, at the worst possible moment, and O_DIRECT into 4 KiB pages runs
at a fifth of the speed. What one process uses alone is anonymous memory with the advice
``MADV_HUGEPAGE``. What workers in other processes map is a memfd, of the huge pages that the
administrator has set aside (``vm.nr_hugepages``) when they suffice, else of ordinary pages: most
systems give a memfd no huge pages for advice.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.clock import SystemClock
from kvtier.constants import ALIGN_BYTES, GIB, HUGE_PAGE_BYTES, MIB
from kvtier.errors import ConfigError
from kvtier.interfaces import Clock

_log = logging.getLogger("kvtier.arena")

#: Called with the bytes mapped so far and the bytes wanted, after each step.
Progress = Callable[[int, int], None]

# Linux 5.14: fault pages in without reading or writing them. Not in Python's mmap module.
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_STEP_BYTES: Final = 64 * MIB
_PROGRESS_BYTES: Final = 4 * GIB
_PROGRESS_S: Final = 2.0
_PAGES: Final = Path("/sys/kernel/mm")
_MEMFD_HUGE: Final = os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """How another process of this host maps a shared arena. Plain data."""

    path: str
    nbytes: int


def map_arena(handle: ArenaHandle) -> memoryview:
    """Map a shared arena that another process owns, readable and writable.

    The mapping lives as long as the view. Raises ``OSError`` when the owner is gone.
    """
    descriptor = os.open(handle.path, os.O_RDWR)
    try:
        if os.fstat(descriptor).st_size != handle.nbytes:
            raise FileNotFoundError(errno.ENOENT, "the arena's owner is gone", handle.path)
        return memoryview(mmap.mmap(descriptor, handle.nbytes))
    finally:
        os.close(descriptor)


class Memory:
    """A mapping of this process. ``view`` is all of it, ``huge`` says what its pages are.

    Blocks for about a second per 2 GiB of ordinary pages and 10 GiB of huge ones; ``progress`` is
    called meanwhile, by default a log line now and then. A memfd of huge pages is as long as a
    whole number of them, so ``view`` may be shorter than ``nbytes``. Raises ``ConfigError`` when
    the machine, or the control group that this process is in, does not have as much.
    """

    def __init__(
        self, nbytes: int, *, shared: bool = False, progress: Progress | None = None
    ) -> None:
        mapped = _map(nbytes, progress or ProgressLog(), shared=shared)
        self._mapping, self._descriptor, self.huge = mapped
        self.view = memoryview(self._mapping)
        self.handle: ArenaHandle | None = None
        if shared:
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.handle = ArenaHandle(path, len(self.view))

    def close(self) -> None:
        """Give the memory back. Every view given out must be gone or unused.

        A view that is still alive keeps the mapping, but not the pages of it that nobody shares:
        they read as zeros. A second call does nothing.
        """
        if self._mapping.closed:
            return
        with contextlib.suppress(OSError):  # Huge pages of a memfd refuse it before Linux 5.18.
            self._mapping.madvise(mmap.MADV_DONTNEED)
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mapping.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ProgressLog:
    """Says how far the mapping is, once per 4 GiB or two seconds; little memory needs no line."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._said_bytes = 0
        self._said_s = self._clock.now()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Note that ``done_bytes`` of ``total_bytes`` are mapped."""
        now = self._clock.now()
        far = done_bytes - self._said_bytes >= _PROGRESS_BYTES or now - self._said_s >= _PROGRESS_S
        if far or (self._said_bytes and done_bytes == total_bytes):
            _log.info("arena: %.3g of %.3g GiB mapped", done_bytes / GIB, total_bytes / GIB)
            self._said_bytes, self._said_s = done_bytes, now


def huge_on_advice(kind: str = "enabled") -> bool:
    """Tell whether the kernel gives huge pages for advice: ``shmem_enabled`` is a memfd's."""
    try:
        modes = (_PAGES / "transparent_hugepage" / kind).read_text()
    except OSError:
        return False
    return "[never]" not in modes and "[deny]" not in modes


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much may be touched before the system ends a process for it.

    The least of what the machine has available and what each control group above this process
    leaves (version 1 and 2; page cache that is not in use counts as available there too).
    """
    fields = dict(re.findall(r"(\w+): +(\d+) kB", (root / "proc/meminfo").read_text()))
    return max(0, min([int(fields["MemAvailable"]) * 1024, *_group_rooms(root)]))


def _group_rooms(root: Path) -> Iterator[int]:
    groups = (root / "proc/self/cgroup").read_text().splitlines()
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if controllers == "memory":
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif not controllers:
            mount = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        # Inside a container the path may be the host's, of which only the mount's root is here.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            # The root group has no limit, and a group that is not mounted here no files.
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                figures = (folder / "memory.stat").read_text()
                cached = re.search(rf"^{names[2]} (\d+)", figures, re.MULTILINE)
                yield limit - used + (int(cached[1]) if cached else 0)
            if folder == mount:
                break


def _map(nbytes: int, progress: Progress, *, shared: bool) -> tuple[mmap.mmap, int, bool]:
    """Map and touch; return the mapping, its descriptor (-1: none), whether pages are huge."""
    whole = nbytes - nbytes % HUGE_PAGE_BYTES
    if shared and 0 < whole <= _set_aside_bytes():
        # Others may have been quicker, or a limit of the control group be less.
        with contextlib.suppress(OSError):
            return *_map_memfd(whole, _MEMFD_HUGE, progress), True
    available = available_bytes()
    if nbytes > available:
        raise ConfigError(f"arena of {nbytes} bytes: the machine has {available} available")
    try:
        if shared:
            huge = nbytes >= HUGE_PAGE_BYTES and huge_on_advice("shmem_enabled")
            return *_map_memfd(nbytes, os.MFD_CLOEXEC, progress), huge
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        populate(mapping, nbytes, progress)
        return mapping, -1, nbytes >= HUGE_PAGE_BYTES and huge_on_advice()
    except OSError as error:
        raise ConfigError(f"arena of {nbytes} bytes: the machine refuses: {error}") from error


def _set_aside_bytes() -> int:
    """Return the bytes of huge pages that were set aside and are not promised to anybody."""
    folder = _PAGES / "hugepages" / f"hugepages-{HUGE_PAGE_BYTES // 1024}kB"
    try:
        free, promised = (
            int((folder / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
        )
    except OSError:
        return 0
    return (free - promised) * HUGE_PAGE_BYTES


def _map_memfd(nbytes: int, flags: int, progress: Progress) -> tuple[mmap.mmap, int]:
    descriptor = os.memfd_create("kvtier-arena", flags)
    try:
        os.ftruncate(descriptor, nbytes)
        mapping = mmap.mmap(descriptor, nbytes)
        populate(mapping, nbytes, progress)
    except OSError:
        os.close(descriptor)
        raise
    return mapping, descriptor


def populate(mapping: mmap.mmap, nbytes: int, progress: Progress) -> None:
    """Fault every page in, huge ones where the kernel gives them. Raises ``OSError``."""
    if nbytes >= HUGE_PAGE_BYTES:
        # A kernel without huge pages refuses the advice; everything works, only slower.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, nbytes, _POPULATE_STEP_BYTES):
        step = min(_POPULATE_STEP_BYTES, nbytes - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, step)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Older than 5.14: touch each page.
            for page in range(start, start + step, ALIGN_BYTES):
                mapping[page] = 0
        progress(start + step, nbytes)
