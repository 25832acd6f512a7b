"""The file system that goes wrong on purpose does what it is ordered to do."""

from __future__ import annotations

import errno
import mmap
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing.fault_files import (
    EVER,
    BitFlip,
    FaultyFiles,
    FileCall,
    FileCrash,
    FileFailure,
    FileFault,
    FileGate,
    FileOperation,
    ShortRead,
    TornWrite,
)
from kvtier.tiers.disk.files import FileSystem

PAGE = 4096


def aligned(fill: bytes, pages: int = 2) -> memoryview:
    view = memoryview(mmap.mmap(-1, pages * PAGE))
    view[:] = fill * len(view)
    return view


def read_file(files: FileSystem, path: Path) -> bytes:
    into = aligned(b"\xff")
    return bytes(into[: files.read(str(path), 0, into)])


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(seed=3)


def test_without_faults_everything_passes_and_is_recorded(
    files: FaultyFiles, tmp_path: Path
) -> None:
    source, target = tmp_path / "in" / "a", tmp_path / "out" / "b"
    files.create(str(source), aligned(b"x"))
    files.sync_file(str(source))
    files.replace(str(source), str(target))
    files.sync_directory(str(target.parent))
    assert read_file(files, target) == b"x" * 2 * PAGE
    files.append(str(target), memoryview(b"end"))
    assert target.read_bytes() == b"x" * 2 * PAGE + b"end"
    assert [info.path for info in files.list(str(tmp_path))] == [str(target)]
    files.remove(str(target))
    assert not target.exists()
    assert files.calls[2] == FileCall(FileOperation.REPLACE, str(source), str(target))
    assert [files.count(operation) for operation in FileOperation] == [1] * 8


CALLS: dict[FileOperation, Callable[[FaultyFiles, str], object]] = {
    FileOperation.LIST: lambda files, path: files.list(path),
    FileOperation.READ: lambda files, path: files.read(path, 0, aligned(b"_")),
    FileOperation.CREATE: lambda files, path: files.create(path + ".new", aligned(b"y")),
    FileOperation.REPLACE: lambda files, path: files.replace(path, path + ".new"),
    FileOperation.REMOVE: lambda files, path: files.remove(path),
    FileOperation.SYNC_FILE: lambda files, path: files.sync_file(path),
    FileOperation.SYNC_DIRECTORY: lambda files, path: files.sync_directory(path),
    FileOperation.APPEND: lambda files, path: files.append(path, memoryview(b"more")),
}


@pytest.mark.parametrize("operation", list(FileOperation))
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ENOENT])
def test_a_failure_raises_its_errno_and_does_nothing(
    files: FaultyFiles, tmp_path: Path, operation: FileOperation, code: int
) -> None:
    path = tmp_path / "a"
    files.create(str(path), aligned(b"x"))
    files.inject(FileFailure(operations=(operation,), errno=code))
    with pytest.raises(OSError, match=re.escape(str(tmp_path))) as caught:
        CALLS[operation](files, str(path))
    assert caught.value.errno == code
    files.inject()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert read_file(files, path) == b"x" * 2 * PAGE


@pytest.mark.parametrize(("last", "failing"), [(None, {2}), (3, {2, 3}), (EVER, {2, 3, 4})])
def test_calls_are_counted_from_the_injection_and_by_path(
    files: FaultyFiles, tmp_path: Path, last: int | None, failing: set[int]
) -> None:
    mine, other = str(tmp_path / "mine"), str(tmp_path / "other")
    for path in (mine, other):
        files.create(path, aligned(b"x"))
        files.read(path, 0, aligned(b"_"))
    files.inject(
        FileFailure(operations=(FileOperation.READ,), path="mine", nth=2, last=last),
    )
    failed: set[int] = set()
    for call in range(1, 5):
        files.read(other, 0, aligned(b"_"))
        try:
            files.read(mine, 0, aligned(b"_"))
        except OSError:
            failed.add(call)
    assert failed == failing


def test_a_short_read_places_nothing_beyond_its_bytes(files: FaultyFiles, tmp_path: Path) -> None:
    path = tmp_path / "a"
    files.create(str(path), aligned(b"x"))
    files.inject(ShortRead(nbytes=100))
    into = aligned(b"_")
    assert files.read(str(path), 0, into) == 100
    assert bytes(into) == b"x" * 100 + b"\xee" * (2 * PAGE - 100)


def flipped(files: FaultyFiles, path: Path, fault: FileFault) -> int:
    """Return the difference that a fault makes to a file of zeros, as a number."""
    files.inject(fault)
    return int.from_bytes(read_file(files, path), "little")


def test_a_flip_changes_one_bit_that_the_seed_or_the_test_chooses(tmp_path: Path) -> None:
    path = tmp_path / "a"
    FaultyFiles().create(str(path), aligned(b"\0"))
    first, same, other = (flipped(FaultyFiles(seed=s), path, BitFlip()) for s in (1, 1, 2))
    assert first == same != other
    assert first.bit_count() == other.bit_count() == 1
    chosen = flipped(FaultyFiles(), path, BitFlip(offset=5000))
    assert chosen.bit_count() == 1
    assert chosen.bit_length() - 1 in range(5000 * 8, 5001 * 8)
    assert flipped(FaultyFiles(), path, BitFlip(offset=9000)) == 0


def test_a_torn_write_leaves_its_part_behind(files: FaultyFiles, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a"
    files.inject(TornWrite(nbytes=512, errno=errno.ENOSPC))
    with pytest.raises(OSError, match="a") as caught:
        files.create(str(path), aligned(b"x"))
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"x" * 512


def test_a_torn_append_leaves_its_part_at_the_end(files: FaultyFiles, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log"
    files.append(str(path), memoryview(b"whole."))
    files.inject(TornWrite(nbytes=3, errno=errno.ENOSPC))
    with pytest.raises(OSError, match="log") as caught:
        files.append(str(path), memoryview(b"torn."))
    assert caught.value.errno == errno.ENOSPC
    files.inject(FileCrash(operations=(FileOperation.APPEND,), nbytes=2))
    with pytest.raises(OSError, match="on purpose"):
        files.append(str(path), memoryview(b"dead."))
    assert path.read_bytes() == b"whole.torde"


def test_after_a_crash_nothing_works_until_the_restart(files: FaultyFiles, tmp_path: Path) -> None:
    whole, part, never = (tmp_path / name for name in ("whole", "part", "never"))
    files.create(str(whole), aligned(b"x"))
    files.inject(FileCrash(operations=(FileOperation.CREATE,), nth=1, nbytes=512))
    with pytest.raises(OSError, match="on purpose"):
        files.create(str(part), aligned(b"y"))
    for call in CALLS.values():
        with pytest.raises(OSError, match="on purpose"):
            call(files, str(whole))
    assert files.crashed
    assert part.read_bytes() == b"y" * 512
    assert whole.read_bytes() == b"x" * 2 * PAGE
    files.restart()
    assert read_file(files, whole) == b"x" * 2 * PAGE
    files.inject(FileCrash())
    with pytest.raises(OSError, match="on purpose"):
        files.create(str(never), aligned(b"z"))
    assert not never.exists()


def test_a_gate_holds_its_calls_until_it_is_opened(files: FaultyFiles, tmp_path: Path) -> None:
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    for path in (slow, fast):
        files.create(str(path), aligned(b"x"))
    gate = FileGate(operations=(FileOperation.READ,), path="slow")
    files.inject(gate)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(read_file(files, slow))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    gate.wait_for_arrivals(2)
    assert read_file(files, fast) == b"x" * 2 * PAGE
    assert results == []
    gate.open()
    for thread in threads:
        thread.join(30)
    assert results == [b"x" * 2 * PAGE] * 2
    assert read_file(files, slow) == b"x" * 2 * PAGE
