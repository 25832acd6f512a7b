"""When shards on disk are safe: nothing, a group or each write is synced, in the right order."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import Durability
from kvtier.shard_format import seal
from kvtier.testing.fault_files import FaultyFiles, FileFailure, FileOperation
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk.shard_files import ShardFiles
from kvtier.types import Entry
from tests.lib.disk_lab import aligned, describe, files_below, fill_slot
from tests.lib.shard_room import NBYTES, SHARD, put


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


def opened(root: Path, durability: Durability, files: FaultyFiles) -> ShardFiles:
    shards = ShardFiles(str(root), durability, files)
    shards.open()
    files.calls.clear()
    return shards


def operations(files: FaultyFiles) -> list[str]:
    return [call.operation.value for call in files.calls]


def test_none_syncs_nothing(tmp_path: Path, files: FaultyFiles) -> None:
    shards = opened(tmp_path, Durability.NONE, files)
    put(shards, "a")
    shards.commit_group()
    assert operations(files) == ["create", "replace"]
    shards.close()


def test_each_syncs_bytes_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, files: FaultyFiles
) -> None:
    shards = opened(tmp_path, Durability.EACH, files)
    path = put(shards, "a")
    first, second, third, *names = files.calls
    incoming = str(tmp_path / "incoming" / path.name)
    assert (first.operation, first.path) == (FileOperation.CREATE, incoming)
    assert (second.operation, second.path) == (FileOperation.SYNC_FILE, incoming)
    assert (third.operation, third.target) == (FileOperation.REPLACE, str(path))
    assert {call.operation for call in names} == {FileOperation.SYNC_DIRECTORY}
    # A new directory has a name too, which is safe only with its parent.
    assert [call.path for call in names] == [str(path.parent), str(path.parent.parent)]
    files.calls.clear()
    slot = slot_of("a")
    seal(slot, describe(Entry(chunk_key("a"), None, NBYTES, 0), SHARD))
    shards.write(str(path.with_name("again")), slot)
    assert operations(files) == ["create", "sync_file", "replace", "sync_directory"]
    shards.close()


def slot_of(name: object) -> memoryview:
    slot = aligned(NBYTES)
    fill_slot(slot, chunk_key(name), SHARD)
    return slot


def test_batch_syncs_a_group_later_and_each_directory_once(
    tmp_path: Path, files: FaultyFiles
) -> None:
    shards = opened(tmp_path, Durability.BATCH, files)
    paths = [put(shards, name) for name in range(6)]
    assert set(operations(files)) == {"create", "replace"}
    paths[0].unlink()
    files.calls.clear()
    shards.commit_group()
    synced = [c.path for c in files.calls if c.operation is FileOperation.SYNC_FILE]
    assert synced == [str(path) for path in paths[1:]]
    directories = [c.path for c in files.calls if c.operation is FileOperation.SYNC_DIRECTORY]
    assert len(directories) == len(set(directories))
    assert {str(path.parent) for path in paths[1:]} <= set(directories)
    last_file = max(i for i, c in enumerate(files.calls) if c.path in synced)
    first_directory = min(i for i, c in enumerate(files.calls) if c.path in directories)
    assert last_file < first_directory
    files.calls.clear()
    shards.commit_group()
    assert files.calls == []
    shards.close()


@pytest.mark.parametrize("operation", [FileOperation.SYNC_FILE, FileOperation.SYNC_DIRECTORY])
def test_a_group_that_failed_is_tried_again_whole(
    tmp_path: Path, files: FaultyFiles, operation: FileOperation
) -> None:
    shards = opened(tmp_path, Durability.BATCH, files)
    paths = [put(shards, name) for name in range(3)]
    files.inject(FileFailure(operations=(operation,), nth=2 if "file" in operation else 1))
    with pytest.raises(OSError, match="Input/output"):
        shards.commit_group()
    paths.append(put(shards, 3))
    files.calls.clear()
    shards.commit_group()
    synced = [c.path for c in files.calls if c.operation is FileOperation.SYNC_FILE]
    assert synced == [str(path) for path in paths]
    shards.close()


@pytest.mark.parametrize("operation", [FileOperation.SYNC_FILE, FileOperation.SYNC_DIRECTORY])
def test_a_write_that_could_not_be_synced_did_not_happen(
    tmp_path: Path, files: FaultyFiles, operation: FileOperation
) -> None:
    shards = opened(tmp_path, Durability.EACH, files)
    files.inject(FileFailure(operations=(operation,)))
    with pytest.raises(OSError, match="Input/output"):
        put(shards, "a")
    assert files_below(tmp_path) == []
    shards.close()
