"""However much happens at once, the index hears of it in batches that a log takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import Durability
from kvtier.constants import JOURNAL_BATCH_CHANGES_MAX
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.index_format import Changes
from kvtier.tiers.disk.rows import Kind, Row
from kvtier.tiers.disk.shard_files import ShardFiles
from kvtier.types import ChunkKey, ShardId

KIND = Kind(bytes(32), "raw", ((ShardId(0, 0, 0), 8192),))


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def rows(count: int) -> tuple[Row, ...]:
    return tuple(Row(key(n), None, 0, KIND, 100 + n, n) for n in range(1, count + 1))


def reopened(folder: Path, *noted: Changes) -> set[bytes]:
    files = ShardFiles(str(folder), Durability.NONE, LocalFiles())
    files.open()
    for changes in noted:
        files.note(changes)
    files.close()
    files = ShardFiles(str(folder), Durability.NONE, LocalFiles())
    found = files.open().rows
    files.close()
    return {found.row(i).key for i in range(len(found))}


def test_what_a_sweep_of_many_files_finds_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JOURNAL_BATCH_CHANGES_MAX: more at once than one batch holds."""
    count = 2 * JOURNAL_BATCH_CHANGES_MAX + 1
    monkeypatch.setattr(
        "kvtier.tiers.disk.index_format.JOURNAL_BATCH_BYTES_MAX", 100 * JOURNAL_BATCH_CHANGES_MAX
    )
    every = rows(count)
    gone = tuple((row.key, row.generation) for row in every[1:])
    assert len(reopened(tmp_path / "added", Changes(every))) == count
    found = reopened(tmp_path / "all", Changes(every, gone, (every[0].key,), 7))
    assert found == {every[0].key}


def test_few_changes_stay_together() -> None:
    changes = Changes(rows(3), ((key(1), 101),), (key(2),), 5)
    assert list(changes.parts()) == [changes]
