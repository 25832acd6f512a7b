"""A running server seen from outside: ``kvtier stat``, and a reader of KV events that stays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.lib.server import Served, series, serving
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder

KVTIER = Path(sys.executable).with_name("kvtier")
PROMPT = list(range(10, 180, 10))
CHUNKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), tiny_config(), tiny_tensors(tiny_config()))


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def reader(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    yield socket
    context.destroy(linger=0)


def options(folder: Path, tmp_path: Path, endpoint: str) -> list[str]:
    small = ["--block-tokens=4", "--chunk-tokens=8", "--kv-bytes=1MiB", "--dram=64MiB"]
    return [f"--model={folder}", *small, f"--disk={tmp_path}/kv", f"--kv-events={endpoint}"]


def kvtier(*arguments: str) -> str:
    """Run the command and return what it says."""
    ended = subprocess.run(
        [KVTIER, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def stored(served: Served) -> None:
    """Have a prompt computed, and wait until its chunks lie on disk."""
    served.ask(PROMPT, 2)
    chunks = series("tier_chunks", tier="disk")
    queued = series("writes_queued")
    served.wait_until(lambda now: now[chunks] >= CHUNKS and not now[queued])


def events(reader: zmq.Socket[bytes], count: int) -> list[dict[str, Any]]:
    """Read so many events at least."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        found += msgspec.msgpack.decode(reader.recv_multipart()[2])[1]
    return found


def test_a_server_is_seen_from_outside_and_its_directory_after(
    folder: Path, tmp_path: Path, endpoint: str, reader: zmq.Socket[bytes]
) -> None:
    with serving(*options(folder, tmp_path, endpoint)) as served:
        assert events(reader, 1) == [{"type": "AllBlocksCleared"}]
        stored(served)
        kinds = [event["type"] for event in events(reader, 2 * CHUNKS)]
        assert kinds == ["BlockStored"] * 2 * CHUNKS
        report = json.loads(kvtier("stat", served.url, "--json"))
        assert [each["chunks"] for each in report["tiers"][1:]] == [CHUNKS, CHUNKS]
        assert served.stop() == 0
    rest = json.loads(kvtier("stat", f"{tmp_path}/kv", "--json"))
    assert rest["chunks"] == CHUNKS
    with serving(*options(folder, tmp_path, endpoint)) as served:
        assert events(reader, 1) == [{"type": "AllBlocksCleared"}], "the server is another one"
        assert served.stop() == 0
