"""The disk tier: bounded at every instant, found again, honest about what it lost."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import (
    HEALTH_BACKOFF_S_MAX,
    HEALTH_BACKOFF_S_MIN,
    QUARANTINE_FILES_MAX,
    READ_FAILURES_MAX,
)
from kvtier.errors import DeadlineError, TierError
from kvtier.testing.fault_files import EVER, FaultyFiles, FileFailure, FileOperation
from kvtier.testing.policy_machine import chunk_key
from kvtier.types import Entry, ShardId
from tests.lib.disk_lab import (
    CODEC,
    NAMESPACE,
    BoundedFiles,
    DiskLab,
    aligned,
    bytes_on_disk,
    describe,
    files_below,
    fill_slot,
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[DiskLab]:
    made = DiskLab(tmp_path, chunks=10)
    assert made.tier.state == ("opening", "reading the index")
    assert made.open()
    assert made.tier.state == ("ok", "")
    yield made
    made.close()


def write_chain(lab: DiskLab, name: str, length: int) -> list[str]:
    names = [f"{name}{depth}" for depth in range(length)]
    for depth, each in enumerate(names):
        assert lab.write(each, names[depth - 1] if depth else None)
    return names


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-4096] ^= 1
    path.write_bytes(data)


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
        assert len(lab.tier.index) == 10
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
        assert len(lab.tier.index) == 10
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

    def test_orphans_are_reclaimed_at_the_next_open(self, lab: DiskLab) -> None:
        chain = write_chain(lab, "chain", 4)
        lab.path_of(chain[1]).unlink()
        assert lab.restart()
        assert lab.holds(*chain) == [True, False, False, False]
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
        assert lab.restart()
        (record,) = lab.tier.index
        assert list(record.places) == [ShardId(0, 0, 0)]
        assert record.entry.nbytes == sum(place.nbytes for place in record.places.values())
        lab.check()
        lab.close()

    def test_forged_parents_in_a_ring_are_not_followed_for_ever(self, lab: DiskLab) -> None:
        for name, parent in (("x", "y"), ("y", "x"), ("z", "z")):
            entry = Entry(chunk_key(name), chunk_key(parent), lab.chunk_bytes, 1)
            slot = aligned(lab.chunk_bytes)
            fill_slot(slot, entry.key, ShardId(0, 0, 0))
            path = lab.shard_files.new_path(entry.key, ShardId(0, 0, 0))
            lab.shard_files.write(path, slot, describe(entry, ShardId(0, 0, 0)))
        assert lab.restart()
        assert len(lab.tier.index) == 0
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


class TestHealth:
    @pytest.fixture
    def files(self) -> FaultyFiles:
        return FaultyFiles()

    @pytest.fixture
    def lab(self, tmp_path: Path, files: FaultyFiles) -> Iterator[DiskLab]:
        made = DiskLab(tmp_path / "tier", chunks=10, files=files)
        made.open()
        yield made
        made.close()

    @pytest.mark.parametrize(
        ("code", "word"),
        [
            (errno.ENOSPC, "full"),
            (errno.EDQUOT, "full"),
            (errno.EROFS, "read_only"),
            (errno.EACCES, "read_only"),
            (errno.EIO, "failing"),
        ],
    )
    def test_a_disk_that_takes_nothing_serves_what_it_has(
        self, lab: DiskLab, files: FaultyFiles, code: int, word: str
    ) -> None:
        assert lab.write("a")
        files.inject(FileFailure(operations=(FileOperation.CREATE,), errno=code, last=EVER))
        assert not lab.write("b")
        assert lab.tier.state[0] == word
        assert lab.tier.readable()
        assert not lab.tier.writable()
        assert lab.read("a")
        assert lab.tier.state[0] == word, "a read does not heal a write"
        lab.clock.advance(HEALTH_BACKOFF_S_MIN)
        assert lab.tier.writable()
        assert not lab.write("b")
        assert not lab.tier.writable()
        files.inject()
        lab.clock.advance(2 * HEALTH_BACKOFF_S_MIN)
        assert lab.write("b")
        assert lab.tier.state == ("ok", "")
        lab.check()

    def test_several_failed_reads_in_a_row_pause_reads(
        self, lab: DiskLab, files: FaultyFiles
    ) -> None:
        assert lab.write("a")
        files.inject(FileFailure(operations=(FileOperation.READ,), last=EVER))
        for _ in range(READ_FAILURES_MAX):
            assert lab.tier.readable()
            assert not lab.read("a")
            assert lab.holds("a") == [True], "a disk that does not answer has not lost it"
        assert not lab.tier.readable()
        assert lab.tier.writable()
        assert lab.tier.state[0] == "failing"
        files.inject()
        lab.clock.advance(HEALTH_BACKOFF_S_MIN)
        assert lab.tier.readable()
        assert lab.read("a")
        assert lab.tier.state == ("ok", "")

    def test_each_trouble_has_its_own_word(self, lab: DiskLab) -> None:
        lab.tier.write_failed(OSError(errno.ENOSPC, "No space left"))
        lab.tier.read_failed(OSError(errno.EIO, "Input/output error"))
        state, detail = lab.tier.state
        assert state == "full"
        assert "No space" in detail

    def test_a_late_answer_is_slow_and_a_bug_is_failing(self, lab: DiskLab) -> None:
        lab.tier.write_failed(DeadlineError("no answer in time"))
        assert lab.tier.state == ("slow", "no answer in time")
        lab.tier.write_failed(TierError("storage work failed"))
        assert lab.tier.state[0] == "failing"

    @pytest.mark.parametrize("replace", [False, True], ids=["removed", "replaced"])
    @pytest.mark.parametrize("notice", ["write", "read"])
    def test_a_directory_that_goes_away_is_missing_and_comes_back_empty(
        self, lab: DiskLab, replace: bool, notice: str
    ) -> None:
        chain = write_chain(lab, "chain", 3)
        root = Path(lab.root)
        root.rename(root.with_name("moved"))
        if replace:
            root.mkdir()
        assert not (lab.write("new") if notice == "write" else lab.read(chain[0]))
        assert lab.tier.state[0] == "missing"
        assert not lab.tier.opened
        assert not lab.tier.readable()
        assert not lab.tier.writable()
        assert not lab.tier.open_due()
        lab.clock.advance(HEALTH_BACKOFF_S_MAX)
        assert lab.tier.open_due()
        assert lab.open()
        assert lab.tier.state == ("ok", "")
        assert len(lab.tier.index) == 0
        assert lab.write("new")
        assert lab.read("new")
        lab.check()

    def test_a_directory_that_comes_back_has_what_it_had(self, lab: DiskLab) -> None:
        chain = write_chain(lab, "chain", 3)
        root = Path(lab.root)
        away = root.rename(root.with_name("away"))
        assert not lab.read(chain[0])
        away.rename(root)
        lab.clock.advance(HEALTH_BACKOFF_S_MAX)
        assert lab.open()
        assert lab.holds(*chain) == [True] * 3
        assert [lab.read(name) for name in chain] == [True] * 3
        lab.check()

    def test_an_open_that_fails_is_tried_again_later_and_later(
        self, tmp_path: Path, files: FaultyFiles
    ) -> None:
        lab = DiskLab(tmp_path / "other", chunks=2, files=files)
        files.inject(FileFailure(operations=(FileOperation.LIST,), errno=errno.EACCES, last=EVER))
        for step in range(3):
            assert lab.tier.open_due()
            assert not lab.open()
            assert lab.tier.state[0] == "read_only"
            assert not lab.tier.open_due()
            lab.clock.advance(HEALTH_BACKOFF_S_MIN * 2**step)
        files.inject()
        assert lab.tier.open_due()
        assert lab.open()
        assert lab.tier.state == ("ok", "")
        assert not lab.tier.open_due()
        lab.close()

    def test_a_file_that_vanishes_is_absent_and_the_disk_is_well(self, lab: DiskLab) -> None:
        assert lab.write("a")
        lab.path_of("a").unlink()
        assert not lab.read("a")
        assert lab.holds("a") == [False]
        assert lab.tier.state == ("ok", "")
        assert lab.write("a")
        assert lab.read("a")
        lab.check()

    def test_chores_that_fail_are_done_later(self, lab: DiskLab, files: FaultyFiles) -> None:
        for name in range(10):
            assert lab.write(name)
        damage(lab.path_of(5))
        assert not lab.read(5)
        for name in (3, 4):
            (record,) = (r for r in lab.tier.index if r.entry.key == chunk_key(name))
            lab.tier.forget(record)
        fault = FileFailure(
            operations=(FileOperation.REMOVE, FileOperation.REPLACE), nth=2, last=EVER
        )
        files.inject(fault)
        for _ in range(3):
            assert not lab.do_chores()
            assert lab.tier.used_bytes >= bytes_on_disk(lab.root)
        files.inject()
        lab.check()
        assert len(lab.tier.index) == 7


def test_a_reopen_does_not_bring_back_what_was_to_go(lab: DiskLab) -> None:
    """Between two opens chores may wait; a file is either the books' or to be removed."""
    for name in range(5):
        assert lab.write(name)
    records = {record.entry.key: record for record in lab.tier.index}
    lab.tier.forget(records[chunk_key(0)])
    lab.tier.condemn(records[chunk_key(1)], ShardId(0, 0, 0))
    leaving = lab.tier.index.lease([records[chunk_key(2)]])
    lab.tier.forget(records[chunk_key(2)])
    assert lab.open()
    assert lab.holds(*range(5)) == [False] * 3 + [True] * 2
    leaving.release()
    lab.check()
    for name in range(5):
        if not lab.holds(name)[0]:
            assert lab.write(name)
    assert [lab.read(name) for name in range(5)] == [True] * 5
    lab.check()


def test_a_reopen_counts_what_is_put_away_once(lab: DiskLab) -> None:
    """Found damaged by an open while a reader still has it, and by that reader."""
    for name in range(3):
        assert lab.write(name)
    path = lab.path_of(0)
    path.write_bytes(path.read_bytes()[:4096])
    (record,) = (r for r in lab.tier.index if r.entry.key == chunk_key(0))
    reader = lab.tier.index.lease([record])
    lab.tier.condemn(record, ShardId(0, 0, 0))
    assert lab.open()
    reader.release()
    lab.check()
    assert lab.tier.quarantined_count == 1


def test_a_reopen_after_chores_that_failed_counts_nothing_twice(tmp_path: Path) -> None:
    files = FaultyFiles()
    lab = DiskLab(tmp_path, chunks=4, files=files)
    lab.open()
    for name in range(4):
        assert lab.write(name)
    for name in (0, 1):
        damage(lab.path_of(name))
        assert not lab.read(name)
    assert lab.do_chores()
    assert lab.tier.quarantined_count == 2
    # Room for a new chunk is made from what is kept; the removal fails.
    files.inject(FileFailure(operations=(FileOperation.REMOVE,), path="quarantine", last=EVER))
    for fresh in ("new", "newer", "newest"):
        assert not lab.write(fresh)
        lab.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert lab.open()
    files.inject()
    lab.check()
    for fresh in ("new", "newer"):
        assert lab.write(fresh)
    lab.check()
    lab.close()


class TestHalfDoneChores:
    """A file was put away, then a removal failed: both are to be done again."""

    @pytest.fixture
    def lab(self, tmp_path: Path) -> Iterator[DiskLab]:
        files = FaultyFiles()
        made = DiskLab(tmp_path, chunks=4, files=files)
        made.open()
        for name in range(4):
            assert made.write(name)
        damage(made.path_of(0))
        assert not made.read(0)
        (record,) = (r for r in made.tier.index if r.entry.key == chunk_key(1))
        made.tier.forget(record)
        files.inject(FileFailure(operations=(FileOperation.REMOVE,), last=EVER))
        assert not made.do_chores()
        assert len(files_below(made.root, "quarantine")) == 1
        files.inject()
        made.clock.advance(HEALTH_BACKOFF_S_MAX)
        yield made
        made.check()
        made.close()

    def test_they_are_done_again(self, lab: DiskLab) -> None:
        lab.check()
        assert lab.tier.quarantined_count == 1

    def test_a_reopen_counts_them_once(self, lab: DiskLab) -> None:
        assert lab.open()
        assert lab.tier.used_bytes == bytes_on_disk(lab.root)
        assert lab.tier.quarantined_count == 1

    def test_what_was_put_away_makes_room_too(self, lab: DiskLab) -> None:
        targets = [
            lab.tier.reserve(lab.entry(fresh), NAMESPACE, CODEC, lab.sizes) for fresh in "ab"
        ]
        assert lab.do_chores()
        assert files_below(lab.root, "quarantine") == []
        for target in targets:
            assert target is not None
            lab.write_files(target)
            lab.tier.commit(target)


def test_a_reopen_leaves_alone_what_is_about_to_be_written(lab: DiskLab) -> None:
    target = lab.tier.reserve(lab.entry("a"), NAMESPACE, CODEC, lab.sizes)
    assert target is not None
    assert lab.open()
    lab.write_files(target)
    lab.tier.commit(target)
    assert lab.read("a")
    lab.check()
