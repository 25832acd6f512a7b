"""The disk tier: bounded at every instant, found again, honest about what it lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import QUARANTINE_FILES_MAX
from kvtier.shard_format import seal
from kvtier.testing.policy_machine import chunk_key
from kvtier.types import Entry, ShardId
from tests.lib.disk_lab import (
    CODEC,
    NAMESPACE,
    BoundedFiles,
    DiskLab,
    aligned,
    bytes_on_disk,
    damage,
    describe,
    files_below,
    fill_slot,
    write_chain,
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[DiskLab]:
    made = DiskLab(tmp_path, chunks=10)
    assert made.tier.state == ("opening", "reading the index")
    assert made.open()
    assert made.tier.state == ("ok", "")
    yield made
    made.close()


class TestBound:
    def test_b41_a_restart_knows_what_is_there_and_never_overruns(self, lab: DiskLab) -> None:
        for name in range(8):
            assert lab.write(name)
        assert lab.restart()
        assert lab.tier.used_bytes == bytes_on_disk(lab.root) == 8 * lab.chunk_bytes
        for name in range(8, 16):
            assert lab.write(name)
        assert isinstance(lab.files, BoundedFiles)
        assert lab.files.bytes_max == lab.capacity_bytes
        assert [lab.read(name) for name in range(16)] == [False] * 6 + [True] * 10
        lab.check()

    def test_b116_two_workers_share_one_bound(self, tmp_path: Path) -> None:
        lab = DiskLab(tmp_path, chunks=10, shards=2)
        lab.open()
        for name in range(30):
            assert lab.write(name)
        lab.check()
        assert len(lab.tier) == 10
        assert len(files_below(lab.root)) == 20
        lab.close()

    def test_a_chunk_that_is_read_while_it_is_condemned_keeps_the_bound(self, lab: DiskLab) -> None:
        for name in range(10):
            assert lab.write(name)
        damage(lab.path_of(0))
        other = lab.tier.index.lease(list(lab.tier.index)[:1])
        assert not lab.read(0)
        # Its bytes lie there until the other reader is done.
        assert not lab.write("early")
        assert lab.tier.used_bytes == bytes_on_disk(lab.root) == lab.capacity_bytes
        other.release()
        assert lab.write("late")
        lab.check()

    def test_a_full_disk_makes_room_from_its_quarantine(self, lab: DiskLab) -> None:
        for name in range(10):
            assert lab.write(name)
        for name in range(4):
            damage(lab.path_of(name))
            assert not lab.read(name)
        for name in range(4):
            assert lab.write(name)
        lab.check()
        assert len(lab.tier) == 10
        assert files_below(lab.root, "quarantine") == []

    def test_a_smaller_capacity_after_a_restart_is_kept(self, lab: DiskLab) -> None:
        chain = write_chain(lab, "chain", 4)
        for name in range(6):
            assert lab.write(name)
        lab.touch(*reversed(chain))
        assert lab.restart(capacity_chunks=5)
        lab.check()
        assert lab.tier.used_bytes <= 5 * lab.chunk_bytes
        for record in lab.tier.index:
            parent = record.entry.parent
            assert parent is None or lab.tier.index.get(parent) is not None

    def test_a_chunk_larger_than_the_disk_is_refused(self, tmp_path: Path) -> None:
        lab = DiskLab(tmp_path, chunks=1)
        lab.open()
        assert lab.write("a")
        sizes = dict.fromkeys((ShardId(0, 0, n) for n in range(2)), lab.chunk_bytes)
        entry = Entry(chunk_key("b"), None, 2 * lab.chunk_bytes, 0)
        assert lab.tier.reserve(entry, NAMESPACE, CODEC, sizes) is None
        assert lab.read("a")
        lab.check()
        lab.close()


class TestReachability:
    def test_a_chunk_whose_parent_is_not_there_is_refused(self, lab: DiskLab) -> None:
        assert not lab.write("child", "nobody")
        assert files_below(lab.root) == []

    def test_leaves_go_first_so_every_chunk_can_be_reached(
        self, lab: DiskLab, rng: random.Random
    ) -> None:
        names: list[str] = []
        for turn in range(100):
            parent = rng.choice([*names[-8:], None])
            if lab.write(f"n{turn}", parent):
                names.append(f"n{turn}")
            for record in lab.tier.index:
                above = record.entry.parent
                assert above is None or lab.tier.index.get(above) is not None
        lab.check()

    def test_what_hangs_below_a_file_that_is_gone_is_first_to_leave(self, lab: DiskLab) -> None:
        chain = write_chain(lab, "chain", 4)
        lab.path_of(chain[1]).unlink()
        for name in range(6):
            assert lab.write(name)
        lab.lose_index()
        assert lab.restart()
        assert lab.holds(*chain) == [True, False, True, True]
        for name in range(6, 9):
            assert lab.write(name)
        assert lab.evicted == [chunk_key(chain[3]), chunk_key(chain[2])]
        lab.check()

    def test_a_lost_middle_chunk_is_written_again_and_reaches_the_rest(self, lab: DiskLab) -> None:
        chain = write_chain(lab, "chain", 4)
        damage(lab.path_of(chain[1]))
        assert not lab.read(chain[1])
        assert lab.holds(*chain) == [True, False, True, True]
        assert lab.write(chain[1], chain[0])
        assert [lab.read(name) for name in chain] == [True] * 4
        assert lab.restart()
        assert lab.holds(*chain) == [True] * 4
        lab.check()

    def test_descendants_of_a_lost_chunk_are_the_first_to_leave(self, lab: DiskLab) -> None:
        chain = write_chain(lab, "chain", 4)
        for name in range(6):
            assert lab.write(name)
        lab.touch(*reversed(chain))
        damage(lab.path_of(chain[1]))
        assert not lab.read(chain[1])
        for n in range(3):
            assert lab.write(("new", n))
        assert lab.evicted == [chunk_key(chain[3]), chunk_key(chain[2])]


class TestRestart:
    def test_everything_is_found_again(self, lab: DiskLab) -> None:
        chain = write_chain(lab, "chain", 5)
        for _ in range(3):
            assert lab.restart()
            assert [lab.read(name) for name in chain] == [True] * 5
            lab.check()
        assert lab.corrupt == 0

    def test_the_order_of_leaving_survives(self, tmp_path: Path) -> None:
        lab = DiskLab(tmp_path, chunks=6)
        lab.open()
        write_chain(lab, "old", 3)
        write_chain(lab, "new", 3)
        assert lab.restart()
        for n in range(3):
            assert lab.write(n)
        assert lab.evicted == [chunk_key(f"old{depth}") for depth in (2, 1, 0)]
        lab.close()

    def test_half_a_chunk_after_a_crash_is_known_as_half(self, tmp_path: Path) -> None:
        lab = DiskLab(tmp_path, chunks=4, shards=2)
        lab.open()
        assert lab.write("a")
        lab.path_of("a", group=1).unlink()
        lab.lose_index()
        assert lab.restart()
        record = lab.tier.ready(chunk_key("a"))
        assert record is not None
        assert list(record.places) == [ShardId(0, 0, 0)]
        assert record.entry.nbytes == sum(place.nbytes for place in record.places.values())
        lab.check()
        lab.close()

    def test_forged_parents_in_a_ring_are_not_followed_for_ever(self, lab: DiskLab) -> None:
        for name, parent in (("x", "y"), ("y", "x"), ("z", "z")):
            entry = Entry(chunk_key(name), chunk_key(parent), lab.chunk_bytes, 1)
            slot = aligned(lab.chunk_bytes)
            fill_slot(slot, entry.key, ShardId(0, 0, 0))
            number = lab.shard_files.new_generations(1)
            path = lab.shard_files.path(entry.key, ShardId(0, 0, 0), number)
            seal(slot, describe(entry, ShardId(0, 0, 0)))
            lab.shard_files.write(path, slot)
        lab.lose_index()
        assert lab.restart()
        for number_of in range(10):
            assert lab.write(number_of)
        assert set(lab.evicted) == {chunk_key(name) for name in "xyz"}
        lab.check()


class TestQuarantine:
    def test_b78_a_bit_flip_is_a_miss_counted_and_written_again(self, lab: DiskLab) -> None:
        assert lab.write("a")
        damage(lab.path_of("a"))
        assert not lab.read("a")
        assert lab.corrupt == 1
        assert lab.holds("a") == [False]
        lab.check()
        assert lab.tier.quarantined_count == 1
        assert lab.write("a")
        assert lab.read("a")
        assert lab.tier.state == ("ok", "")

    def test_the_number_of_kept_files_is_bounded(self, tmp_path: Path) -> None:
        lab = DiskLab(tmp_path, chunks=3 * QUARANTINE_FILES_MAX)
        lab.open()
        for name in range(2 * QUARANTINE_FILES_MAX):
            assert lab.write(name)
            damage(lab.path_of(name))
            assert not lab.read(name)
            assert lab.write(name)
            lab.check()
        assert lab.tier.quarantined_count == QUARANTINE_FILES_MAX
        assert lab.restart()
        lab.check()
        assert lab.tier.quarantined_count == QUARANTINE_FILES_MAX
        lab.close()

    def test_an_open_that_finds_many_bad_files_keeps_few(self, tmp_path: Path) -> None:
        lab = DiskLab(tmp_path, chunks=3 * QUARANTINE_FILES_MAX)
        lab.open()
        for name in range(2 * QUARANTINE_FILES_MAX):
            assert lab.write(name)
            lab.path_of(name).write_bytes(b"nonsense")
        lab.lose_index()
        assert lab.restart()
        assert lab.corrupt == 2 * QUARANTINE_FILES_MAX
        lab.check()
        assert lab.tier.quarantined_count == QUARANTINE_FILES_MAX
        lab.close()

    def test_a_condemned_chunk_waits_for_its_readers(self, lab: DiskLab) -> None:
        assert lab.write("a")
        path = lab.path_of("a")
        damage(path)
        (record,) = lab.tier.index
        lease = lab.tier.index.lease([record])
        assert not lab.read("a")
        lab.do_chores()
        assert path.exists()
        lease.release()
        lab.check()
        assert not path.exists()
