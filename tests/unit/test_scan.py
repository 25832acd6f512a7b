"""What files alone tell of the chunks that a directory holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.constants import QUARANTINE_FILES_MAX
from kvtier.errors import FormatError, IdentityError
from kvtier.keys import shard_key
from kvtier.shard_format import seal
from kvtier.testing.fault_files import EVER, FaultyFiles, FileFailure, FileOperation
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk.files import FileInfo, LocalFiles
from kvtier.tiers.disk.scan import (
    Scanned,
    check_file,
    file_header,
    parse_name,
    scan,
    shard_path,
)
from kvtier.types import Entry, ShardId
from tests.lib.disk_lab import NAMESPACE, aligned, damage, describe, fill_slot, geometry_of

SHARDS = (ShardId(0, 0, 0), ShardId(1, 0, 0))


def put(
    root: Path, name: object, parent: object | None = None, *, generation: int, used_s: float = 0
) -> list[Path]:
    """Write the files of a chunk of two shards."""
    over = None if parent is None else chunk_key(parent)
    entry = Entry(chunk_key(name), over, 0, int(parent is not None))
    paths: list[Path] = []
    for number, shard in enumerate(SHARDS):
        slot = aligned(geometry_of(shard).shard_bytes)
        fill_slot(slot, entry.key, shard)
        seal(slot, describe(entry, shard))
        paths.append(Path(shard_path(str(root), entry.key, shard, generation + number)))
        LocalFiles().create(str(paths[-1]), slot)
        os.utime(paths[-1], (used_s, used_s))
    return paths


def scanned(root: Path) -> Scanned:
    files = LocalFiles()
    return scan(files, files.list(str(root / "shards")))


def paths_of(infos: Sequence[FileInfo]) -> set[Path]:
    return {Path(info.path) for info in infos}


def test_whole_chunks_are_rows_the_oldest_first(tmp_path: Path) -> None:
    put(tmp_path, "a", generation=30, used_s=20)
    put(tmp_path, "b", generation=10, used_s=30)
    put(tmp_path, "c", "b", generation=50, used_s=10)
    found = scanned(tmp_path)
    assert [row.key for row in found.rows] == [chunk_key(name) for name in "cab"]
    assert [row.generation for row in found.rows] == [50, 30, 10]
    assert [row.used_ms for row in found.rows] == [10_000, 20_000, 30_000]
    assert [row.parent for row in found.rows] == [chunk_key("b"), None, None]
    kind = found.rows[0].kind
    assert (kind.namespace, kind.codec) == (NAMESPACE, "raw")
    assert kind.shards == tuple((shard, geometry_of(shard).shard_bytes) for shard in SHARDS)
    assert (found.corrupt, found.useless) == ((), ())


def test_of_one_age_parents_come_first(tmp_path: Path) -> None:
    put(tmp_path, "child", "parent", generation=10)
    put(tmp_path, "parent", generation=20)
    assert [row.position for row in scanned(tmp_path).rows] == [0, 1]


@pytest.mark.parametrize("missing", [0, 1])
def test_what_is_left_of_a_chunk_is_known_as_that(tmp_path: Path, missing: int) -> None:
    """Which shards a chunk has no header says: one of two files is a chunk of one shard."""
    paths = put(tmp_path, "a", generation=10)
    paths[missing].unlink()
    found = scanned(tmp_path)
    (row,) = found.rows
    assert row.kind.shards[0][0] == SHARDS[1 - missing]
    assert row.generation == 10 + (1 - missing)


def test_a_gap_in_the_generations_is_a_file_that_is_missing(tmp_path: Path) -> None:
    (first, _) = put(tmp_path, "a", generation=10)
    (_, second) = put(tmp_path, "a", generation=21)
    old_second = Path(shard_path(str(tmp_path), chunk_key("a"), SHARDS[1], 11))
    old_second.unlink()
    Path(shard_path(str(tmp_path), chunk_key("a"), SHARDS[0], 21)).unlink()
    found = scanned(tmp_path)
    assert found.rows == ()
    assert paths_of(found.useless) == {first, second}


def test_the_older_of_two_is_of_no_use(tmp_path: Path) -> None:
    older = put(tmp_path, "a", generation=10, used_s=99)
    put(tmp_path, "a", generation=20, used_s=1)
    found = scanned(tmp_path)
    assert [row.generation for row in found.rows] == [20]
    assert paths_of(found.useless) == set(older)


def test_a_copy_in_another_place_is_of_no_use_and_the_file_is_a_row(tmp_path: Path) -> None:
    paths = put(tmp_path, "a", generation=10)
    shutil.copytree(tmp_path / "shards", tmp_path / "shards" / "zz" / "copy")
    found = scanned(tmp_path)
    assert [row.key for row in found.rows] == [chunk_key("a")]
    assert len(found.useless) == len(paths)
    assert paths_of(found.useless).isdisjoint(paths)


def test_files_that_contradict_each_other_are_of_no_use(tmp_path: Path) -> None:
    (first, _) = put(tmp_path, "a", generation=10)
    Path(shard_path(str(tmp_path), chunk_key("a"), SHARDS[1], 11)).unlink()
    (_, second) = put(tmp_path, "a", "another parent", generation=10_000)
    Path(shard_path(str(tmp_path), chunk_key("a"), SHARDS[0], 10_000)).unlink()
    beside = Path(shard_path(str(tmp_path), chunk_key("a"), SHARDS[1], 11))
    second.rename(beside)
    found = scanned(tmp_path)
    assert found.rows == ()
    assert paths_of(found.useless) == {first, beside}


@pytest.mark.parametrize("harm", ["name", "other shard", "length", "header", "empty", "text"])
def test_damaged_and_foreign_files_are_told_apart(tmp_path: Path, harm: str) -> None:
    put(tmp_path, "well", generation=1)
    bad, rest = put(tmp_path, "a", generation=10)
    if harm == "name":
        bad = bad.rename(bad.with_name("notes.txt"))
    elif harm == "other shard":
        bad = bad.rename(shard_path(str(tmp_path), chunk_key("well"), ShardId(9, 0, 0), 10))
    elif harm == "length":
        bad.write_bytes(bad.read_bytes() + bytes(4096))
    elif harm == "header":
        data = bytearray(bad.read_bytes())
        data[100] ^= 1
        bad.write_bytes(data)
    else:
        bad.write_bytes(b"" if harm == "empty" else b"x" * 100)
    found = scanned(tmp_path)
    assert paths_of(found.corrupt) == {bad}
    assert chunk_key("well") in {row.key for row in found.rows}
    assert [row.kind.shards[0][0] for row in found.rows if row.key == chunk_key("a")] == [SHARDS[1]]
    assert rest.exists()


def test_a_scan_reads_headers_alone(tmp_path: Path) -> None:
    """What is behind them shows when it is read."""
    (path, _) = put(tmp_path, "a", generation=10)
    damage(path)
    assert len(scanned(tmp_path).rows) == 1


def test_a_file_that_goes_meanwhile_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "a", generation=10)
    gone = put(tmp_path, "b", generation=20)
    files = LocalFiles()
    infos = files.list(str(tmp_path / "shards"))
    for path in gone:
        path.unlink()
    found = scan(files, infos)
    assert [row.key for row in found.rows] == [chunk_key("a")]
    assert found.corrupt == ()


def test_a_disk_that_reads_nothing_is_ill_and_not_its_files(tmp_path: Path) -> None:
    for number in range(QUARANTINE_FILES_MAX):
        put(tmp_path, number, generation=10 * number)
    files = FaultyFiles()
    infos = files.list(str(tmp_path / "shards"))
    files.inject(
        FileFailure(operations=(FileOperation.READ,), last=QUARANTINE_FILES_MAX),
    )
    assert len(scan(files, infos).corrupt) == QUARANTINE_FILES_MAX
    files.inject(FileFailure(operations=(FileOperation.READ,), last=EVER))
    with pytest.raises(OSError, match="Input/output"):
        scan(files, infos)


def test_a_name_tells_the_shard_and_the_generation() -> None:
    path = shard_path("/tier", chunk_key("a"), SHARDS[1], 77)
    assert parse_name(path) == (shard_key(chunk_key("a"), SHARDS[1]), 77)
    assert Path(path).parent == Path("/tier/shards") / chunk_key("a").hex()[:2]
    for name in ("notes.txt", path + ".new", path.upper(), path.replace("-", "_")):
        assert parse_name(name) is None


def test_a_file_must_be_what_its_name_and_length_say(tmp_path: Path) -> None:
    (path, _) = put(tmp_path, "a", generation=10)
    header = file_header(memoryview(path.read_bytes())[:4096])
    nbytes = path.stat().st_size
    assert check_file(header, FileInfo(str(path), nbytes, 0.0)) == 10
    with pytest.raises(FormatError, match="not what its header says"):
        check_file(header, FileInfo(str(path), nbytes - 4096, 0.0))
    other = shard_path(str(tmp_path), chunk_key("b"), SHARDS[0], 10)
    with pytest.raises(IdentityError, match="another shard"):
        check_file(header, FileInfo(other, nbytes, 0.0))
