"""What a disk tier knows when it comes back: the order of use, and files that no index knows."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import SWEEP_WHOLE_CHUNKS, TRIM_CHUNKS_MAX, USED_NOTE_S
from kvtier.keys import shard_key
from kvtier.shard_format import seal
from kvtier.testing.fault_files import EVER, FaultyFiles, FileFailure, FileOperation
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk import shard_files, tier
from kvtier.types import Entry, ShardId
from tests.lib.disk_lab import (
    DiskLab,
    aligned,
    bytes_on_disk,
    damage,
    describe,
    files_below,
    fill_slot,
    write_chain,
)

SHARD = ShardId(0, 0, 0)


@pytest.fixture(autouse=True)
def _each_write_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is written within a millisecond is of one age."""
    now_ms = itertools.count(1).__next__
    monkeypatch.setattr(tier, "wall_clock_ms", now_ms)
    monkeypatch.setattr("kvtier.tiers.disk.volume.wall_clock_ms", now_ms)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[DiskLab]:
    made = DiskLab(tmp_path, chunks=10)
    made.open()
    yield made
    made.close()


def index_file(lab: DiskLab, kind: str) -> Path:
    (path,) = (p for p in Path(lab.root, "index").iterdir() if p.name.startswith(kind))
    return path


def put_beside(lab: DiskLab, name: object, parent: object | None = None) -> Path:
    """Write a file as an earlier process may have that did not come to note it."""
    over = None if parent is None else chunk_key(parent)
    entry = Entry(chunk_key(name), over, lab.chunk_bytes, int(parent is not None))
    slot = aligned(lab.chunk_bytes)
    fill_slot(slot, entry.key, SHARD)
    seal(slot, describe(entry, SHARD))
    path = lab.shard_files.path(entry.key, SHARD, lab.shard_files.new_generations(1))
    lab.shard_files.write(path, slot)
    return Path(path)


# The order of use


def test_an_access_counts_after_a_restart(lab: DiskLab) -> None:
    for name in range(10):
        assert lab.write(name)
    lab.touch(0)
    lab.clock.advance(USED_NOTE_S)
    assert lab.volume.chores_due
    assert lab.do_chores()
    assert lab.restart()
    for fresh in range(100, 109):
        assert lab.write(fresh)
    assert lab.evicted == [chunk_key(name) for name in range(1, 10)]
    assert lab.read(0)
    lab.check()


def test_the_accesses_of_two_lives_have_one_order(lab: DiskLab) -> None:
    for name in range(6):
        assert lab.write(name)
    for name in (3, 1):
        lab.touch(name)
        assert lab.do_chores()
    assert lab.restart()
    lab.touch(0)
    assert lab.do_chores()
    assert lab.restart(capacity_chunks=2)
    assert lab.evicted == [chunk_key(name) for name in (2, 4, 5, 3)]
    assert lab.holds(1, 0) == [True, True]


def test_what_was_not_used_since_the_start_leaves_first_and_leaves_before_parents(
    lab: DiskLab,
) -> None:
    chain = write_chain(lab, "chain", 4)
    for name in range(6):
        assert lab.write(name)
    assert lab.restart()
    assert lab.read(5)
    assert lab.read(chain[1])
    for fresh in range(100, 107):
        assert lab.write(fresh)
    gone = [chunk_key(name) for name in (chain[3], chain[2], 0, 1, 2, 3, 4)]
    assert lab.evicted == gone
    assert lab.write(107)
    assert lab.evicted == [*gone, chunk_key(5)], "then what was used longest ago"
    assert lab.read(chain[1])
    lab.check()


def test_a_lookup_is_no_use(lab: DiskLab) -> None:
    for name in range(10):
        assert lab.write(name)
    assert lab.restart()
    assert lab.holds(0) == [True]
    assert lab.write("fresh")
    assert lab.evicted == [chunk_key(0)]


# Another bound


def test_a_smaller_bound_is_reached_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    lab = DiskLab(tmp_path, chunks=12, files=files)
    lab.open()
    for name in range(12):
        assert lab.write(name)
    assert TRIM_CHUNKS_MAX > 3
    monkeypatch.setattr(tier, "TRIM_CHUNKS_MAX", 3)
    # What has left first is not unlinked, so nothing more leaves.
    files.inject(FileFailure(operations=(FileOperation.REMOVE,), path=".kvs", last=EVER))
    assert lab.restart(capacity_chunks=5)
    assert lab.evicted == [chunk_key(name) for name in range(3)]
    assert lab.tier.trim()
    assert len(lab.evicted) == 3
    files.inject()
    steps = 0
    while lab.tier.trim():
        chores = lab.volume.take_chores()
        lab.volume.do(chores)
        lab.volume.finish_chores(chores)
        assert len(chores.remove) <= 3
        steps += 1
    assert steps == 3
    assert lab.evicted == [chunk_key(name) for name in range(7)]
    assert lab.holds(*range(7, 12)) == [True] * 5, "not one more than must"
    lab.check()
    lab.close()


def test_nothing_is_written_beyond_a_smaller_bound(tmp_path: Path) -> None:
    """What is over the bound goes before the first write; ``BoundedFiles`` looks."""
    lab = DiskLab(tmp_path, chunks=10)
    lab.open()
    for name in range(10):
        assert lab.write(name)
    lab.close()
    lab = DiskLab(tmp_path, chunks=4)
    assert lab.open()
    assert lab.write("fresh")
    assert lab.holds(*range(6, 10)) == [False, True, True, True]
    lab.check()
    lab.close()


def test_a_larger_bound_keeps_everything(lab: DiskLab) -> None:
    chain = write_chain(lab, "chain", 10)
    assert lab.restart(capacity_chunks=20)
    assert lab.holds(*chain) == [True] * 10
    assert lab.evicted == []


# An index that is wrong


@pytest.mark.parametrize("harm", ["lost", "flip", "cut", "empty", "foreign", "no snapshot"])
def test_without_an_index_the_same_is_found_by_looking(lab: DiskLab, harm: str) -> None:
    chain = write_chain(lab, "chain", 4)
    for name in range(4):
        assert lab.write(name)
    snapshot = index_file(lab, "snapshot")
    data = bytearray(snapshot.read_bytes())
    if harm == "lost":
        lab.lose_index()
    elif harm == "no snapshot":
        snapshot.unlink()
    elif harm == "flip":
        data[60] ^= 1
        snapshot.write_bytes(data)
    else:
        snapshot.write_bytes({"cut": bytes(data[:100]), "empty": b""}.get(harm, b"x" * 8192))
    assert lab.restart()
    assert lab.holds(*chain, *range(4)) == [True] * 8
    assert all(lab.read(name) for name in (*chain, *range(4)))
    lab.check()
    assert lab.restart()
    assert lab.holds(*chain, *range(4)) == [True] * 8, "and the index is there again"
    assert index_file(lab, "snapshot").stat().st_size > 4096


def test_a_directory_of_the_old_form_is_taken_up(lab: DiskLab) -> None:
    """Shards, epochs and a lock, as it was before there was an index."""
    chain = write_chain(lab, "chain", 3)
    lab.lose_index()
    shutil.rmtree(Path(lab.root, "quarantine"))
    assert lab.restart()
    assert [lab.read(name) for name in chain] == [True] * 3
    lab.check()


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7, 0.99])
def test_what_the_tail_of_a_log_told_is_found_by_a_sweep(lab: DiskLab, kept: float) -> None:
    chain = write_chain(lab, "chain", 3)
    for name in range(6):
        assert lab.write(name)
    log = index_file(lab, "log")
    log.write_bytes(log.read_bytes()[: int(log.stat().st_size * kept)])
    assert lab.restart()
    assert lab.holds(*chain, *range(6)) == [True] * 9
    assert all(lab.read(name) for name in (*chain, *range(6)))
    lab.check()
    assert lab.restart()
    assert lab.holds(*chain, *range(6)) == [True] * 9, "the index has learned of them"


def test_what_a_lost_tail_told_of_removals_is_a_miss_once(lab: DiskLab) -> None:
    for name in range(10):
        assert lab.write(name)
    log = index_file(lab, "log")
    before = log.read_bytes()
    for name in range(3):
        assert lab.write(("more", name))
    assert lab.do_chores()
    log.write_bytes(before)
    assert lab.restart()
    assert lab.holds(*range(3)) == [True] * 3, "the index says so"
    assert [lab.read(name) for name in range(3)] == [False] * 3
    assert lab.holds(*range(3)) == [False] * 3
    assert all(lab.read(("more", name)) for name in range(3) if lab.holds(("more", name)) == [True])
    lab.check()


# Files that nobody knows


def test_a_sweep_finds_chunks_and_those_that_hang_below_them(lab: DiskLab) -> None:
    assert lab.write("known")
    put_beside(lab, "first")
    put_beside(lab, "second", "first")
    assert lab.restart()
    assert lab.holds("known", "first", "second") == [True] * 3
    assert all(lab.read(name) for name in ("known", "first", "second"))
    lab.check()


def test_an_older_file_of_a_known_chunk_goes(lab: DiskLab) -> None:
    older = put_beside(lab, "a")
    assert lab.write("a")
    known = lab.path_of("a")
    assert lab.restart()
    assert lab.do_chores()
    assert files_below(lab.root, "shards") == [known]
    assert not older.exists()
    assert lab.read("a")
    lab.check()


@pytest.mark.parametrize("harm", ["name", "header", "text", "other"])
def test_strange_files_are_put_away_and_never_served(lab: DiskLab, harm: str) -> None:
    assert lab.write("known")
    path = put_beside(lab, "strange")
    if harm == "name":
        path = path.rename(path.with_name("notes"))
    elif harm == "header":
        data = bytearray(path.read_bytes())
        data[200] ^= 1
        path.write_bytes(data)
    elif harm == "text":
        path.write_bytes(b"hello")
    else:
        other = shard_key(chunk_key("other"), SHARD).hex()
        path = path.rename(path.with_name(f"{other}-{7:016x}.kvs"))
    assert lab.restart()
    assert lab.corrupt == 1
    assert lab.do_chores()
    assert not path.exists()
    assert [p.name for p in files_below(lab.root, "quarantine")] == [path.name]
    assert lab.holds("strange", "other", "known") == [False, False, True]
    lab.check()


def test_what_was_being_written_is_gone(lab: DiskLab) -> None:
    assert lab.write("a")
    half = Path(lab.root, "incoming", "half")
    half.write_bytes(b"x" * 4096)
    assert lab.restart()
    assert not half.exists()
    lab.check()


def test_a_swept_chunk_for_which_there_is_no_room_goes(tmp_path: Path) -> None:
    lab = DiskLab(tmp_path, chunks=3, files=FaultyFiles())
    lab.open()
    for name in range(3):
        assert lab.write(name)
    beside = put_beside(lab, "beside")
    assert lab.restart()
    assert lab.do_chores()
    assert not beside.exists()
    assert lab.holds(*range(3), "beside") == [True, True, True, False]
    lab.check()
    lab.close()


def test_a_large_directory_is_swept_in_parts(lab: DiskLab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in range(5):
        assert lab.write(name)
    beside = [put_beside(lab, ("beside", number)) for number in range(4)]
    damage(beside[0])
    lab.shard_files.close()
    lab.shard_files.lock()
    assert SWEEP_WHOLE_CHUNKS > 5
    assert lab.shard_files.open().unswept == ("shards",)
    monkeypatch.setattr(shard_files, "SWEEP_WHOLE_CHUNKS", 4)
    parts = lab.shard_files.open().unswept
    assert parts == tuple(f"shards/{start:02x}" for start in range(256))
    assert lab.restart()
    assert len(lab.tier) == 9
    assert lab.volume.accepts
    assert all(lab.read(("beside", number)) for number in range(1, 4))
    assert not lab.read(("beside", 0))
    lab.check()


def test_nothing_is_written_while_a_sweep_fails(tmp_path: Path) -> None:
    """A file that is not known yet takes room of which nobody knows."""
    files = FaultyFiles()
    lab = DiskLab(tmp_path, chunks=3, files=files)
    lab.open()
    for name in range(2):
        assert lab.write(name)
    put_beside(lab, "beside")
    # The open lists what is being written and what was put away; the sweep lists the shards.
    files.inject(FileFailure(operations=(FileOperation.LIST,), path="shards", last=EVER))
    assert lab.restart()
    assert not lab.volume.accepts
    assert lab.tier.state[0] == "failing"
    assert not lab.write("more")
    assert lab.read(0)
    files.inject()
    lab.clock.advance(60)
    assert lab.write("more")
    assert bytes_on_disk(lab.root) <= lab.capacity_bytes
    lab.check()
    lab.close()
