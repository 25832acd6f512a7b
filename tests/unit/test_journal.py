"""The index at rest, case by case: what is written, what is believed, what a fault leaves."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvtier.constants import (
    JOURNAL_BATCH_BYTES_MAX,
    JOURNAL_CHANGES_LOGGED,
    JOURNAL_KINDS_BYTES_MAX,
    JOURNAL_LOG_BYTES_MAX,
    JOURNAL_ROWS_MAX,
)
from kvtier.testing.fault_files import (
    ALL_OPERATIONS,
    FaultyFiles,
    FileCrash,
    FileFailure,
    FileOperation,
    TornWrite,
)
from kvtier.testing.policy_machine import chunk_key
from kvtier.testing.power_cut import PowerCutFiles
from kvtier.tiers.disk import index_format, journal
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.journal import Changes, Journal
from kvtier.tiers.disk.rows import Kind, Rows
from kvtier.types import ShardId
from tests.lib.index_model import KINDS, State, after, make_row, state_of

FIRST = tuple(make_row(n, n - 1 if n else None, generation=n, used_ms=n) for n in range(4))


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


def opened(root: Path, files: FaultyFiles | None = None, rows: State = FIRST) -> Journal:
    made = Journal(str(root), files or LocalFiles())
    made.start(Rows.of(rows))
    return made


def load(root: Path) -> State | None:
    return state_of(Journal(str(root), LocalFiles()).load())


def use(*names: object, used_ms: int = 100) -> Changes:
    return Changes(used=tuple(chunk_key(name) for name in names), used_ms=used_ms)


def index_files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "index").iterdir())


def test_a_directory_without_an_index_has_none(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    with pytest.raises(OSError, match="not started"):
        Journal(str(tmp_path), LocalFiles()).append(use(1))


def test_rows_come_back_in_their_order_and_with_all_they_say(tmp_path: Path) -> None:
    rows = (
        make_row("b", "a", generation=7, used_ms=9, kind=KINDS[1], position=3),
        make_row("a", generation=2**63, used_ms=2**40, kind=KINDS[2]),
    )
    opened(tmp_path, rows=rows)
    assert load(tmp_path) == rows
    assert rows[0].nbytes == sum(nbytes for _, nbytes in KINDS[1].shards)


def test_changes_take_effect_in_the_order_added_removed_used(tmp_path: Path) -> None:
    index = opened(tmp_path)
    again = make_row(2, 1, generation=50, kind=KINDS[1], used_ms=60)
    index.append(
        Changes(
            added=(make_row(9, generation=9), again),
            removed=((chunk_key(2), 2), (chunk_key(3), 3), (chunk_key(0), 99), (chunk_key(77), 0)),
            used=(chunk_key(1), chunk_key(9), chunk_key(3)),
            used_ms=100,
        )
    )
    found = load(tmp_path)
    assert found is not None
    assert found == (
        FIRST[0],
        again,
        FIRST[1]._replace(used_ms=100),
        make_row(9, generation=9, used_ms=100),
    )


def test_kinds_that_no_row_has_any_more_are_forgotten(tmp_path: Path) -> None:
    index = opened(tmp_path)
    removed = tuple((row.key, row.generation) for row in FIRST)
    index.append(Changes(added=(make_row(9, kind=KINDS[2]),), removed=removed))
    rows = Journal(str(tmp_path), LocalFiles()).load()
    assert rows is not None
    assert rows.kinds == [KINDS[2]]


def test_an_append_is_one_call_and_a_sync_makes_it_safe(tmp_path: Path, files: FaultyFiles) -> None:
    index = opened(tmp_path, files)
    del files.calls[:]
    index.append(use(1))
    index.append(use(2))
    assert [call.operation for call in files.calls] == [FileOperation.APPEND] * 2
    index.sync()
    synced = [call.operation for call in files.calls[2:]]
    assert synced == [FileOperation.SYNC_FILE] + [FileOperation.SYNC_DIRECTORY] * 2
    index.append(use(3))
    index.sync()
    index.sync()
    assert [call.operation for call in files.calls[5:]] == [
        FileOperation.APPEND,
        FileOperation.SYNC_FILE,
    ]


def test_what_is_written_is_counted(tmp_path: Path) -> None:
    index = opened(tmp_path)
    snapshot = index.written_bytes
    assert snapshot == (tmp_path / "index" / "snapshot").stat().st_size
    index.append(use(1))
    (log,) = (tmp_path / "index").glob("log-*")
    assert index.written_bytes == snapshot + log.stat().st_size
    index.compact()
    assert index.written_bytes == 2 * snapshot + log_bytes(1)


def log_bytes(used: int) -> int:
    return 36 + 1 + 32 * used


def test_a_compaction_is_due_above_the_limit_or_half_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert JOURNAL_CHANGES_LOGGED == 65_536
    monkeypatch.setattr(journal, "JOURNAL_CHANGES_LOGGED", 5)
    index = opened(tmp_path)
    index.append(use(1, 2, 3, 1, 2))
    assert not index.compact_due()
    index.append(use(1))
    assert index.compact_due()
    again = Journal(str(tmp_path), LocalFiles())
    again.load()
    assert again.compact_due()
    again.compact()
    assert not again.compact_due()
    many = opened(tmp_path, rows=tuple(make_row(n) for n in range(20)))
    many.append(use(*range(10)))
    assert not many.compact_due()
    many.append(use(1))
    assert many.compact_due()


def test_a_compaction_changes_nothing_and_leaves_no_log(tmp_path: Path) -> None:
    index = opened(tmp_path)
    index.append(use(0, 1))
    before = load(tmp_path)
    index.compact()
    assert load(tmp_path) == before == after(FIRST, use(0, 1))
    assert index_files(tmp_path) == ["snapshot"]
    index.append(use(2))
    assert load(tmp_path) == after(after(FIRST, use(0, 1)), use(2))


def test_b66_nothing_is_written_behind_a_torn_tail(tmp_path: Path, files: FaultyFiles) -> None:
    index = opened(tmp_path, files)
    index.append(use(0))
    files.inject(TornWrite(nbytes=20, errno=errno.ENOSPC))
    with pytest.raises(OSError, match="space"):
        index.append(use(1))
    assert load(tmp_path) == after(FIRST, use(0))
    index.append(use(2))
    assert load(tmp_path) == after(after(FIRST, use(0)), use(2))


def test_b66_a_tail_torn_by_a_kill_is_found_at_the_next_start(
    tmp_path: Path, files: FaultyFiles
) -> None:
    index = opened(tmp_path, files)
    index.append(use(0))
    files.inject(FileCrash(operations=(FileOperation.APPEND,), nbytes=50))
    with pytest.raises(OSError, match="on purpose"):
        index.append(use(1))
    files.restart()
    again = Journal(str(tmp_path), files)
    assert state_of(again.load()) == after(FIRST, use(0))
    again.append(use(2))
    assert load(tmp_path) == after(after(FIRST, use(0)), use(2))


@pytest.mark.parametrize("operation", list(FileOperation))
def test_a_compaction_that_fails_loses_nothing(
    tmp_path: Path, files: FaultyFiles, operation: FileOperation
) -> None:
    index = opened(tmp_path, files)
    index.append(use(0, 3))
    files.inject(FileFailure(operations=(operation,), last=0))
    try:
        index.compact()
        index.append(use(1))
        changed = after(after(FIRST, use(0, 3)), use(1))
    except OSError:
        changed = after(FIRST, use(0, 3))
    files.inject()
    assert load(tmp_path) == changed
    index.append(use(2))
    assert load(tmp_path) == after(changed, use(2))


@pytest.mark.parametrize("cut", [False, True], ids=["kill", "power"])
def test_a_crash_at_every_call_of_a_compaction_leaves_all_of_the_rows(
    tmp_path: Path, *, cut: bool
) -> None:
    for nth in range(1, 20):
        root, shadow = tmp_path / f"root{nth}", tmp_path / f"shadow{nth}"
        root.mkdir()
        shadow.mkdir()
        power = PowerCutFiles(root, shadow, seed=nth)
        files = FaultyFiles(power)
        index = opened(root, files)
        index.append(use(0, 3))
        index.sync()
        files.inject(FileCrash(operations=ALL_OPERATIONS, nth=nth, nbytes=1000))
        try:
            index.compact()
        except OSError:
            assert files.crashed
        done = not files.crashed
        files.restart()
        if cut:
            power.cut()
        assert load(root) == after(FIRST, use(0, 3)), f"crashed at call {nth}"
        if done:
            return
    pytest.fail("a compaction has fewer calls")


def test_a_start_that_failed_before_its_name_was_safe_is_made_safe_by_a_sync(
    tmp_path: Path,
) -> None:
    for seed in range(8):
        root, shadow = tmp_path / f"root{seed}", tmp_path / f"shadow{seed}"
        root.mkdir()
        shadow.mkdir()
        power = PowerCutFiles(root, shadow, seed=seed)
        files = FaultyFiles(power)
        index = opened(root, files)
        files.inject(FileFailure(operations=(FileOperation.SYNC_DIRECTORY,)))
        with pytest.raises(OSError, match="index"):
            index.start(Rows.of(FIRST[:2]))
        again = Journal(str(root), files)
        assert state_of(again.load()) == FIRST[:2]
        again.sync()
        power.cut()
        assert load(root) == FIRST[:2]


def test_after_a_start_that_failed_nothing_is_appended_to_what_was_there(
    tmp_path: Path, files: FaultyFiles
) -> None:
    index = opened(tmp_path, files)
    files.inject(FileFailure(operations=(FileOperation.CREATE,)))
    with pytest.raises(OSError, match="snapshot"):
        index.start(Rows.of(FIRST[:1]))
    with pytest.raises(OSError, match="not started"):
        index.append(use(1))
    index.sync()
    index.start(Rows.of(FIRST[:1]))
    index.append(use(0))
    assert load(tmp_path) == after(FIRST[:1], use(0))


def test_another_log_is_never_taken_for_the_snapshots_own(tmp_path: Path) -> None:
    index = opened(tmp_path)
    logs: list[bytes] = []
    for name in (0, 1, 2):
        index.append(use(name))
        (log,) = (tmp_path / "index").glob("log-*")
        logs.append(log.read_bytes())
        if name < 2:
            index.compact()
    log.write_bytes(logs[0])
    assert load(tmp_path) == after(after(FIRST, use(0)), use(1))


def test_an_index_that_cannot_be_trusted_is_none_and_a_start_replaces_it(tmp_path: Path) -> None:
    index = opened(tmp_path)
    index.append(use(0))
    snapshot = tmp_path / "index" / "snapshot"
    whole = snapshot.read_bytes()
    version = bytearray(whole)
    version[4] ^= 2
    body = bytearray(whole)
    body[-4000] ^= 1
    for data in (b"", whole[:4096], whole[:-1], whole + bytes(4096), bytes(version), bytes(body)):
        snapshot.write_bytes(data)
        assert load(tmp_path) is None
        with pytest.raises(OSError, match="trusted"):
            Journal(str(tmp_path), LocalFiles()).compact()
    again = Journal(str(tmp_path), LocalFiles())
    assert again.load() is None
    again.start(Rows.of(FIRST[:1]))
    assert load(tmp_path) == FIRST[:1]
    assert index_files(tmp_path) == ["snapshot"]


def test_a_disk_that_does_not_answer_is_no_missing_index(
    tmp_path: Path, files: FaultyFiles
) -> None:
    opened(tmp_path)
    for operation in (FileOperation.LIST, FileOperation.READ):
        files.inject(FileFailure(operations=(operation,)))
        with pytest.raises(OSError, match="index"):
            Journal(str(tmp_path), files).load()


@pytest.mark.parametrize(
    "kind",
    [
        Kind("text", "raw", ()),  # type: ignore[arg-type]
        Kind(b"n", b"raw", ()),  # type: ignore[arg-type]
        Kind(b"n", "raw", ((ShardId(-1, 0, 0), 4096),)),
        Kind(b"n", "raw", ((ShardId(0, 70_000, 0), 4096),)),
        Kind(b"n", "raw", ((ShardId(0, 0, 0), 2**40),)),
        Kind(b"n", "raw", ((ShardId(0, 0, 0), 0),)),
        Kind(b"n", "raw", ((ShardId(0, True, 0), 4096),)),
    ],
)
def test_a_sound_snapshot_of_nonsense_is_not_trusted(tmp_path: Path, kind: Kind) -> None:
    Journal(str(tmp_path), LocalFiles()).start(Rows.of([]))
    assert load(tmp_path) == ()
    Journal(str(tmp_path), LocalFiles()).start(Rows.of([make_row(1, kind=kind)]))
    assert load(tmp_path) is None


@pytest.mark.parametrize(("column", "value"), [("kind", 1), ("nbytes", 5)])
def test_a_row_that_contradicts_its_kind_is_not_trusted(
    tmp_path: Path, column: str, value: int
) -> None:
    rows = Rows.of(FIRST)
    rows.array[column][2] = value
    Journal(str(tmp_path), LocalFiles()).start(rows)
    assert load(tmp_path) is None


def test_more_than_an_index_holds_is_refused_on_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in (
        ("JOURNAL_ROWS_MAX", JOURNAL_ROWS_MAX),
        ("JOURNAL_KINDS_BYTES_MAX", JOURNAL_KINDS_BYTES_MAX),
    ):
        assert limit > 3
        opened(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(index_format, name, 3)
            assert load(tmp_path) is None
            with pytest.raises(OSError, match="more rows") as caught:
                opened(tmp_path)
            assert caught.value.errno == errno.EFBIG
        assert load(tmp_path) == FIRST


def test_a_batch_beyond_the_limit_is_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert JOURNAL_BATCH_BYTES_MAX >= 2 * JOURNAL_CHANGES_LOGGED * 96
    index = opened(tmp_path)
    index.append(use(0))
    monkeypatch.setattr(index_format, "JOURNAL_BATCH_BYTES_MAX", log_bytes(1))
    assert load(tmp_path) == after(FIRST, use(0))
    with pytest.raises(AssertionError, match="too many changes"):
        index.append(use(0, 1))
    monkeypatch.setattr(index_format, "JOURNAL_BATCH_BYTES_MAX", log_bytes(1) - 1)
    assert load(tmp_path) == FIRST


def test_a_log_beyond_the_limit_is_compacted_before_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert JOURNAL_LOG_BYTES_MAX > JOURNAL_BATCH_BYTES_MAX
    monkeypatch.setattr(journal, "JOURNAL_LOG_BYTES_MAX", log_bytes(1))
    index = opened(tmp_path)
    state: State = FIRST
    for name in (0, 3, 1, 2, 0):
        index.append(use(name))
        state = after(state, use(name))
        (log,) = (tmp_path / "index").glob("log-*")
        assert log.stat().st_size <= 2 * log_bytes(1)
    assert load(tmp_path) == state
