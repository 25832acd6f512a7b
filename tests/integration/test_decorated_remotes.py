"""A cache server over a remote that is sharded and encrypted by its URL."""

from __future__ import annotations

import secrets
from pathlib import Path

from kvtier.constants import BREAKER_FAILURES_MAX
from kvtier.registry import connect
from kvtier.testing.connector_contract import get, get_whole, payload_of, put
from kvtier.types import ReadRequest
from tests.lib.daemon import daemon

SIZES = {b"key%d" % number: 300_000 + number for number in range(12)}


async def test_a_server_encrypts_into_several_folders_and_believes_no_forger(
    tmp_path: Path,
) -> None:
    key = secrets.token_hex(32)
    (tmp_path / "key").write_text(key)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    stores = f"file://{tmp_path}/a,{tmp_path}/b"
    remote = f"--remote=encrypted+sharded+{stores}?encryption_key_file={tmp_path}/key"
    objects = {name: payload_of(name, nbytes) for name, nbytes in SIZES.items()}
    with daemon(remote) as first:
        connector = connect(first.urls[0])
        await put(connector, objects)
        first.wait_until_written()
        shown = first.get_text("/v1/config") + first.get_text("/health") + "\n".join(first.log)
        assert key not in shown
        assert "encrypted+sharded+file" in shown
        await connector.close()
        assert first.stop() == 0
    files = {name: sorted((tmp_path / name).glob("*/*.kv")) for name in ("a", "b")}
    assert all(files.values()), "one of the folders has nothing"
    for path in (*files["a"], *files["b"]):
        data = path.read_bytes()
        assert data.startswith(b"KVTE")
        assert not any(plain[:64] in data for plain in objects.values())
    # Somebody who can write there forges some of what a folder holds; more, and the remote would
    # be left alone for a while.
    for path in files["b"][: BREAKER_FAILURES_MAX - 1]:
        forged = bytearray(path.read_bytes())
        forged[len(forged) // 2] ^= 1
        path.write_bytes(forged)
    with daemon(remote) as second:
        connector = connect(second.urls[0])
        found = await get(connector, [ReadRequest(name, 0, size) for name, size in SIZES.items()])
        whole = [data for _, data in found if data]
        assert whole, "what nobody has forged is there"
        assert len(whole) < len(SIZES)
        assert set(whole) <= set(objects.values()), "wrong bytes"
        await put(connector, objects)
        assert await get_whole(connector, SIZES) == [*objects.values()]
        await connector.close()
        assert second.stop() == 0
