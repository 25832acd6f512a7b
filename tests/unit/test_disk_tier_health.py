"""The disk tier says how its disk is doing, pauses what fails and tries again later."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import (
    HEALTH_BACKOFF_S_MAX,
    HEALTH_BACKOFF_S_MIN,
    READ_FAILURES_MAX,
)
from kvtier.errors import DeadlineError, TierError
from kvtier.testing.fault_files import EVER, FaultyFiles, FileFailure, FileOperation
from kvtier.testing.policy_machine import chunk_key
from tests.lib.disk_lab import (
    DiskLab,
    bytes_on_disk,
    damage,
    write_chain,
)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def lab(tmp_path: Path, files: FaultyFiles) -> Iterator[DiskLab]:
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
    lab: DiskLab, files: FaultyFiles, code: int, word: str
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


def test_several_failed_reads_in_a_row_pause_reads(lab: DiskLab, files: FaultyFiles) -> None:
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


def test_each_trouble_has_its_own_word(lab: DiskLab) -> None:
    lab.volume.write_failed(OSError(errno.ENOSPC, "No space left"))
    lab.volume.read_failed(OSError(errno.EIO, "Input/output error"))
    state, detail = lab.tier.state
    assert state == "full"
    assert "No space" in detail


def test_a_late_answer_is_slow_and_a_bug_is_failing(lab: DiskLab) -> None:
    lab.volume.write_failed(DeadlineError("no answer in time"))
    assert lab.tier.state == ("slow", "no answer in time")
    lab.volume.write_failed(TierError("storage work failed"))
    assert lab.tier.state[0] == "failing"


@pytest.mark.parametrize("replace", [False, True], ids=["removed", "replaced"])
@pytest.mark.parametrize("notice", ["write", "read"])
def test_a_directory_that_goes_away_is_missing_and_comes_back_empty(
    lab: DiskLab, replace: bool, notice: str
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
    assert [lab.volume.open_due] == [False]
    lab.clock.advance(HEALTH_BACKOFF_S_MAX)
    assert lab.volume.open_due
    assert lab.open()
    assert lab.tier.state == ("ok", "")
    assert len(lab.tier) == 0
    assert lab.write("new")
    assert lab.read("new")
    lab.check()


def test_a_directory_that_comes_back_has_what_it_had(lab: DiskLab) -> None:
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
    tmp_path: Path, files: FaultyFiles
) -> None:
    lab = DiskLab(tmp_path / "other", chunks=2, files=files)
    files.inject(FileFailure(operations=(FileOperation.LIST,), errno=errno.EACCES, last=EVER))
    for step in range(3):
        assert [lab.volume.open_due] == [True]
        assert not lab.open()
        assert lab.tier.state[0] == "read_only"
        assert [lab.volume.open_due] == [False]
        lab.clock.advance(HEALTH_BACKOFF_S_MIN * 2**step)
    files.inject()
    assert [lab.volume.open_due] == [True]
    assert lab.open()
    assert lab.tier.state == ("ok", "")
    assert [lab.volume.open_due] == [False]
    lab.close()


def test_a_file_that_vanishes_is_absent_and_the_disk_is_well(lab: DiskLab) -> None:
    assert lab.write("a")
    lab.path_of("a").unlink()
    assert not lab.read("a")
    assert lab.holds("a") == [False]
    assert lab.tier.state == ("ok", "")
    assert lab.write("a")
    assert lab.read("a")
    lab.check()


def test_chores_that_fail_are_done_later(lab: DiskLab, files: FaultyFiles) -> None:
    for name in range(10):
        assert lab.write(name)
    damage(lab.path_of(5))
    assert not lab.read(5)
    for name in (3, 4):
        (record,) = (r for r in lab.tier.index if r.entry.key == chunk_key(name))
        lab.tier.forget(record)
    fault = FileFailure(operations=(FileOperation.REMOVE, FileOperation.REPLACE), nth=2, last=EVER)
    files.inject(fault)
    for _ in range(3):
        assert not lab.do_chores()
        assert lab.tier.used_bytes >= bytes_on_disk(lab.root)
    files.inject()
    lab.check()
    assert len(lab.tier) == 7
