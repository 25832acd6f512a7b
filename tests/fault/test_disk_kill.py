"""Moments at which a process was killed and went wrong afterwards, each on its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.constants import HEALTH_BACKOFF_S_MAX
from kvtier.testing.fault_files import BitFlip, FaultyFiles
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk import journal
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.journal import Changes
from kvtier.tiers.disk.scan import Scanned
from kvtier.types import ShardId
from tests.lib.disk_lab import DiskLab
from tests.lib.disk_shelves import CHUNK_BYTES, DiskShelves

CHUNKS = 4


def forget_in_index(lab: DiskLab | DiskShelves, name: object) -> None:
    """Be killed when the index has forgotten a chunk and its files are not removed yet."""
    record = lab.tier.ready(chunk_key(name))
    assert record is not None
    generation = record.places[ShardId(0, 0, 0)].generation
    files = lab.tier.volume_of(record).files
    files.note(Changes(removed=((chunk_key(name), generation),)))


def test_what_a_sweep_finds_keeps_its_parent(tmp_path: Path) -> None:
    lab = DiskLab(tmp_path, chunks=CHUNKS)
    lab.open()
    assert lab.write("parent")
    assert lab.write("child", "parent")
    forget_in_index(lab, "child")
    assert lab.restart()
    lab.do_chores()
    assert lab.holds("parent", "child") == [True, True]
    for name in range(2 * CHUNKS):
        assert lab.write(name)
        parent, child = lab.holds("parent", "child")
        assert parent or not child, "a parent left before its child"
    assert lab.holds("parent", "child") == [False, False]
    lab.check()
    lab.close()


def test_what_a_sweep_finds_keeps_a_parent_that_another_directory_brings(tmp_path: Path) -> None:
    shelves = DiskShelves(tmp_path, count=2, share_bytes=2 * CHUNK_BYTES)
    shelves.open()
    assert shelves.write("other")
    assert shelves.write("parent")
    assert shelves.write("child", "parent")
    assert (shelves.where("parent"), shelves.where("child")) == (1, 0)
    forget_in_index(shelves, "child")
    shelves.restart()  # Sweeps the first directory before the second one is open.
    assert shelves.holds("parent", "child") == [True, True]
    for name in range(4):
        assert shelves.write(name)
        parent, child = shelves.holds("parent", "child")
        assert parent or not child, "a parent left before its child"
    assert shelves.holds("parent", "child") == [False, False]
    shelves.check()
    shelves.close()


def test_a_log_that_is_misread_is_not_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips while the index is compacted costs a try, and none of its changes."""
    faulty = FaultyFiles()
    lab = DiskLab(tmp_path, chunks=CHUNKS, files=faulty)
    lab.open()
    for name in range(3):
        assert lab.write(name)
    monkeypatch.setattr(journal, "JOURNAL_CHANGES_LOGGED", 2)
    faulty.inject(BitFlip(path="/index/log-", offset=0))
    assert not lab.write("while it is misread")
    lab.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert lab.write("afterwards")
    lab.close()
    rows = journal.Journal(lab.root, LocalFiles()).load()
    assert rows is not None
    keys = [rows.row(number).key for number in range(len(rows))]
    assert keys == [chunk_key(name) for name in (0, 1, 2, "afterwards")]


def test_what_a_sweep_has_no_room_for_is_forgotten_in_the_index(tmp_path: Path) -> None:
    lab = DiskLab(tmp_path, chunks=CHUNKS)
    lab.open()
    for name in range(CHUNKS):
        assert lab.write(name)
    record = lab.tier.ready(chunk_key(0))
    assert record is not None
    path = Path(record.places[ShardId(0, 0, 0)].path)
    row = lab.tier.row(record)
    forget_in_index(lab, 0)
    kept = path.read_bytes()
    path.unlink()
    assert lab.restart()
    assert lab.write("in its place")
    path.write_bytes(kept)
    scanned = Scanned((row,), (), ())
    lab.tier.take_in(0, scanned)
    lab.shard_files.note(Changes(added=(row,)))  # What a misread log had not told.
    lab.check()
    assert lab.restart()
    assert lab.holds(0) == [False]
    lab.check()
    lab.close()


def test_what_is_being_placed_makes_no_room_for_itself(tmp_path: Path) -> None:
    """The policy has room, no directory has, and everything else is being read."""
    shelves = DiskShelves(tmp_path, count=2, share_bytes=CHUNK_BYTES * 3 // 2)
    shelves.open()
    assert shelves.write("one")
    assert shelves.write("other")
    assert {shelves.where("one"), shelves.where("other")} == {0, 1}
    lease = shelves.tier.index.lease([*shelves.tier.index])
    assert shelves.reserve("new") is None
    shelves.tier.check_integrity()
    lease.release()
    assert shelves.write("new")
    shelves.check()
    shelves.close()
