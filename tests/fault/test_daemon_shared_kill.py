"""Shared memory between processes: whoever dies takes nothing along, and nobody sees another's."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.errors import ConnectorError
from kvtier.registry import connect
from kvtier.testing.engine_double import wait_until
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import (
    Area,
    Done,
    Hello,
    Lease,
    Leased,
    Mapped,
    Release,
    Status,
    Take,
    Welcome,
    Write,
)
from tests.lib.daemon import Daemon, daemon
from tests.lib.wire_client import WireClient

REPOSITORY = Path(__file__).parents[2]
SECRETS = {name: f"secret of {name} ".encode() * 20_000 for name in ("ann", "ben")}

HOLDER = """
import sys
from tests.lib.wire_client import WireClient
from kvtier.wire import Area, Lease, Leased, Status
client = WireClient(sys.argv[1]).hello(version=2)
for number in range(20):
    client.send(Lease(number, b"key"))
    answer = client.answer()
    assert isinstance(answer, Leased) and answer.status is Status.OK, answer
client.map(Area.STAGING)
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{name} token-of-{name}\n" for name in SECRETS))
    options = (f"--token-file={tokens}", "--dram=64MiB")
    with daemon(*options, listen=(f"unix:{tmp_path}/socket",)) as running:
        yield running


def client_of(running: Daemon, name: str = "") -> WireClient:
    token = f"token-of-{name}".encode() if name else b""
    return WireClient(running.urls[0]).hello(token, version=2)


def store(client: WireClient, key: bytes, data: bytes) -> None:
    client.send(Write(1, key), data)
    assert client.answer() == Done(1, Status.OK, "")


def lease(client: WireClient, number: int, key: bytes) -> Leased:
    client.send(Lease(number, key))
    answer = client.answer()
    assert isinstance(answer, Leased)
    return answer


def objects_of(client: WireClient) -> tuple[Mapped, int]:
    mapped, descriptors = client.map(Area.OBJECTS)
    assert mapped.status is Status.OK
    (descriptor,) = descriptors
    return mapped, descriptor


def pinned(running: Daemon) -> int:
    stats = running.get("/v1/stats", "token-of-ann")
    count: int = stats["tiers"][0]["pinned_chunks"]
    return count


def test_b102_a_client_maps_its_own_objects_and_nobody_elses(served: Daemon) -> None:
    clients = {name: client_of(served, name) for name in SECRETS}
    files: dict[str, mmap.mmap] = {}
    for name, client in clients.items():
        store(client, b"the same key", SECRETS[name])
        leased = lease(client, 7, b"the same key")
        mapped, descriptor = objects_of(client)
        assert mapped.region == leased.region
        file = mmap.mmap(descriptor, mapped.nbytes, prot=mmap.PROT_READ)
        assert file[leased.offset : leased.offset + leased.nbytes] == SECRETS[name]
        files[name] = file
        os.close(descriptor)
    assert files["ann"].find(b"secret of ben") == files["ben"].find(b"secret of ann") == -1
    # Nor what another one's memory becomes: whoever stores more takes it over, emptied.
    clients["ann"].send(Release((7,)))
    for number in range(64):
        store(clients["ben"], b"%d" % number, SECRETS["ben"] * 3)
    assert files["ann"].find(b"secret of ben") == -1
    for name, client in clients.items():
        files[name].close()
        client.close()
    assert served.stop() == 0


def test_a_client_cannot_write_what_it_maps(served: Daemon) -> None:
    with closing(client_of(served, "ann")) as client:
        store(client, b"key", SECRETS["ann"])
        lease(client, 1, b"key")
        mapped, descriptor = objects_of(client)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, mapped.nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        assert seals & wanted == wanted
        assert os.fstat(descriptor).st_mode & 0o777 == 0
        os.close(descriptor)


def test_another_ones_staging_file_is_nobodys(served: Daemon) -> None:
    """Its number is no secret that would open it."""
    with closing(client_of(served, "ann")) as ann, closing(client_of(served, "ben")) as ben:
        mapped, (descriptor,) = ann.map(Area.STAGING)
        with mmap.mmap(descriptor, mapped.nbytes) as staging:
            os.close(descriptor)
            staging[4096 : 4096 + 100] = SECRETS["ann"][:100]
            ben.send(Take(1, b"stolen", mapped.region, 4096, 100))
            answer = ben.answer()
            assert isinstance(answer, Done)
            assert answer.status is Status.ABSENT
            ann.send(Take(1, b"key", mapped.region, 4096, 100))
            assert ann.answer() == Done(1, Status.OK, "")
            leased = lease(ann, 2, b"key")
            objects, reading = objects_of(ann)
            with mmap.mmap(reading, objects.nbytes, prot=mmap.PROT_READ) as file:
                assert file[leased.offset :][:100] == SECRETS["ann"][:100]
            os.close(reading)


def test_a_client_that_is_killed_takes_its_leases_along_and_nothing_else(tmp_path: Path) -> None:
    with daemon("--dram=64MiB", listen=(f"unix:{tmp_path}/socket",)) as running:
        with closing(client_of(running)) as other:
            store(other, b"key", SECRETS["ann"])
            kept = lease(other, 99, b"key")
            holder = subprocess.Popen(
                [sys.executable, "-c", HOLDER, running.urls[0]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
            )
            assert holder.stdout is not None
            assert holder.stdin is not None
            assert holder.stdout.readline() == "holding\n"
            assert running.connections()["leases"] == 21
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            holder.stdout.close()
            holder.stdin.close()
            wait_until(lambda: running.connections()["lost_leases"] == 20, "leases are kept")
            assert pinned(running) == 1
            mapped, descriptor = objects_of(other)
            with mmap.mmap(descriptor, mapped.nbytes, prot=mmap.PROT_READ) as file:
                os.close(descriptor)
                assert file[kept.offset : kept.offset + kept.nbytes] == SECRETS["ann"]
        wait_until(lambda: pinned(running) == 0, "a lease is kept")
        assert running.stop() == 0


def test_what_is_mapped_survives_a_killed_server(tmp_path: Path) -> None:
    with (
        daemon("--dram=64MiB", listen=(f"unix:{tmp_path}/socket",)) as running,
        closing(client_of(running)) as client,
    ):
        store(client, b"key", SECRETS["ann"])
        leased = lease(client, 1, b"key")
        mapped, descriptor = objects_of(client)
        with mmap.mmap(descriptor, mapped.nbytes, prot=mmap.PROT_READ) as file:
            os.close(descriptor)
            assert running.stop(signal.SIGKILL) == -signal.SIGKILL
            assert file[leased.offset : leased.offset + leased.nbytes] == SECRETS["ann"]
            assert len(file[:]) == mapped.nbytes  # No page of it raises a signal.
            assert client.take() is None


async def test_a_connector_outlives_its_servers(tmp_path: Path) -> None:
    """It maps the memory of each of them; none of an earlier one's is read for a later one's."""
    listen = (f"unix:{tmp_path}/socket",)
    connector = connect(f"kvtier+unix://{tmp_path}/socket")
    for turn in range(2):
        data = bytes([turn]) * 300_000
        buffer = memoryview(bytearray(len(data)))
        with daemon("--dram=64MiB", listen=listen) as running:
            request = ReadRequest(b"key", 0, len(data))
            outcomes = await connector.read([request], [buffer])  # Of what is gone it is told now.
            assert outcomes == [None] or isinstance(outcomes[0], ConnectorError)
            assert await connector.read([request], [buffer]) == [None]
            # The first by the socket, where the file to stage it in was an earlier one's.
            for _ in range(2):
                assert await connector.write([WriteItem(b"key", memoryview(data))]) == [None]
            assert await connector.read([request], [buffer]) == [len(data)]
            assert buffer == data
            counted = running.connections()
            assert (counted["taken"], counted["leases"]) == (2 if turn == 0 else 1, 1)
            running.stop(signal.SIGKILL)
        assert isinstance((await connector.read([request], [buffer]))[0], ConnectorError)
    await connector.close()


async def test_an_upload_whose_server_is_killed_is_a_fault(tmp_path: Path) -> None:
    with daemon("--dram=64MiB", listen=(f"unix:{tmp_path}/socket",)) as running:
        connector = connect(f"{running.urls[0]}?timeout_s=20")
        item = WriteItem(b"key", memoryview(SECRETS["ann"]))
        assert await connector.write([item]) == [None]
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        assert isinstance((await connector.write([item]))[0], ConnectorError)
        await connector.close()


def test_memory_is_not_shared_where_it_must_not_be(tmp_path: Path) -> None:
    with daemon("--no-shared-memory", listen=(f"unix:{tmp_path}/socket",)) as running:
        assert running.get("/v1/config")["shared_memory"] is False
        with closing(WireClient(running.urls[0])) as client:
            client.send(Hello(1, 2, b""))
            assert client.answer() == Welcome(1)
