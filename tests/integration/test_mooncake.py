"""The Mooncake connector against a real master, where its package and libibverbs are installed."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtier.errors import ConnectorDataError, ConnectorRefusedError
from kvtier.errors import ConnectorUnavailableError as Unavailable
from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.testing.connector_contract import ConnectorContract, get, get_whole, payload_of, put
from kvtier.types import ReadRequest, WriteItem
from tests.lib.opened import Opened
from tests.lib.program import free_port

try:
    from mooncake import store
except ImportError:
    store = None

pytestmark = pytest.mark.skipif(
    store is None, reason="needs Mooncake (and Debian's libibverbs1: apt-get install libibverbs1)"
)

LARGE = 3_000_000
START_S_MAX = 30.0


@contextmanager
def master(folder: Path) -> Iterator[str]:
    """Run a master; give the URL of a client that brings memory of its own."""
    port = free_port()
    program = Path(store.__file__).with_name("mooncake_master")
    command = [str(program), f"-rpc_port={port}", f"-metrics_port={free_port()}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "-rpc_address=127.0.0.1"], stdout=log, stderr=log, cwd=folder
        )
    try:
        pause = threading.Event()
        for _ in range(int(START_S_MAX / 0.05)):
            assert process.poll() is None, (folder / "log").read_text()
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            pause.wait(0.05)
        yield f"mooncake://127.0.0.1:{port}?segment=128MiB"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with master(tmp_path_factory.mktemp("mooncake")) as url:
        yield url


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    made = Opened()
    yield made
    await made.close_all()


class TestMooncakeConnector(ConnectorContract):
    """A store is empty once all who brought memory have left."""

    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    def make_connector(self) -> Connector:
        return connect(self.url)


@pytest.mark.parametrize("nbytes", [65_536, 65_537, LARGE])
async def test_b81_large_objects_are_byte_exact(url: str, opened: Opened, nbytes: int) -> None:
    writer, reader = opened(connect(url)), opened(connect(url))
    data = payload_of(b"key", nbytes)
    await put(writer, {b"key": data})
    assert await get_whole(reader, {b"key": nbytes}) == [data]
    found = await get(reader, [ReadRequest(b"key", 1000, 5000), ReadRequest(b"key", 0, nbytes + 9)])
    assert [data for _, data in found] == [data[1000:6000], data]
    await put(writer, {b"key": payload_of(b"key", nbytes, version=2)})
    assert await get_whole(reader, {b"key": nbytes}) == [payload_of(b"key", nbytes, version=2)]


async def test_what_others_wrote_under_our_name_is_an_error(url: str, opened: Opened) -> None:
    connector = opened(connect(url))
    await put(connector, {b"key": b"data"})
    stranger = store.MooncakeDistributedStore()
    master_address = url.removeprefix("mooncake://").partition("?")[0]
    assert stranger.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", master_address) == 0
    assert stranger.upsert(b"key".hex(), b"x" * 500) == 0
    stranger.close()
    ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, 4)])
    assert isinstance(outcome, ConnectorDataError)
    await put(connector, {b"key": b"data"})
    assert await get_whole(connector, {b"key": 4}) == [b"data"]


async def test_b110_what_does_not_fit_is_refused(url: str, opened: Opened) -> None:
    connector = opened(connect(url))
    (outcome,) = await connector.write([WriteItem(b"huge", memoryview(bytes(200 << 20)))])
    assert isinstance(outcome, ConnectorRefusedError)
    await put(connector, {b"small": b"data"})


async def test_nobody_at_the_address_is_unavailable(opened: Opened) -> None:
    connector = opened(connect(f"mooncake://127.0.0.1:{free_port()}"))
    ((outcome, _),) = await get(connector, [ReadRequest(b"key", 0, 4)])
    assert isinstance(outcome, Unavailable)
    assert await connector.contains([b"key"]) == [False]
