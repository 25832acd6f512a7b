"""Moments at which a process was killed and went wrong afterwards, each on its own."""

from __future__ import annotations

from pathlib import Path

from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk.journal import Changes
from kvtier.types import ShardId
from tests.lib.disk_lab import DiskLab
from tests.lib.disk_shelves import CHUNK_BYTES, DiskShelves

CHUNKS = 4


def forget_in_index(lab: DiskLab | DiskShelves, name: str) -> None:
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
