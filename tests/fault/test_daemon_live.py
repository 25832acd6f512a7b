"""A cache server that is changed, emptied and stopped while it is used."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from kvtier.errors import ConnectorRefusedError
from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import Refused, Status, Write
from tests.lib.certificates import make_authority
from tests.lib.daemon import Daemon, daemon
from tests.lib.wire_client import WireClient

NBYTES = 256 << 10
KEYS = [b"key %d" % number for number in range(16)]
EVERYTHING = {"objects": {"all": True}}


def payload(key: bytes, version: int) -> bytes:
    """Bytes of which every part says whose and which they are."""
    mark = b"%s version %d;" % (key, version)
    return (mark * (NBYTES // len(mark) + 1))[:NBYTES]


async def write(connector: Connector, version: int) -> list[object]:
    items = [WriteItem(key, memoryview(payload(key, version))) for key in KEYS]
    return list(await connector.write(items))


async def read(connector: Connector) -> list[int | None]:
    """The version of each object, None: there is none. Fails for bytes that are none's."""
    buffers = [bytearray(NBYTES) for _ in KEYS]
    requests = [ReadRequest(key, 0, NBYTES) for key in KEYS]
    outcomes = await connector.read(requests, [memoryview(buffer) for buffer in buffers])
    versions: list[int | None] = []
    for key, buffer, outcome in zip(KEYS, buffers, outcomes, strict=True):
        if outcome != NBYTES:
            versions.append(None)
            continue
        version = int(buffer.partition(b"version ")[2].partition(b";")[0])
        assert buffer == payload(key, version), f"{key!r} is not as it was written"
        versions.append(version)
    return versions


async def do(running: Daemon, method: str, path: str, body: object = None) -> Any:
    """Ask the control plane beside what runs; return its answer to what it does."""
    status, told = await asyncio.to_thread(running.ask, method, path, body)
    assert status in {200, 202}, told
    return told


async def test_what_is_invalidated_while_it_is_read_is_never_seen_again(tmp_path: Path) -> None:
    with daemon(f"--disk={tmp_path}/disk", "--disk-bytes=256MiB") as running:
        running.wait_until_ready()
        writer, reader = connect(running.urls[0]), connect(running.urls[0])
        floor, seen, over = 0, 0, asyncio.Event()

        async def look() -> None:
            nonlocal seen
            while not over.is_set():
                before = floor
                for version in await read(reader):
                    assert version is None or version >= before, "it was invalidated"
                    seen += version is not None

        looking = asyncio.create_task(look())
        for version in range(6):
            assert await write(writer, version) == [None] * len(KEYS)
            await read(writer)
            how = {"objects": {"keys": [key.hex() for key in KEYS]}} if version % 2 else EVERYTHING
            told = await do(running, "POST", "/v1/invalidate", how)
            assert not told["busy"]
            floor = version + 1
            assert await read(writer) == [None] * len(KEYS)
        over.set()
        await looking
        assert seen, "something was there to be read"
        await writer.close()
        await reader.close()
        assert running.stop() == 0


async def test_what_is_evicted_while_it_is_read_is_whole_or_gone(tmp_path: Path) -> None:
    with daemon(f"--disk={tmp_path}/disk", "--disk-bytes=256MiB") as running:
        running.wait_until_ready()
        writer, reader = connect(running.urls[0]), connect(running.urls[0])
        over = asyncio.Event()
        found: set[int | None] = set()

        async def look() -> None:
            while not over.is_set():
                found.update(await read(reader))

        looking = asyncio.create_task(look())
        evicted = 0
        for version in range(4):
            await write(writer, version)
            for tiers in (["dram"], ["dram", "disk"]):
                told = await do(running, "POST", "/v1/evict", {**EVERYTHING, "tiers": tiers})
                evicted += told["evicted"]
        over.set()
        await looking
        assert evicted
        assert found - {None} <= set(range(4))
        assert len(found) > 1
        await writer.close()
        await reader.close()
        assert running.stop() == 0


async def test_an_epoch_outlives_a_kill(tmp_path: Path) -> None:
    options = (f"--disk={tmp_path}/disk", "--disk-bytes=256MiB")
    with daemon(*options) as running:
        running.wait_until_ready()
        connector = connect(running.urls[0])
        assert await write(connector, 1) == [None] * len(KEYS)
        assert (await do(running, "POST", "/v1/invalidate", EVERYTHING))["epoch"] == 1
        running.process.kill()
        running.process.wait()
        await connector.close()
    with daemon(*options) as running:
        running.wait_until_ready()
        connector = connect(running.urls[0])
        assert await read(connector) == [None] * len(KEYS)
        await connector.close()
        assert running.stop() == 0


class Files:
    """The files that a server is told to read."""

    def __init__(self, folder: Path) -> None:
        self.config, self.tokens = folder / "kvtier.toml", folder / "tokens"
        self.say()

    def say(self, *lines: str, tokens: str = "ann secret-of-ann\nben secret-of-ben\n") -> None:
        self.tokens.write_text(tokens)
        self.config.write_text("\n".join([f"token_file = '{self.tokens}'", *lines]))

    def url(self, running: Daemon, name: str) -> str:
        return f"{running.urls[0]}?token_file={self.tokens}&token_name={name}"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_settings_are_read_anew_under_load_and_withdrawn_tokens_end(files: Files) -> None:
    with daemon(f"--config={files.config}") as running:
        ann, ben = (connect(files.url(running, name)) for name in ("ann", "ben"))
        assert await write(ann, 1) == await write(ben, 1) == [None] * len(KEYS)
        over = asyncio.Event()

        async def load() -> int:
            turns = 0
            while not over.is_set():
                assert await read(ann) == [1] * len(KEYS)
                turns += 1
            return turns

        loading = asyncio.create_task(load())
        files.say(
            "connections = 100",
            "log_level = 'info'",
            "[quotas]",
            "cat = '1MiB'",
            tokens="ann secret-of-ann\ncat secret-of-cat\n",
        )
        running.process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(
            running.wait_for_line, "others are: quotas, token_file, connections, log_level"
        )
        (outcome,) = set(map(type, await write(ben, 2)))
        assert outcome is ConnectorRefusedError
        cat = connect(files.url(running, "cat"))
        await write(cat, 3)
        assert 0 < sum(version == 3 for version in await read(cat)) <= 4
        over.set()
        assert await loading > 1, "whoever kept its token noticed nothing"
        for connector in (ann, ben, cat):
            await connector.close()
        config = running.get("/v1/config", "secret-of-cat")
        assert config["credentials"] == ["cat"], "nobody is told of others"
        assert running.stop() == 0
        assert "secret" not in "\n".join(running.log)


WRONG = {
    "dram = '1GiB'": "",
    "listen = '127.0.0.1:1'": "",
    "disk = '/kv'": (
        "disk, disk_bytes, disk_admission, disk_write_bytes_per_day, durability: "
        "cannot change while the server runs"
    ),
    "policy = 'arc'": "policy: cannot change while the server runs",
    "insecure = true": "insecure: cannot change while the server runs",
    "polcy = 'arc'": "has no 'polcy' (did you mean 'policy'?)",
    "quota = '1GB'": "--quota = '1GB'",
    "quota = [": "this is no TOML",
}


def test_settings_that_cannot_be_leave_all_as_it_is(files: Files) -> None:
    files.say(tokens="secret-of-all\n")
    with daemon(f"--config={files.config}") as running:
        before = running.get("/v1/config", "secret-of-all")
        for line, why in WRONG.items():
            files.say(line, "quotas = {ann = '1MiB'}" if why else "", tokens="secret-of-all\n")
            status, told = running.ask("POST", "/v1/config", token="secret-of-all")
            if not why:  # The command line says otherwise, and wins.
                assert (status, told) == (200, {"changed": []})
                continue
            assert status == 409
            assert why in told["error"]["message"]
            running.process.send_signal(signal.SIGHUP)
            running.wait_for_line(why)
            assert running.get("/v1/config", "secret-of-all") == before
        files.say(tokens="")
        status, told = running.ask("POST", "/v1/config", token="secret-of-all")
        assert status == 409
        assert "it holds no token" in told["error"]["message"]
        assert running.get("/ready") == {"ready": True}
        assert running.stop() == 0


async def test_certificates_name_credentials_and_are_renewed(tmp_path: Path) -> None:
    made = make_authority(tmp_path / "authority")
    renewed, other = ((tmp_path / f"{n}.pem", tmp_path / f"{n}.key") for n in ("new", "other"))
    made.vouch("server", *renewed)
    made.vouch("other-host", *other)
    options = (
        f"--tls-cert={made.server_cert}",
        f"--tls-key={made.server_key}",
        f"--client-ca={made.ca}",
    )
    with daemon(*options) as running:
        (url,) = running.urls
        first = connect(f"{url}?ca={made.ca}&cert={made.client_cert}&key={made.client_key}")
        second = connect(f"{url}?ca={made.ca}&cert={other[0]}&key={other[1]}")
        assert await write(first, 1) == [None] * len(KEYS)
        assert await read(second) == [None] * len(KEYS)
        assert await write(second, 2) == [None] * len(KEYS)
        assert await read(first) == [1] * len(KEYS)
        told = await do(running, "GET", "/v1/namespaces")
        assert {each["credential"] for each in told["namespaces"]} == {"client", "other-host"}
        before = shown_certificate(url, made.ca, made.client_cert, made.client_key)
        made.server_cert.write_bytes(renewed[0].read_bytes())
        made.server_key.write_bytes(renewed[1].read_bytes())
        assert await do(running, "POST", "/v1/config") == {"changed": []}
        after = shown_certificate(url, made.ca, made.client_cert, made.client_key)
        assert after == ssl.PEM_cert_to_DER_cert(renewed[0].read_text()) != before
        assert await read(first) == [1] * len(KEYS), "who is connected stays so"
        made.server_key.write_bytes(b"no key")
        status, answer = running.ask("POST", "/v1/config")
        assert (status, "--tls-cert" in answer["error"]["message"]) == (409, True)
        assert shown_certificate(url, made.ca, made.client_cert, made.client_key) == after
        await first.close()
        await second.close()
        assert running.stop() == 0


def shown_certificate(url: str, ca: Path, cert: Path, key: Path) -> bytes | None:
    """Connect and return the certificate that the server shows."""
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(cert, key)
    parts = urlsplit(url)
    assert parts.port is not None
    with (
        socket.create_connection(("127.0.0.1", parts.port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        return secure.getpeercert(binary_form=True)


async def test_a_server_that_is_stopped_under_load_keeps_what_it_took(tmp_path: Path) -> None:
    options = (f"--disk={tmp_path}/disk", "--disk-bytes=256MiB")
    taken = -1
    with daemon(*options) as running:
        connector = connect(f"{running.urls[0]}?timeout_s=20")
        begun = asyncio.Event()

        async def load() -> None:
            nonlocal taken
            for version in range(1000):
                outcomes = await write(connector, version)
                if any(outcome is not None for outcome in outcomes):
                    return
                taken = version
                begun.set()

        loading = asyncio.create_task(load())
        await begun.wait()
        assert await asyncio.to_thread(running.stop) == 0
        await loading
        await connector.close()
    with daemon(*options) as running:
        running.wait_until_ready()
        connector = connect(running.urls[0])
        versions = await read(connector)
        # The last writes may have come through without their answers.
        assert all(version in {taken, taken + 1, None} for version in versions)
        assert any(version is not None for version in versions)
        await connector.close()
        assert running.stop() == 0


def test_a_server_that_is_told_to_drain_says_so_and_finishes_what_runs() -> None:
    data = bytes(1 << 20)
    with daemon("--drain-seconds=20") as running:
        with closing(WireClient(running.urls[0]).hello()) as busy:
            idler = WireClient(running.urls[0]).hello()
            busy.send(Write(1, b"key"), data[:1000], announced=len(data))
            assert running.ask("POST", "/v1/drain") == (202, {"draining": True})
            assert idler.answer() == Refused(Status.UNAVAILABLE, "the server stops")
            idler.close()
            assert running.ask("GET", "/ready") == (503, {"ready": False})
            assert running.get("/health")["status"] == "draining"
            busy.socket.sendall(data[1000:])
            assert busy.answer().kind.name == "DONE"
        assert running.process.wait(20) == 0


def test_b100_beyond_this_machine_operators_are_served_with_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_authority(tmp_path / "authority")
    tokens = tmp_path / "tokens"
    tokens.write_text("secret-of-all")
    options = (f"--tls-cert={made.server_cert}", f"--tls-key={made.server_key}")
    with daemon(*options, f"--admin-token-file={tokens}", "--http=0.0.0.0:0") as running:
        assert running.http.startswith("https://0.0.0.0:")
        url = running.http.replace("0.0.0.0", "127.0.0.1")
        told = CliRunner().invoke(app, ["ls", url, f"--token-file={tokens}"])
        assert "certificate verify failed" in str(told.exception)
        monkeypatch.setenv("SSL_CERT_FILE", str(made.ca))
        told = CliRunner().invoke(app, ["ls", url, f"--token-file={tokens}"])
        assert told.exit_code == 0, told.exception
        plain = url.replace("https", "http")
        told = CliRunner().invoke(app, ["ls", plain, f"--token-file={tokens}"])
        assert "no answer of a server" in str(told.exception)
        assert running.stop() == 0


def test_a_server_that_is_told_twice_to_stop_waits_for_nobody() -> None:
    with (
        daemon("--drain-seconds=600") as running,
        closing(WireClient(running.urls[0]).hello()) as client,
    ):
        client.send(Write(1, b"key"), b"x", announced=1 << 20)
        running.process.send_signal(signal.SIGTERM)
        running.wait_for_line("stopping; what runs has 600 s")
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        assert client.take() is None
