"""The file connector keeps the connector contract, and a folder that others share."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import kvtier.registry
from kvtier.errors import ConfigError, ConnectorRefusedError, ConnectorUnavailableError
from kvtier.interfaces import Connector, Listable
from kvtier.testing.connector_contract import (
    ConnectorContract,
    ListableContract,
    get,
    get_whole,
    payload_of,
    put,
)
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors.files import FileConnector
from kvtier_connectors.files.folder import KEY_BYTES_MAX, STALE_FILES_MAX, STALE_S, STEP_BYTES
from kvtier_connectors.threads import SHARES_MAX
from tests.lib.opened import Opened


class TestFileConnector(ConnectorContract, ListableContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_connector(self) -> Connector:
        return FileConnector(self.folder)


class TestFileConnectorThatSyncs(ConnectorContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_connector(self) -> Connector:
        return kvtier.registry.connect(f"file://{self.folder}?sync=each&threads=2")


class TestFileConnectorPastTheCache(ConnectorContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_connector(self) -> Connector:
        return kvtier.registry.connect(f"file://{self.folder}?direct=yes")


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


async def test_two_connectors_of_one_folder_see_the_same(opened: Opened, tmp_path: Path) -> None:
    first, second = opened(FileConnector(tmp_path)), opened(FileConnector(tmp_path))
    await put(first, {b"key": b"old"})
    assert await get_whole(second, {b"key": 3}) == [b"old"]
    await put(second, {b"key": b"newer"})
    assert await get_whole(first, {b"key": 5}) == [b"newer"]
    await first.delete([b"key"])
    assert await second.contains([b"key"]) == [False]


async def test_an_object_larger_than_a_step_comes_back(opened: Opened, tmp_path: Path) -> None:
    connector = opened(FileConnector(tmp_path))
    data = payload_of(b"key", STEP_BYTES + 4097)
    await put(connector, {b"key": data})
    assert await get_whole(connector, {b"key": len(data)}) == [data]
    found = await get(connector, [ReadRequest(b"key", STEP_BYTES - 10, 100)])
    assert found == [(100, data[STEP_BYTES - 10 : STEP_BYTES + 90])]


@dataclass
class Reads:
    """How the system was asked: with what offset, how much, and whether past its cache."""

    refusal: int = 0
    seen: list[tuple[int, int, bool]] = field(default_factory=list)

    def preadv(self, file: int, buffers: list[memoryview], offset: int) -> int:
        direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        self.seen.append((offset, len(buffers[0]), direct))
        if direct and self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        return PREADV(file, buffers, offset)


PREADV = os.preadv
PAST_END = 5000


@pytest.mark.parametrize("refusal", [0, errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 12_288, STEP_BYTES + 4097])
async def test_what_is_read_past_the_cache_is_the_same(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, refusal: int
) -> None:
    """Also where the system has no such thing, for an odd offset, and behind the end."""
    connector = opened(kvtier.registry.connect(f"file://{tmp_path}?direct=yes"))
    data = payload_of(b"key", nbytes)
    await put(connector, {b"key": data})
    reads = Reads(refusal)
    monkeypatch.setattr(os, "preadv", reads.preadv)
    with mmap.mmap(-1, nbytes + PAST_END) as pages, memoryview(pages) as memory:
        for offset, count in ((0, nbytes), (0, nbytes + PAST_END), (min(4096, nbytes), 4096)):
            with memory[:count] as into:
                (outcome,) = await connector.read([ReadRequest(b"key", offset, count)], [into])
                assert outcome == min(count, nbytes - offset)
                assert bytes(into[:outcome]) == data[offset : offset + outcome]
    direct = [(offset, count) for offset, count, is_direct in reads.seen if is_direct]
    assert all(offset % 4096 == count % 4096 == 0 for offset, count in direct)
    assert bool(direct) or nbytes < 4096


async def test_a_medium_that_fails_past_the_cache_is_an_outcome(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = opened(kvtier.registry.connect(f"file://{tmp_path}?direct=yes"))
    await put(connector, {b"key": bytes(8192)})
    monkeypatch.setattr(os, "preadv", Reads(errno.EIO).preadv)
    ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, 8192)])
    assert isinstance(outcome, ConnectorUnavailableError)


async def test_keys_never_leave_the_folder(opened: Opened, tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    connector = opened(FileConnector(folder))
    keys = [b"../../evil", b"/etc/passwd", b"..", b"a/../../b", b"\0"]
    await put(connector, dict.fromkeys(keys, b"data"))
    assert files_of(tmp_path) == files_of(folder)
    assert len(files_of(folder)) == len(keys)
    assert all(path.stem == path.stem.lower() and path.suffix == ".kv" for path in files_of(folder))


async def test_the_longest_key_fits_and_a_longer_one_is_refused(
    opened: Opened, tmp_path: Path
) -> None:
    connector = opened(FileConnector(tmp_path))
    longest, longer = bytes(KEY_BYTES_MAX), bytes(KEY_BYTES_MAX + 1)
    items = [WriteItem(key, memoryview(b"data")) for key in (longest, longer)]
    stored, refused = await connector.write(items)
    assert stored is None
    assert isinstance(refused, ConnectorRefusedError)
    assert await connector.contains([longest, longer]) == [True, False]
    assert await get_whole(connector, {longest: 4, longer: 4}) == [b"data", None]
    await connector.delete([longer, longest])
    assert await connector.contains([longest]) == [False]


async def test_list_by_prefix_passes_over_what_is_not_ours(opened: Opened, tmp_path: Path) -> None:
    connector = opened(FileConnector(tmp_path))
    assert isinstance(connector, Listable)
    await put(connector, {b"a1": b"x", b"a2": b"xy", b"b1": b"", b"": b"xyz"})
    (folder, *_) = (path.parent for path in files_of(tmp_path))
    for name in ("readme.txt", "zz.kv", "616.kv", "61AA.kv"):
        (folder / name).write_bytes(b"other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "6131.kv").write_bytes(b"other")
    found = [info async for info in connector.list(b"a")]
    assert sorted(found, key=lambda info: info.key) == [KeyInfo(b"a1", 1), KeyInfo(b"a2", 2)]
    assert len([info async for info in connector.list(b"")]) == 4


async def test_what_dead_writers_left_is_removed_once_it_is_old(
    opened: Opened, tmp_path: Path
) -> None:
    left = [tmp_path / "new" / f"{name}.tmp" for name in ("old", "young")]
    left[0].parent.mkdir()
    for path in left:
        path.write_bytes(b"half")
    now = left[0].stat().st_mtime
    os.utime(left[0], (now, now - STALE_S - 60))
    os.utime(left[1], (now, now - STALE_S + 60))
    await put(opened(FileConnector(tmp_path)), {b"key": b"data"})
    assert not left[0].exists()
    assert left[1].exists()


async def test_what_cannot_be_removed_keeps_nothing_else_there(
    opened: Opened, tmp_path: Path
) -> None:
    """A folder cannot, nor what an NFS client holds under a name of its own."""
    for number in range(20):
        stuck, left = tmp_path / "new" / f".nfs{number}", tmp_path / "new" / f"{number}.tmp"
        stuck.mkdir(parents=True)
        left.touch()
        for path in (stuck, left):
            os.utime(path, (0, 0))
    await put(opened(FileConnector(tmp_path)), {b"key": b"data"})
    assert all(path.is_dir() for path in (tmp_path / "new").iterdir())


async def test_one_sweep_looks_at_a_bounded_number_of_files(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    for number in range(STALE_FILES_MAX + 10):
        path = tmp_path / "new" / f"{number}.tmp"
        path.touch()
        os.utime(path, (0, 0))
    await put(opened(FileConnector(tmp_path)), {b"key": b"data"})
    assert len(list((tmp_path / "new").iterdir())) == 10


async def test_too_many_waiting_calls_fail_and_the_others_do_not(
    opened: Opened, tmp_path: Path
) -> None:
    connector = opened(FileConnector(tmp_path, threads=1))
    item = WriteItem(b"key", memoryview(b"data"))
    calls = [connector.write([item]) for _ in range(SHARES_MAX + 3)]
    outcomes = [outcome for (outcome,) in await asyncio.gather(*calls)]
    assert outcomes.count(None) == SHARES_MAX
    assert sum(isinstance(outcome, ConnectorUnavailableError) for outcome in outcomes) == 3
    await put(connector, {b"key": b"data"})


async def test_after_close_outcomes_are_errors(opened: Opened, tmp_path: Path) -> None:
    connector = opened(FileConnector(tmp_path))
    await put(connector, {b"key": b"data"})
    await connector.close()
    ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, 4)])
    assert isinstance(outcome, ConnectorUnavailableError)
    assert await connector.contains([b"key"]) == [False]
    with pytest.raises(ConnectorUnavailableError, match="closed"):
        _ = [info async for info in connector.list(b"")]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///folder?synk=each", r"no 'synk' \(did you mean 'sync'\?\)"),
        (
            "file:///folder?direct=yez",
            r"direct is 'yez' \(did you mean 'yes'\?\); allowed: no, yes",
        ),
        ("file:///folder?sync=eech", r"sync is 'eech' \(did you mean 'each'\?\)"),
        ("file:///folder?threads=many", "threads is 'many'"),
        ("file:///folder?threads=0", "threads is 0"),
        ("file://folder/sub", "three slashes"),
        ("file://", "from the root on"),
        ("file:///fol%00der", "from the root on"),
    ],
)
def test_a_bad_url_is_a_config_error(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        kvtier.registry.connect(url)


async def test_a_folder_name_may_hold_escaped_characters(opened: Opened, tmp_path: Path) -> None:
    folder = tmp_path / "a b#c"
    folder.mkdir()
    await put(opened(kvtier.registry.connect(f"file://{tmp_path}/a%20b%23c")), {b"key": b"data"})
    assert len(files_of(folder)) == 1
