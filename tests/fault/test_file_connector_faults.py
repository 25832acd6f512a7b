"""A shared folder that fails: every error of the file system is an outcome, and nothing is torn."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import (
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.types import ReadRequest
from kvtier_connectors.files import FileConnector
from kvtier_connectors.files.folder import ERRORS, STEP_BYTES
from tests.lib.mounts import Disk, removable_disk
from tests.lib.opened import Opened, read_one, write_one

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with removable_disk(tmp_path) as made:
        yield made


def the_file(folder: Path, key: bytes) -> Path:
    """Return where the object lies."""
    (path,) = folder.glob(f"*/{key.hex()}.kv")
    return path


def failing(name: str, code: int, after: int = 0) -> Callable[..., Any]:
    """Return a stand-in for ``os.<name>`` that works ``after`` times and then fails."""
    real = getattr(os, name)
    calls = iter(range(after))

    def call(*args: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    return call


async def test_a_full_disk_refuses_and_serves_what_it_has(opened: Opened, disk: Disk) -> None:
    disk.plug_in(4 * MIB)
    connector = opened(FileConnector(disk.place))
    await put(connector, {b"old": payload_of(b"old", MIB)})
    outcome = await write_one(connector, b"new", bytes(8 * MIB))
    assert isinstance(outcome, ConnectorRefusedError)
    assert isinstance(outcome.__cause__, OSError)
    assert outcome.__cause__.errno == errno.ENOSPC
    assert await connector.contains([b"new", b"old"]) == [False, True]
    assert await get_whole(connector, {b"old": MIB}) == [payload_of(b"old", MIB)]
    assert list((disk.place / "new").iterdir()) == []
    await put(connector, {b"small": b"data"})


async def test_a_full_disk_keeps_the_object_that_was_to_be_replaced(
    opened: Opened, disk: Disk
) -> None:
    disk.plug_in(4 * MIB)
    connector = opened(FileConnector(disk.place))
    await put(connector, {b"key": payload_of(b"key", MIB)})
    assert isinstance(await write_one(connector, b"key", bytes(8 * MIB)), ConnectorRefusedError)
    assert await get_whole(connector, {b"key": MIB}) == [payload_of(b"key", MIB)]


async def test_a_read_only_folder_refuses_writes_and_serves_reads(
    opened: Opened, disk: Disk
) -> None:
    disk.plug_in(4 * MIB)
    connector = opened(FileConnector(disk.place))
    await put(connector, {b"key": b"data"})
    disk.write_protect()
    assert isinstance(await write_one(connector, b"other", b"data"), ConnectorRefusedError)
    assert await get_whole(connector, {b"key": 4}) == [b"data"]
    await connector.delete([b"key"])
    assert await connector.contains([b"key"]) == [True]


async def test_a_missing_folder_is_an_error_until_it_is_there(
    opened: Opened, tmp_path: Path
) -> None:
    folder = tmp_path / "mount"
    connector = opened(FileConnector(folder))
    assert isinstance(await read_one(connector, b"key", 4), ConnectorUnavailableError)
    assert isinstance(await write_one(connector, b"key", b"data"), ConnectorUnavailableError)
    assert await connector.contains([b"key"]) == [False]
    await connector.delete([b"key"])
    with pytest.raises(ConnectorUnavailableError):
        _ = [info async for info in connector.list(b"")]
    assert not folder.exists()
    folder.mkdir()
    assert await read_one(connector, b"key", 4) is None
    await put(connector, {b"key": b"data"})


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, ConnectorRefusedError),
        (errno.EDQUOT, ConnectorRefusedError),
        (errno.EACCES, ConnectorRefusedError),
        (errno.EPERM, ConnectorRefusedError),
        (errno.EROFS, ConnectorRefusedError),
        (errno.ESTALE, ConnectorUnavailableError),
        (errno.EIO, ConnectorUnavailableError),
        (errno.EMFILE, ConnectorUnavailableError),
        (errno.ETIMEDOUT, ConnectorTimeoutError),
        (errno.ELOOP, ConnectorDataError),
        (errno.EUCLEAN, ConnectorDataError),
    ],
)
@pytest.mark.parametrize("name", ["open", "write", "close", "rename", "fsync"])
async def test_every_failing_step_of_a_write_is_its_outcome(
    opened: Opened,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    kind: type,
) -> None:
    """A network file system tells of a full server as late as at fsync and close."""
    connector = opened(FileConnector(tmp_path, sync="each"))
    await put(connector, {b"key": b"old"})
    monkeypatch.setattr(os, name, failing(name, code))
    outcome = await write_one(connector, b"key", b"newer")
    monkeypatch.undo()
    assert outcome is not None
    assert type(outcome) is kind
    assert isinstance(outcome.__cause__, OSError)
    assert await get_whole(connector, {b"key": 3}) == [b"old"]
    assert list((tmp_path / "new").iterdir()) == []


async def test_every_error_that_the_table_names_is_one_of_ours() -> None:
    assert all(issubclass(kind, ConnectorError) for kind in ERRORS.values())
    assert errno.ENOSPC in ERRORS


async def test_a_stale_handle_is_opened_anew_once(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server answers when another host has replaced the file that is being read."""
    connector = opened(FileConnector(tmp_path))
    await put(connector, {b"key": b"data"})
    real, stale = os.preadv, iter([True])

    def preadv(*args: Any) -> int:
        if next(stale, False):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    assert await read_one(connector, b"key", 4) == b"data"
    monkeypatch.setattr(os, "preadv", failing("preadv", errno.ESTALE))
    assert isinstance(await read_one(connector, b"key", 4), ConnectorUnavailableError)


async def test_b85_short_writes_and_short_reads_are_gone_on_with(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, real_preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda file, data: real_write(file, data[:512]))
    monkeypatch.setattr(os, "preadv", lambda f, into, at: real_preadv(f, [into[0][:100]], at))
    connector = opened(FileConnector(tmp_path))
    data = payload_of(b"key", 1300)
    await put(connector, {b"key": data})
    assert await get_whole(connector, {b"key": 1300}) == [data]


async def test_b78_a_file_cut_short_is_never_a_full_read(opened: Opened, tmp_path: Path) -> None:
    connector = opened(FileConnector(tmp_path))
    data = payload_of(b"key", 5000)
    await put(connector, {b"key": data})
    path = the_file(tmp_path, b"key")
    os.truncate(path, 1234)
    assert await read_one(connector, b"key", 5000) == data[:1234]


async def test_links_and_folders_in_an_objects_place_are_not_followed(
    opened: Opened, tmp_path: Path
) -> None:
    connector = opened(FileConnector(tmp_path))
    await put(connector, {b"key": b"data"})
    path = the_file(tmp_path, b"key")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    path.unlink()
    path.symlink_to(secret)
    assert isinstance(await read_one(connector, b"key", 6), ConnectorDataError)
    await put(connector, {b"key": b"newer"})
    assert secret.read_bytes() == b"secret"
    path.unlink()
    path.mkdir()
    assert isinstance(await read_one(connector, b"key", 6), ConnectorDataError)
    path.rmdir()
    os.mkfifo(path)
    assert isinstance(await read_one(connector, b"key", 6), ConnectorDataError)


async def test_who_has_an_object_open_keeps_the_old_one(tmp_path: Path, opened: Opened) -> None:
    connector = opened(FileConnector(tmp_path))
    await put(connector, {b"key": b"old object"})
    with the_file(tmp_path, b"key").open("rb") as reader:
        await put(connector, {b"key": b"a newer object"})
        assert reader.read() == b"old object"
    assert await read_one(connector, b"key", 14) == b"a newer object"


async def test_a_bad_key_does_not_hide_the_others(opened: Opened, tmp_path: Path) -> None:
    connector = opened(FileConnector(tmp_path, threads=1))
    await put(connector, {b"k1": b"data", b"k2": b"data", b"k3": b"data"})
    path = the_file(tmp_path, b"k2")
    path.unlink()
    path.mkdir()
    found = await get(connector, [ReadRequest(key, 0, 4) for key in (b"k1", b"k2", b"k3")])
    assert [data for _, data in found] == [b"data", b"", b"data"]
    assert isinstance(found[1][0], ConnectorDataError)


async def test_a_cancelled_read_returns_when_its_buffer_is_free(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = opened(FileConnector(tmp_path))
    await put(connector, {b"key": bytes(2 * STEP_BYTES)})
    begun, let_go = threading.Event(), threading.Event()
    real, calls = os.preadv, []

    def preadv(*args: Any) -> int:
        calls.append(args)
        begun.set()
        assert let_go.wait(30)
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    reading = asyncio.ensure_future(read_one(connector, b"key", 2 * STEP_BYTES))
    await asyncio.to_thread(begun.wait, 30)
    reading.cancel()
    await asyncio.wait([reading], timeout=0.01)
    reading.cancel()
    await asyncio.wait([reading], timeout=0.01)
    assert not reading.done(), "the thread may still write into the buffer"
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(calls) == 1, "no step begins after the cancellation"
    monkeypatch.undo()
    assert await read_one(connector, b"key", 4) == bytes(4)


KILLED = """
import asyncio, sys
from pathlib import Path
from kvtier.types import WriteItem
from kvtier_connectors.files import FileConnector
async def main():
    connector = FileConnector(Path(sys.argv[1]))
    for version in range(1_000_000):
        data = bytes([version % 251]) * 3_000_000
        (outcome,) = await connector.write([WriteItem(b"key", memoryview(data))])
        assert outcome is None
        if version == 3:
            print("going", flush=True)
asyncio.run(main())
"""


def write_until_killed(folder: Path) -> None:
    """Let a process overwrite an object again and again, and kill it."""
    command = [sys.executable, "-c", KILLED, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"going\n"
        process.send_signal(signal.SIGKILL)


async def test_a_writer_that_is_killed_leaves_a_whole_object(
    opened: Opened, tmp_path: Path
) -> None:
    for _ in range(3):
        await asyncio.to_thread(write_until_killed, tmp_path)
        data = await read_one(opened(FileConnector(tmp_path)), b"key", 3_000_000)
        assert isinstance(data, bytes)
        assert len(data) == 3_000_000
        assert len(set(data)) == 1
