"""Several directories of one disk tier: where chunks go, what leaves, what one of them costs."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import HEALTH_BACKOFF_S_MAX, READ_FAILURES_MAX
from kvtier.testing.fault_files import EVER, FileFailure, FileOperation
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk import tier
from kvtier.types import ShardId
from tests.lib.disk_lab import damage, files_below
from tests.lib.disk_shelves import CHUNK_BYTES, DiskShelves, sizes_of

ONE = ShardId(0, 0, 0)
WRITES = (FileOperation.CREATE, FileOperation.REPLACE, FileOperation.REMOVE, FileOperation.APPEND)


def shelves_over(folder: Path, count: int, chunks: int) -> DiskShelves:
    """Open directories with room for so many chunks of one shard each."""
    made = DiskShelves(folder, count=count, share_bytes=chunks * CHUNK_BYTES)
    assert made.open() == [True] * count
    return made


@pytest.fixture
def two(tmp_path: Path) -> Iterator[DiskShelves]:
    made = shelves_over(tmp_path, 2, 6)
    yield made
    made.close()


def per_directory(shelves: DiskShelves) -> list[int]:
    return [len(files_below(root, "shards")) for root in shelves.roots]


# Where chunks go


@pytest.mark.parametrize("count", [2, 3])
def test_chunks_spread_evenly(tmp_path: Path, count: int) -> None:
    shelves = shelves_over(tmp_path, count, 6)
    for name in range(6 * count):
        assert shelves.write(name)
        there = per_directory(shelves)
        assert max(there) - min(there) <= 1
    assert per_directory(shelves) == [6] * count
    assert shelves.evicted == []
    assert all(shelves.read(name) for name in range(6 * count))
    shelves.check()
    shelves.close()


@pytest.mark.parametrize("count", [2, 3])
def test_they_stay_even_while_others_leave(tmp_path: Path, count: int) -> None:
    shelves = shelves_over(tmp_path, count, 4)
    for name in range(12 * count):
        assert shelves.write(name)
    shelves.do_chores()
    there = per_directory(shelves)
    assert max(there) - min(there) <= 1
    assert sum(there) == 4 * count
    assert shelves.holds(*range(8 * count)) == [False] * 8 * count, "the oldest left"
    shelves.check()
    shelves.close()


def test_a_child_is_written_wherever_its_parent_lies(two: DiskShelves) -> None:
    names: list[int] = []
    for name in range(8):
        assert two.write(name, name - 1 if name else None)
        names.append(two.where(name))
    assert set(names) == {0, 1}
    assert not two.write("orphan", "nobody")
    two.check()


def test_a_chunk_larger_than_a_share_is_refused_and_drives_nothing_out(two: DiskShelves) -> None:
    for name in range(12):
        assert two.write(name)
    nbytes = sum(sizes_of(5).values())
    assert two.share_bytes < nbytes < two.tier.capacity_bytes
    assert not two.write("large", shards=5)
    assert two.holds(*range(12)) == [True] * 12
    assert two.evicted == []
    two.restart()
    assert not two.write("large", shards=5)
    assert len(two.tier) == 12, "nothing that was not used yet either"
    two.check()


# What leaves


def test_what_leaves_may_lie_elsewhere_than_room_is_needed(two: DiskShelves) -> None:
    """Four small ones of each directory were used last; the others are not enough in either."""
    for name in range(12):
        assert two.write(name)
    for name in range(4, 12):
        two.touch(name)
    assert sum(sizes_of(2).values()) > 2 * CHUNK_BYTES
    assert two.write("large", shards=2)
    two.check()
    gone = [name for name in range(12) if two.holds(name) == [False]]
    assert set(gone) >= {0, 1, 2, 3}
    assert len(gone) <= 6, "no more than must"
    assert two.read("large")


def test_the_cold_leave_until_one_directory_has_room(
    two: DiskShelves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "wall_clock_ms", itertools.count(1).__next__)
    for name in range(12):
        assert two.write(name)
    two.restart()
    assert two.write("large", shards=2)
    gone = [name for name in range(12) if two.holds(name) == [False]]
    assert gone == list(range(len(gone))), "the coldest first"
    assert len(gone) <= 5
    two.check()


def test_stores_go_on_where_the_oldest_lie_in_a_directory_that_takes_no_writes(
    two: DiskShelves,
) -> None:
    for name in range(12):
        assert two.write(name)
    second = [name for name in range(12) if two.where(name) == 1]
    for name in second:
        two.touch(name)
    two.files[0].inject(FileFailure(operations=WRITES, errno=errno.EROFS, last=EVER))
    two.volumes[0].write_failed(OSError(errno.EROFS, "Read-only file system"))
    for fresh in range(100, 106):
        assert two.write(fresh)
        assert two.where(fresh) == 1
    assert two.tier.state == ("read_only", f"{two.roots[0]}: [Errno 30] Read-only file system")


def test_a_reader_keeps_its_chunk_whoever_needs_the_room(two: DiskShelves) -> None:
    for name in range(12):
        assert two.write(name)
    record = two.tier.ready(chunk_key(0))
    assert record is not None
    lease = two.tier.index.lease([record])
    for fresh in range(100, 130):
        two.write(fresh)
        two.tier.check_integrity()
    assert two.holds(0) == [True]
    lease.release()
    assert two.read(0)
    two.check()


def test_each_directory_counts_what_it_put_away(two: DiskShelves) -> None:
    for name in range(6):
        assert two.write(name)
    spoiled = next(name for name in range(6) if two.where(name) == 1)
    (path,) = two.paths_of(spoiled)
    damage(path)
    assert not two.read(spoiled)
    two.check()
    assert [volume.quarantined_count for volume in two.volumes] == [0, 1]
    assert two.tier.quarantined_count == 1
    assert two.tier.state == ("ok", "")
    assert two.write(spoiled)
    assert two.read(spoiled)
    two.check()


# One of them fails


@pytest.mark.parametrize("number", [0, 1])
def test_one_that_does_not_open_is_named_and_the_other_works(tmp_path: Path, number: int) -> None:
    shelves = DiskShelves(tmp_path, count=2, share_bytes=6 * CHUNK_BYTES)
    shelves.roots[number].write_text("in the way")
    assert shelves.open() == [number != 0, number != 1]
    assert shelves.tier.opened
    assert shelves.tier.readable()
    word, detail = shelves.tier.state
    assert word == "unavailable"
    assert detail.startswith(f"{shelves.roots[number]}: ")
    for name in range(8):
        assert shelves.write(name)
    assert shelves.holds(*range(8)) == [False] * 2 + [True] * 6, "half of the room"
    shelves.roots[number].unlink()
    shelves.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert shelves.volumes[number].open_due
    assert shelves.open(number) == [True]
    assert shelves.tier.state == ("ok", "")
    for name in range(6):
        shelves.write(("more", name))
    assert per_directory(shelves) == [6, 6]
    shelves.check()
    shelves.close()


@pytest.mark.parametrize(
    ("code", "word"),
    [(errno.ENOSPC, "full"), (errno.EIO, "failing"), (errno.EROFS, "read_only")],
)
@pytest.mark.parametrize("number", [0, 1])
def test_one_that_takes_no_writes_is_read_and_the_other_is_written(
    two: DiskShelves, number: int, code: int, word: str
) -> None:
    for name in range(6):
        assert two.write(name)
    two.files[number].inject(FileFailure(operations=WRITES, errno=code, last=EVER))
    stored = [name for name in range(10, 20) if two.write(name)]
    assert len(stored) >= 9, "one of them found out"
    assert two.tier.state[0] == word
    assert two.tier.state[1].startswith(f"{two.roots[number]}: ")
    assert two.tier.writable()
    kept = [name for name in (*range(6), *stored) if two.holds(name) == [True]]
    assert all(two.read(name) for name in kept)
    assert {two.where(name) for name in stored if name in kept} == {1 - number}
    two.tier.check_integrity()
    two.files[number].inject()
    two.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert two.volumes[number].write_probe_due
    for name in range(30, 36):
        assert two.write(name)
    assert two.tier.state == ("ok", "")
    two.check()


@pytest.mark.parametrize("number", [0, 1])
def test_one_whose_reads_fail_is_left_alone_and_its_chunks_go_elsewhere(
    two: DiskShelves, number: int
) -> None:
    for name in range(8):
        assert two.write(name)
    ill = [name for name in range(8) if two.where(name) == number]
    well = [name for name in range(8) if two.where(name) != number]
    two.files[number].inject(FileFailure(operations=(FileOperation.READ,), last=EVER))
    for _ in range(READ_FAILURES_MAX):
        assert not two.read(ill[0])
    assert two.tier.readable()
    assert all(two.read(name) for name in well)
    assert not any(two.tier.ready(chunk_key(name)) for name in ill), "a lookup does not see them"
    assert all(two.tier.ready(chunk_key(name)) for name in well)
    assert two.tier.state[1].startswith(f"{two.roots[number]}: ")

    assert two.holds(ill[0]) == [True], "it may come back"
    two.tier.displace(chunk_key(ill[0]), {ONE})
    assert two.holds(ill[0]) == [False]
    assert two.write(ill[0])
    assert two.where(ill[0]) == 1 - number
    assert two.read(ill[0])

    two.files[number].inject()
    two.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert two.volumes[number].read_probe_due
    two.shard_files[number].probe()
    two.volumes[number].read_succeeded()
    assert two.tier.state == ("ok", "")
    assert all(two.read(name) for name in (*ill, *well))
    two.check()


def test_nothing_is_displaced_that_can_be_read_or_has_nowhere_to_go(two: DiskShelves) -> None:
    for name in range(4):
        assert two.write(name)
    mine = next(name for name in range(4) if two.where(name) == 0)
    two.tier.displace(chunk_key(mine), {ONE})
    assert two.holds(mine) == [True], "it can be read"
    for _ in range(READ_FAILURES_MAX):
        two.volumes[0].read_failed(OSError(errno.EIO, "no"))
    two.volumes[1].write_failed(OSError(errno.EIO, "no"))
    two.tier.displace(chunk_key(mine), {ONE})
    assert two.holds(mine) == [True], "nobody else takes it"
    two.clock.advance(HEALTH_BACKOFF_S_MAX)
    two.volumes[1].write_succeeded()
    two.volumes[0].read_succeeded()
    two.tier.displace(chunk_key(mine), {ONE, ShardId(1, 0, 0)})
    assert two.holds(mine) == [False], "it lacks a shard"
    two.check()


# One is pulled out and comes back


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("notice", ["read", "write"])
def test_one_that_is_pulled_out_comes_back_with_what_nobody_stored_again(
    two: DiskShelves, number: int, notice: str
) -> None:
    for name in range(8):
        assert two.write(name)
    lost = [name for name in range(8) if two.where(name) == number]
    kept = [name for name in range(8) if two.where(name) != number]
    two.pull_out(number)
    if notice == "read":
        assert not two.read(lost[0])
    else:
        assert [two.write("x"), two.write("y")].count(False) == 1
    assert not two.volumes[number].opened
    assert two.tier.opened
    assert two.tier.state[0] == "missing"
    assert two.tier.state[1].startswith(f"{two.roots[number]}: ")
    assert not any(two.tier.ready(chunk_key(name)) for name in lost)
    assert all(two.read(name) for name in kept)

    again = lost[0]
    two.tier.displace(chunk_key(again), {ONE})
    assert two.write(again)
    assert two.where(again) == 1 - number
    assert not two.roots[number].exists(), "nothing is written where a directory was"

    two.plug_in(number)
    two.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert two.open(number) == [True]
    assert two.where(again) == 1 - number
    assert all(two.read(name) for name in (*lost, *kept))
    two.check()
    assert len(two.paths_of(again)) == 1


def test_chores_wait_for_a_directory_that_was_pulled_out(two: DiskShelves) -> None:
    """Nobody may note them where it was, as below the mount point of a disk."""
    for name in range(12):
        assert two.write(name)
    gone = range(4)
    for name in gone:
        record = two.tier.ready(chunk_key(name))
        assert record is not None
        two.tier.forget(record)
    two.pull_out(0)
    two.pull_out(1)
    assert not two.do_chores()
    assert not any(root.exists() for root in two.roots)
    assert two.tier.state[0] == "missing"
    two.plug_in(0)
    two.plug_in(1)
    two.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert two.open() == [True, True]
    assert two.holds(*gone) == [False] * len(gone)
    two.check()


def test_two_copies_over_a_restart_count_once(two: DiskShelves) -> None:
    """Stored again elsewhere while away, and the process ends before it comes back."""
    for name in range(6):
        assert two.write(name)
    lost = [name for name in range(6) if two.where(name) == 0]
    two.pull_out(0)
    assert not two.read(lost[0])
    for name in lost:
        two.tier.displace(chunk_key(name), {ONE})
        assert two.write(name)
    two.close()
    two.plug_in(0)
    assert two.restart() == [True, True]
    for name in range(6):
        assert two.read(name)
        if name in lost:
            assert two.where(name) == 1, "the later one counts"
    for fresh in range(100, 112):
        assert two.write(fresh)
    two.check()
    assert len(two.tier) == 12


def test_one_that_comes_back_empty_has_nothing(two: DiskShelves) -> None:
    for name in range(8):
        assert two.write(name)
    lost = [name for name in range(8) if two.where(name) == 1]
    two.pull_out(1)
    assert not two.read(lost[0])
    two.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert two.open(1) == [True]
    assert two.holds(*lost) == [False] * len(lost)
    two.check()
    assert two.volumes[1].used_bytes == 0
    assert all(two.write(name) for name in lost)
    two.check()


def test_a_directory_that_is_added_takes_its_share(tmp_path: Path) -> None:
    """A restart with one more directory and the same bound: what is over the share leaves."""
    shelves = shelves_over(tmp_path, 1, 12)
    for name in range(12):
        assert shelves.write(name)
    shelves.close()
    shelves = shelves_over(tmp_path, 2, 6)
    while shelves.tier.trim():
        shelves.do_chores()
    assert per_directory(shelves) == [6, 0]
    assert shelves.holds(*range(12)) == [False] * 6 + [True] * 6
    for name in range(20, 26):
        assert shelves.write(name)
    assert per_directory(shelves) == [6, 6]
    shelves.check()
    shelves.close()
