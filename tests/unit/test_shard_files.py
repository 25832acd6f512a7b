"""Shards as files: whole or not at all, verified, found again, out of the way when bad."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.config import Durability
from kvtier.errors import FormatError, IdentityError, ShardError, TierUnavailableError
from kvtier.keys import shard_key
from kvtier.testing.fault_files import (
    FaultyFiles,
    FileFailure,
    FileOperation,
    ShortRead,
    TornWrite,
)
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.shard_files import ShardFiles
from tests.lib.disk_lab import aligned, expect, files_below, geometry_of
from tests.lib.shard_room import (
    NBYTES,
    SHARD,
    corrupt_of,
    get,
    paths_of,
    put,
    rescan,
    right,
)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def shards(tmp_path: Path, files: FaultyFiles) -> Iterator[ShardFiles]:
    made = ShardFiles(str(tmp_path), Durability.NONE, files)
    made.open()
    yield made
    made.close()


def test_what_is_written_is_read_and_found_again(shards: ShardFiles, tmp_path: Path) -> None:
    path = put(shards, "a", "parent")
    name = shard_key(chunk_key("a"), SHARD).hex()
    assert path.parent == tmp_path / "shards" / name[:2]
    assert path.name.startswith(name + "-")
    assert path.stat().st_size == NBYTES
    assert path.stat().st_mode & 0o077 == 0
    assert get(shards, path, "a") == right("a")
    found = rescan(shards)
    assert paths_of(shards, found) == [path]
    row = found.rows.row(0)
    assert (row.key, row.parent, row.nbytes) == (chunk_key("a"), chunk_key("parent"), NBYTES)
    assert row.used_ms / 1000 == pytest.approx(path.stat().st_mtime)


def test_no_name_is_used_twice(shards: ShardFiles) -> None:
    numbers = [shards.new_generations(3) for _ in range(100)]
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(numbers))
    paths = [shards.path(chunk_key("a"), SHARD, number) for number in numbers]
    assert paths == sorted(paths)


def test_of_two_generations_the_later_counts_and_the_earlier_goes(shards: ShardFiles) -> None:
    earlier, later = put(shards, "a"), put(shards, "a")
    found = rescan(shards)
    assert paths_of(shards, found) == [later]
    assert found.scanned is not None
    assert [info.path for info in found.scanned.useless] == [str(earlier)]
    assert corrupt_of(found) == []


def test_what_was_being_written_is_gone_after_an_open(shards: ShardFiles, tmp_path: Path) -> None:
    (tmp_path / "incoming" / "half").write_bytes(b"x" * 5000)
    assert len(shards.open().rows) == 0
    assert files_below(tmp_path) == []


FAILURES = [
    FileFailure(operations=(FileOperation.CREATE,), errno=errno.ENOSPC),
    FileFailure(operations=(FileOperation.REPLACE,), errno=errno.EIO),
    TornWrite(nbytes=512, errno=errno.ENOSPC),
]


@pytest.mark.parametrize("fault", FAILURES, ids=["create", "replace", "torn"])
def test_a_failed_write_leaves_nothing_behind(
    shards: ShardFiles, files: FaultyFiles, tmp_path: Path, fault: FileFailure | TornWrite
) -> None:
    files.inject(fault)
    with pytest.raises(OSError, match=r".") as caught:
        put(shards, "a")
    assert caught.value.errno == fault.errno
    assert files_below(tmp_path) == []
    assert get(shards, put(shards, "a"), "a") == right("a")


def test_what_could_not_be_cleaned_up_goes_before_the_next_write(
    shards: ShardFiles, files: FaultyFiles, tmp_path: Path
) -> None:
    cannot_remove = FileFailure(operations=(FileOperation.REMOVE,), last=2)
    files.inject(TornWrite(nbytes=8192, errno=errno.EIO), cannot_remove)
    with pytest.raises(OSError, match="Input/output"):
        put(shards, "a")
    assert len(files_below(tmp_path)) == 1
    with pytest.raises(OSError, match="Input/output"):
        put(shards, "b")
    assert len(files_below(tmp_path)) == 1
    path = put(shards, "c")
    assert files_below(tmp_path) == [path]


def test_b85_short_writes_are_continued_or_the_file_is_not_there(
    shards: ShardFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev = os.pwritev
    for step, whole in ((4096, True), (512, False), (0, False)):
        monkeypatch.setattr(
            os,
            "pwritev",
            lambda fd, buffers, at, step=step: pwritev(fd, [buffers[0][:step]], at) if step else 0,
        )
        if whole:
            assert get(shards, put(shards, "a"), "a") == right("a")
            continue
        before = files_below(tmp_path)
        with pytest.raises(OSError, match=r"."):
            put(shards, "b")
        assert files_below(tmp_path) == before


@pytest.mark.parametrize("made", [False, True], ids=["nothing made", "file made"])
def test_a_file_system_without_direct_io_serves_too(
    shards: ShardFiles, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """Some refuse the flag before the file is made, some after."""
    system_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            if made and flags & os.O_CREAT:
                os.close(system_open(path, flags & ~os.O_DIRECT, mode))
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return system_open(path, flags, mode)

    shutil.rmtree(Path(shards.root, "index"))
    monkeypatch.setattr(os, "open", refuse)
    path = put(shards, "a")
    assert get(shards, path, "a") == right("a")
    for _ in ("from the headers", "from the index"):
        assert paths_of(shards, shards.open()) == [path]


@pytest.mark.parametrize("nbytes", [0, 512, 4096, NBYTES - 4096])
def test_short_reads_are_no_data(shards: ShardFiles, files: FaultyFiles, nbytes: int) -> None:
    path = put(shards, "a")
    files.inject(ShortRead(nbytes=nbytes))
    with pytest.raises(ShardError):
        get(shards, path, "a")
    assert get(shards, path, "a") == right("a")


def damages() -> dict[str, Callable[[bytearray], None]]:
    offsets = geometry_of(SHARD).section_offsets
    return {
        "payload bit": lambda data: data.__setitem__(offsets[1] + 9, data[offsets[1] + 9] ^ 4),
        "header bit": lambda data: data.__setitem__(100, data[100] ^ 1),
        "magic": lambda data: data.__setitem__(slice(0, 4), b"KVTX"),
        "version": lambda data: data.__setitem__(4, 9),
        "truncated": lambda data: data.__delitem__(slice(NBYTES - 4096, None)),
        "cut in the header": lambda data: data.__delitem__(slice(100, None)),
        "empty": lambda data: data.clear(),
        "zeros": lambda data: data.__setitem__(slice(None), bytes(len(data))),
        "a pickle": lambda data: data.__setitem__(slice(0, 6), b"\x80\x04\x95abc"),
    }


@pytest.mark.parametrize("damage", damages())
def test_b78_b98_damaged_files_are_never_data(shards: ShardFiles, damage: str) -> None:
    path = put(shards, "a")
    data = bytearray(path.read_bytes())
    damages()[damage](data)
    path.write_bytes(data)
    with pytest.raises(ShardError):
        get(shards, path, "a")


@pytest.mark.parametrize("damage", [name for name in damages() if name != "payload bit"])
def test_a_scan_tells_damaged_files_from_sound_ones(shards: ShardFiles, damage: str) -> None:
    path, sound = put(shards, "a"), put(shards, "b")
    data = bytearray(path.read_bytes())
    damages()[damage](data)
    path.write_bytes(data)
    found = rescan(shards)
    assert corrupt_of(found) == [str(path)]
    assert paths_of(shards, found) == [sound]
    shards.quarantine(str(path))
    assert Path(shards.quarantine_path(str(path))).read_bytes() == bytes(data)
    assert [info.path for info in shards.open().quarantined] == [shards.quarantine_path(str(path))]


def test_b32_a_file_under_another_name_is_not_that_chunk(shards: ShardFiles) -> None:
    first, second = put(shards, "a"), put(shards, "b")
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    for path, name in ((first, "a"), (second, "b")):
        with pytest.raises(IdentityError):
            get(shards, path, name)
    assert len(corrupt_of(rescan(shards))) == 2


def test_a_file_of_another_namespace_is_not_that_chunk(shards: ShardFiles) -> None:
    path = put(shards, "a")
    expected = expect(chunk_key("a"), SHARD)
    other = type(expected)(
        expected.chunk, SHARD, b"m" * 32, expected.codec, expected.layout, expected.geometry
    )
    with pytest.raises(IdentityError, match="namespace"):
        shards.read(str(path), aligned(NBYTES), other, lambda _: None)


def test_a_file_that_cannot_be_read_at_open_is_put_away_alone(
    shards: ShardFiles, files: FaultyFiles
) -> None:
    bad, good = put(shards, "a"), put(shards, "b")
    files.inject(FileFailure(operations=(FileOperation.READ,), path=bad.name, last=0))
    found = rescan(shards)
    assert paths_of(shards, found) == [good]
    assert len(corrupt_of(found)) == 1


def test_a_disk_that_reads_nothing_at_open_loses_nothing(
    shards: ShardFiles, files: FaultyFiles, tmp_path: Path
) -> None:
    paths = {put(shards, name) for name in range(40)}
    files.inject(FileFailure(operations=(FileOperation.READ,), nth=3, last=0))
    with pytest.raises(OSError, match="Input/output"):
        rescan(shards)
    assert set(files_below(tmp_path)) == paths
    files.inject()
    assert set(paths_of(shards, shards.open())) == paths


def test_strange_files_do_not_stop_an_open(shards: ShardFiles, tmp_path: Path) -> None:
    good = put(shards, "a")
    (good.parent / "notes.txt").write_text("hello")
    (tmp_path / "shards" / "link").symlink_to(good)
    (tmp_path / "shards" / "deep" / "er").mkdir(parents=True)
    found = rescan(shards)
    assert paths_of(shards, found) == [good]
    assert len(corrupt_of(found)) == 1
    assert good.exists()


def test_quarantine_of_what_is_gone_does_nothing(shards: ShardFiles, tmp_path: Path) -> None:
    path = put(shards, "a")
    path.unlink()
    shards.quarantine(str(path))
    shards.remove(str(path))
    assert files_below(tmp_path) == []


HOLDER = """
import sys
from kvtier.config import Durability
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.shard_files import ShardFiles
files = ShardFiles(sys.argv[1], Durability.NONE, LocalFiles())
files.open()
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_told_who_has_the_directory(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        shards = ShardFiles(str(tmp_path), Durability.NONE, LocalFiles())
        for _ in range(2):
            with pytest.raises(TierUnavailableError, match=f"process {holder.pid}$"):
                shards.open()
        assert not shards.attached()
        holder.kill()
        holder.wait()
        shards.open()
        assert (tmp_path / "lock").read_text() == str(os.getpid())
        shards.close()


def test_one_process_does_not_have_it_twice(shards: ShardFiles, tmp_path: Path) -> None:
    second = ShardFiles(str(tmp_path), Durability.NONE, LocalFiles())
    with pytest.raises(TierUnavailableError, match=str(os.getpid())):
        second.open()
    shards.close()
    second.open()
    second.close()


def test_a_full_disk_is_opened_and_a_failed_lock_is_let_go(
    shards: ShardFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(shards, "a")
    shards.close()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        with pytest.raises(OSError, match="No space"):
            shards.open()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        assert paths_of(shards, rescan(shards)) == [path]
    assert get(shards, path, "a") == right("a")


def test_a_directory_that_was_replaced_is_not_written_to(
    shards: ShardFiles, tmp_path: Path, files: FaultyFiles
) -> None:
    path = put(shards, "a")
    moved = tmp_path.parent / "moved"
    tmp_path.rename(moved)
    assert not shards.attached()
    with pytest.raises(FileNotFoundError):
        put(shards, "b")
    tmp_path.mkdir()
    with pytest.raises(FileNotFoundError):
        put(shards, "b")
    assert files_below(tmp_path) == []
    assert len(shards.open().rows) == 0
    assert shards.attached()
    put(shards, "b")
    assert moved.joinpath(path.relative_to(tmp_path)).exists()


def test_a_header_is_checked_before_its_sizes_are_believed(shards: ShardFiles) -> None:
    path = put(shards, "a")
    data = bytearray(path.read_bytes())
    data[8:12] = (2**31).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(FormatError):
        get(shards, path, "a")
    assert len(corrupt_of(rescan(shards))) == 1
