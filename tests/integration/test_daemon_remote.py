"""A cache server over a remote of its own: what two hosts share beyond one daemon."""

from __future__ import annotations

from pathlib import Path

from kvtier.registry import connect
from kvtier.testing.connector_contract import get, payload_of, put
from kvtier.types import ReadRequest
from tests.lib.daemon import daemon

SIZES = {b"empty": 0, b"small": 5, b"page": 4096, b"large": 3_000_000}


async def test_objects_come_back_from_the_servers_remote(tmp_path: Path) -> None:
    """The second server has nothing of its own, and is told no sizes: the objects say theirs."""
    (tmp_path / "shared").mkdir()
    remote = f"--remote=file://{tmp_path}/shared"
    objects = {key: payload_of(key, nbytes) for key, nbytes in SIZES.items()}
    with daemon(remote) as first:
        connector = connect(first.urls[0])
        await put(connector, objects)
        first.wait_until_written()
        await connector.close()
        assert first.stop() == 0
    with daemon(remote) as second:
        connector = connect(second.urls[0])
        assert await connector.contains([*SIZES, b"other"]) == [True] * len(SIZES) + [False]
        requests = [ReadRequest(key, 0, nbytes) for key, nbytes in SIZES.items()]
        assert await get(connector, requests) == [(len(data), data) for data in objects.values()]
        # An object that is replaced is replaced there, too.
        newer = payload_of(b"large", 1_000_000, version=2)
        await put(connector, {b"large": newer})
        second.wait_until_written()
        await connector.close()
        assert second.stop() == 0
    with daemon(remote) as third:
        connector = connect(third.urls[0])
        assert await get(connector, [ReadRequest(b"large", 0, 1_000_000)]) == [(1_000_000, newer)]
        await connector.close()
