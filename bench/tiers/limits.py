"""What the machine can do at best: memcpy, and bare O_DIRECT loops over files."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def huge_buffer(nbytes: int) -> memoryview:
    """Anonymous memory in huge pages, touched."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapping)
    torch.frombuffer(view, dtype=torch.uint8).random_(0, 255)
    return view


class Limits:
    """Moves as many bytes as a tier does in a round, a chunk at a time, to where no cache holds
    them: all of it is far larger than the last level.
    """

    def __init__(self, payload: int, chunks: int, folder: Path) -> None:
        self.payload, self.chunks, self.folder = payload, chunks, folder
        self.buffers = [huge_buffer(payload * chunks) for _ in range(2)]

    def memcpy(self) -> float:
        """One thread, from huge pages to huge pages, all of them warm."""
        source, target = (torch.frombuffer(view, dtype=torch.uint8) for view in self.buffers)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)

        def copy() -> None:
            for start in range(0, len(source), self.payload):
                target[start : start + self.payload].copy_(source[start : start + self.payload])

        seconds = timed(copy)
        torch.set_num_threads(threads)
        return seconds

    def write(self, *, threads: int, sync: bool) -> float:
        """A new file per chunk, from huge pages, with fdatasync where the tier syncs."""
        self.folder.mkdir(parents=True, exist_ok=True)

        def write_file(index: int) -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
            descriptor = os.open(self.folder / f"{index}", flags)
            os.pwrite(descriptor, self._chunk(index), 0)
            if sync:
                os.fdatasync(descriptor)
            os.close(descriptor)

        return self._each(write_file, threads)

    def read(self, *, threads: int) -> float:
        """The files that ``write`` left, into huge pages."""

        def read_file(index: int) -> None:
            descriptor = os.open(self.folder / f"{index}", os.O_RDONLY | os.O_DIRECT)
            os.preadv(descriptor, [self._chunk(index)], 0)
            os.close(descriptor)

        return self._each(read_file, threads)

    def _chunk(self, index: int) -> memoryview:
        return self.buffers[0][index * self.payload : (index + 1) * self.payload]

    def _each(self, work: Callable[[int], None], threads: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            return timed(lambda: list(pool.map(work, range(self.chunks))))
