"""Processes that write the same objects into one shared folder at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from kvtier.registry import connect
from kvtier.testing.connector_contract import get_whole, payload_of
from tests.tidy.sources import ROOT

PROCESSES, KEYS, ROUNDS, NBYTES = 8, 32, 5, 30_000

WRITERS = """
import asyncio, os, sys
from kvtier.registry import connect
from kvtier.testing.connector_contract import payload_of, put

async def write(url, keys, rounds, nbytes):
    connector = connect(url)
    for _ in range(rounds):
        await put(connector, {key: payload_of(key, nbytes) for key in keys})
    await connector.close()

processes, keys, rounds, nbytes = map(int, sys.argv[2:])
children = []
for _ in range(processes):
    child = os.fork()
    if not child:
        asyncio.run(write(sys.argv[1], [b"key %d" % n for n in range(keys)], rounds, nbytes))
        os._exit(0)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_b60_processes_that_write_the_same_keys_never_fail_each_other(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    figures = [str(each) for each in (PROCESSES, KEYS, ROUNDS, NBYTES)]
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, url, *figures],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    keys = [b"key %d" % number for number in range(KEYS)]

    async def read() -> list[bytes | None]:
        connector = connect(url)
        found = await get_whole(connector, dict.fromkeys(keys, NBYTES))
        await connector.close()
        return found

    assert asyncio.run(read()) == [payload_of(key, NBYTES) for key in keys]
    # What was being written is there under its own name, and under no other one.
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == KEYS
