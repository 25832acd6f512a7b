"""What a cache server's remotes get with ``--remote-codec``: the same objects in fewer bytes."""

from __future__ import annotations

from pathlib import Path

from kvtier.errors import ConnectorError
from kvtier.registry import connect
from kvtier.types import ReadRequest, WriteItem
from tests.lib.daemon import Daemon, daemon

DATA = b"much of the same " * 60_000


async def write(server: Daemon) -> None:
    connector = connect(server.urls[0])
    assert await connector.write([WriteItem(b"key", memoryview(DATA))]) == [None]
    await connector.close()


async def read(server: Daemon) -> int | ConnectorError | None:
    connector = connect(server.urls[0])
    into = memoryview(bytearray(len(DATA)))
    (outcome,) = await connector.read([ReadRequest(b"key", 0, len(DATA))], [into])
    await connector.close()
    assert outcome is None or into == DATA
    return outcome


def stored_bytes(folder: Path) -> int:
    """What lies in a folder."""
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


async def test_objects_go_to_remotes_in_fewer_bytes_and_come_back_whole(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    remote.mkdir()
    options = (f"--remote=file://{remote}", "--remote-codec=zstd")
    with daemon(*options) as server:
        assert server.get("/v1/config")["remote_codec"] == "zstd"
        await write(server)
        server.wait_until_written()
        assert server.stop() == 0
    assert 0 < stored_bytes(remote) < len(DATA) // 10
    with daemon(*options) as server:
        assert await read(server) == len(DATA)
    # What it was written with does not matter to whoever reads.
    with daemon(options[0]) as server:
        assert await read(server) == len(DATA)
