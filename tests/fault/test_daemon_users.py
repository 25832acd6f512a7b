"""Other users of the machine at a cache server's Unix socket."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.registry import connect
from kvtier.types import WriteItem
from tests.lib.daemon import daemon

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
THEIRS, STRANGER = 65_534, 65_533
#: Becomes another user once it has all that it needs, and says what it met.
CLIENT = """
import asyncio, os, sys
from kvtier.registry import connect
from kvtier.types import WriteItem
url, uid = sys.argv[1], int(sys.argv[2])
async def ask():
    connector = connect(url)
    os.setgroups([]), os.setgid(uid), os.setuid(uid)
    ours = await connector.contains([b"ours"])
    (outcome,) = await connector.write([WriteItem(b"theirs", memoryview(b"x"))])
    print(ours, outcome, await connector.contains([b"theirs"]))
    await connector.close()
asyncio.run(ask())
"""


def said(url: str, uid: int) -> str:
    command = [sys.executable, "-c", CLIENT, url, str(uid)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


async def test_only_users_that_are_allowed_come_in_and_each_has_objects_of_its_own(
    open_folder: Path,
) -> None:
    listen = [f"unix:{open_folder}/socket"]
    with daemon(f"--allow-uid={THEIRS}", listen=listen) as running:
        (url,) = running.urls
        own = connect(url)
        assert await own.write([WriteItem(b"ours", memoryview(b"y"))]) == [None]
        assert said(url, THEIRS) == "[False] None [True]\n"
        assert await own.contains([b"ours", b"theirs"]) == [True, False]
        refused = said(url, STRANGER)
        assert refused.startswith("[False] ")
        assert "not allowed" in refused
        running.wait_for_line(f"user {STRANGER} is refused")
        await own.close()
        assert running.stop() == 0


async def test_where_nobody_else_is_allowed_the_socket_is_its_owners(open_folder: Path) -> None:
    with daemon(listen=[f"unix:{open_folder}/socket"]) as running:
        assert (open_folder / "socket").stat().st_mode & 0o777 == 0o600
        assert "Permission denied" in said(running.urls[0], STRANGER)
        assert running.stop() == 0
