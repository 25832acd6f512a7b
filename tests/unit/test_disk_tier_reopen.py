"""The same process opens the directory again, with readers, writes and chores under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import HEALTH_BACKOFF_S_MAX
from kvtier.testing.fault_files import EVER, FaultyFiles, FileFailure, FileOperation
from kvtier.testing.policy_machine import chunk_key
from kvtier.types import ShardId
from tests.lib.disk_lab import (
    CODEC,
    NAMESPACE,
    DiskLab,
    bytes_on_disk,
    damage,
    files_below,
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[DiskLab]:
    made = DiskLab(tmp_path, chunks=10)
    assert made.tier.state == ("opening", "reading the index")
    assert made.open()
    assert made.tier.state == ("ok", "")
    yield made
    made.close()


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
    damage(lab.path_of(0))
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


def test_an_index_that_goes_bad_under_way_is_read_from_the_files_again(
    lab: DiskLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing would be written any more until the process is started anew."""
    assert lab.write("a")
    (snapshot,) = Path(lab.root, "index").glob("snapshot")
    snapshot.write_bytes(bytes(snapshot.stat().st_size))
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.tiers.disk.journal.Journal.compact_due", lambda journal: True)
        assert not lab.write("b")
    assert lab.tier.state[0] == "missing"
    lab.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert lab.volume.open_due
    assert lab.open()
    assert lab.read("a")
    assert lab.write("b")
    assert lab.read("b")
    lab.check()
    assert lab.restart()
    assert [lab.read(name) for name in "ab"] == [True, True]
