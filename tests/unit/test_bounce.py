"""Files through buffers: the same bytes, step by step, whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.tiers.disk.bounce import BouncedFiles
from kvtier.tiers.disk.files import FileSystem, LocalFiles
from kvtier.tiers.memory import Memory

PAGE = 4096
STEP = 4 * PAGE


class CountedFiles(LocalFiles):
    """Notes where each read and write starts; an error can be set."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []
        self.error: OSError | None = None

    def read(self, path: str, offset: int, into: memoryview) -> int:
        self.reads.append((offset, len(into)))
        if self.error is not None:
            raise self.error
        return super().read(path, offset, into)


@pytest.fixture
def counted() -> CountedFiles:
    return CountedFiles()


@pytest.fixture
def files(counted: CountedFiles) -> Iterator[BouncedFiles]:
    made = BouncedFiles(counted, count=2, step_bytes=STEP)
    yield made
    made.close()
    made.close()


@pytest.fixture
def memory() -> Iterator[memoryview]:
    made = Memory(16 * PAGE, shared=True)
    yield made.view
    made.close()


def pattern(nbytes: int) -> bytes:
    return bytes((n // 7 + n) % 251 for n in range(nbytes))


@pytest.mark.parametrize("pages", [1, 3, 4, 5, 8, 15])
def test_bytes_come_back_whatever_the_steps(
    files: BouncedFiles, memory: memoryview, tmp_path: Path, pages: int
) -> None:
    nbytes = pages * PAGE
    path = str(tmp_path / "sub" / "file")
    memory[:nbytes] = pattern(nbytes)
    files.create(path, memory[:nbytes].toreadonly())
    assert Path(path).read_bytes() == pattern(nbytes)
    memory[:] = b"\xee" * len(memory)
    assert files.read(path, 0, memory[:nbytes]) == nbytes
    assert bytes(memory[:nbytes]) == pattern(nbytes)
    assert set(memory[nbytes:]) == {0xEE}


def test_a_read_starts_where_it_was_told(
    files: BouncedFiles, counted: CountedFiles, memory: memoryview, tmp_path: Path
) -> None:
    path = str(tmp_path / "file")
    Path(path).write_bytes(pattern(12 * PAGE))
    assert files.read(path, PAGE, memory[: 10 * PAGE]) == 10 * PAGE
    assert bytes(memory[: 10 * PAGE]) == pattern(12 * PAGE)[PAGE : 11 * PAGE]
    assert counted.reads == [(PAGE, STEP), (5 * PAGE, STEP), (9 * PAGE, 2 * PAGE)]


@pytest.mark.parametrize("there", [0, 100, STEP, STEP + 100, 2 * STEP])
def test_b78_a_file_that_is_too_short_gives_what_is_there_and_touches_no_more(
    files: BouncedFiles, memory: memoryview, tmp_path: Path, there: int
) -> None:
    path = str(tmp_path / "file")
    Path(path).write_bytes(pattern(there))
    memory[:] = b"\xee" * len(memory)
    assert files.read(path, 0, memory) == there
    assert bytes(memory[:there]) == pattern(there)
    assert set(memory[there:]) == {0xEE}


def test_errors_pass_through_and_no_buffer_is_lost(
    files: BouncedFiles, counted: CountedFiles, memory: memoryview, tmp_path: Path
) -> None:
    path = str(tmp_path / "file")
    files.create(path, memory)
    counted.error = OSError(5, "broken")
    for _ in range(5):
        with pytest.raises(OSError, match="broken"):
            files.read(path, 0, memory)
        with pytest.raises(FileExistsError):
            files.create(path, memory)
    counted.error = None
    assert files.read(path, 0, memory) == len(memory)


def test_threads_never_see_each_others_bytes(files: BouncedFiles, tmp_path: Path) -> None:
    """More threads than buffers: the last ones wait for a buffer, none mixes."""
    start = threading.Barrier(4)

    def work(number: int) -> bool:
        memory = Memory(16 * PAGE)
        memory.view[:] = bytes([number]) * len(memory.view)
        start.wait()
        good = True
        for turn in range(10):
            path = str(tmp_path / f"{number}-{turn}")
            files.create(path, memory.view)
            good &= files.read(path, 0, memory.view) == len(memory.view)
            good &= set(memory.view) == {number}
        memory.close()
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_all_else_is_the_file_systems_own(files: BouncedFiles, tmp_path: Path) -> None:
    system: FileSystem = files
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    system.append(first, memoryview(b"abc"))
    system.append(first, memoryview(b"def"))
    system.sync_file(first)
    system.replace(first, second)
    system.sync_directory(str(tmp_path))
    assert [(info.path, info.nbytes) for info in system.list(str(tmp_path))] == [(second, 6)]
    system.remove(second)
    assert system.list(str(tmp_path)) == []
