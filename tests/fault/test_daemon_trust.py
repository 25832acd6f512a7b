"""Whom a cache server lets in, what each may see, and that it tells nobody's secrets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.error
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.cli.main import run
from kvtier.errors import ConnectorRefusedError, ConnectorUnavailableError
from kvtier.registry import connect
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import Data, Hello, Read, Refused, Status, Write
from kvtier_server.settings import Address
from kvtier_server.sockets import bound
from tests.lib.certificates import make_authority
from tests.lib.daemon import PROGRAM, Daemon, daemon
from tests.lib.wire_client import WireClient

TOKENS = "ann secret-of-ann\nben secret-of-ben\n"
DATA = memoryview(b"payload")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path]]:
    folder = tmp_path_factory.mktemp("daemon")
    tokens = folder / "tokens"
    tokens.write_text(TOKENS)
    listen = ("127.0.0.1:0", f"unix:{folder}/socket")
    options = (f"--token-file={tokens}", "--quota=8MiB")
    with daemon(*options, listen=listen) as running:
        yield running, tokens
        assert running.stop() == 0
        assert "secret" not in "\n".join(running.log)


async def outcome_of(url: str) -> object:
    connector = connect(url)
    buffer = memoryview(bytearray(len(DATA)))
    (outcome,) = await connector.read([ReadRequest(b"key", 0, len(DATA))], [buffer])
    await connector.close()
    return outcome


async def test_a_wrong_token_and_none_are_refused(
    guarded: tuple[Daemon, Path], tmp_path: Path
) -> None:
    running, tokens = guarded
    wrong = tmp_path / "wrong"
    wrong.write_text("secret-of-cat\n")
    for url in (running.urls[0], f"{running.urls[0]}?token_file={wrong}"):
        outcome = await outcome_of(url)
        assert isinstance(outcome, ConnectorRefusedError)
        assert "token" in str(outcome)
        assert "secret" not in str(outcome)
    # On a Unix socket a wrong token is refused, too: nobody means to be somebody else.
    assert isinstance(
        await outcome_of(f"{running.urls[1]}?token_file={wrong}"), ConnectorRefusedError
    )
    assert await outcome_of(f"{running.urls[0]}?token_file={tokens}&token_name=ann") is None


async def test_a_unix_socket_knows_its_peer(guarded: tuple[Daemon, Path]) -> None:
    assert await outcome_of(guarded[0].urls[1]) is None


async def test_b102_credentials_never_see_each_others_objects(
    guarded: tuple[Daemon, Path],
) -> None:
    running, tokens = guarded
    url = f"{running.urls[0]}?token_file={tokens}"
    ann, ben = connect(f"{url}&token_name=ann"), connect(f"{url}&token_name=ben")
    assert await ann.write([WriteItem(b"shared", DATA)]) == [None]
    assert await ann.contains([b"shared"]) == [True]
    assert await ben.contains([b"shared"]) == [False]
    await ben.delete([b"shared"])
    assert await ann.contains([b"shared"]) == [True]
    buffer = memoryview(bytearray(len(DATA)))
    assert await ben.read([ReadRequest(b"shared", 0, len(DATA))], [buffer]) == [None]
    await ann.close()
    await ben.close()


async def test_a_credential_holds_no_more_than_its_quota(guarded: tuple[Daemon, Path]) -> None:
    running, tokens = guarded
    url = f"{running.urls[0]}?token_file={tokens}"
    ann, ben = connect(f"{url}&token_name=ann"), connect(f"{url}&token_name=ben")
    assert await ben.write([WriteItem(b"bens", DATA)]) == [None]
    (outcome,) = await ann.write([WriteItem(b"too much", memoryview(bytes(9 << 20)))])
    assert isinstance(outcome, ConnectorRefusedError)
    for number in range(20):
        await ann.write([WriteItem(b"part %d" % number, memoryview(bytes(1 << 20)))])
    held = await ann.contains([b"part %d" % number for number in range(20)])
    assert 0 < sum(held) <= 8
    assert await ben.contains([b"bens"]) == [True]
    await ann.close()
    await ben.close()


def test_b100_what_operators_ask_for_needs_the_token(guarded: tuple[Daemon, Path]) -> None:
    running, _ = guarded
    assert running.get("/health")["status"] == "ok"
    assert running.get("/ready") == {"ready": True}
    assert "kvtier_tier_ok" in running.get_text("/metrics")
    for path in ("/v1/stats", "/v1/config", "/v1/kvtier/stats"):
        for token in ("", "wrong"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                running.get(path, token)
            assert caught.value.code == 401
            caught.value.close()
        assert running.get(path, "secret-of-ben")
    config = running.get("/v1/config", "secret-of-ann")
    assert config["credentials"] == ["ann"]
    assert "secret" not in json.dumps(config)


def test_stat_shows_a_server(guarded: tuple[Daemon, Path]) -> None:
    running, _ = guarded
    told = subprocess.run(
        [PROGRAM, "stat", running.http, "--json"],
        env={**os.environ, "KVTIER_API_KEY": "secret-of-ann"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert {tier["name"] for tier in json.loads(told.stdout)["tiers"]} == {"dram"}


REFUSED = {
    ("--listen=0.0.0.0:0",): "--listen = '0.0.0.0:0'",
    ("--listen=127.0.0.1:0", "--http=0.0.0.0:0"): "--http = '0.0.0.0:0'",
    ("--listen=7070",): "--listen = '7070': allowed is host:port or unix:/path",
    ("--listen=127.0.0.1:70700",): "--listen = '127.0.0.1:70700'",
    ("--listen=unix:relative",): "--listen = 'unix:relative'",
    ("--listen=unix:/no/such/folder/socket",): "there is no folder '/no/such/folder'",
    ("--listen=127.0.0.1:0", "--dram=4GB"): "--dram = '4GB'",
    ("--listen=127.0.0.1:0", "--dram=1MiB"): "--dram = 1048576: allowed is at least one slab",
    ("--listen=127.0.0.1:0", "--disk=/a", "--disk-bytes=1"): "--disk-bytes = 1: allowed is",
    ("--listen=127.0.0.1:0", "--disk=/a", "--disk=/a/b"): "--disk = ",
    ("--listen=127.0.0.1:0", "--remote=reddis://x"): "(did you mean 'redis'?)",
    ("--listen=127.0.0.1:0", "--remote=kvtier://x"): "--remote = 'kvtier'",
    ("--listen=127.0.0.1:0", "--token-file=/none"): "--token-file = '/none'",
    ("--listen=127.0.0.1:0", "--tls-cert=/none"): "--tls-cert, --tls-key",
    (
        "--listen=127.0.0.1:0",
        "--tls-cert=/none",
        "--tls-key=/no",
    ): "--tls-key = '/no': No such file",
    ("--listen=127.0.0.1:0", "--dram=900TiB"): "--dram = 900 TiB: ",
    (
        "--listen=127.0.0.1:0",
        "--remote=redis://:hidden@h?prefx=a",
    ): "--remote redis://h: a redis:// URL has no 'prefx'",
    ("--listen=127.0.0.1:0", "--diskk=/x"): "No such option",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_start_that_cannot_be_says_why(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert REFUSED[arguments] in refusal(capsys, *arguments)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command for a start that must fail; return what it says."""
    with pytest.raises(SystemExit) as caught:
        run(["daemon", *arguments])
    assert caught.value.code
    return capsys.readouterr().err


def test_insecure_listens_where_it_is_told_to() -> None:
    with daemon("--insecure", listen=("0.0.0.0:0",)) as running:
        assert any("trusted (--insecure)" in line for line in running.log)
        assert running.stop() == 0


async def test_tls_is_spoken_and_certificates_are_asked_for(tmp_path: Path) -> None:
    made = make_authority(tmp_path / "authority")
    options = (
        f"--tls-cert={made.server_cert}",
        f"--tls-key={made.server_key}",
        f"--client-ca={made.ca}",
    )
    with daemon(*options) as running:
        (url,) = running.urls
        assert url.startswith("kvtiers://")
        known = f"{url}?ca={made.ca}&cert={made.client_cert}&key={made.client_key}"
        connector = connect(known)
        big = memoryview(bytes(range(256)) * 8192)
        assert await connector.write([WriteItem(b"key", big)]) == [None]
        buffer = bytearray(len(big))
        request = ReadRequest(b"key", 0, len(big))
        assert await connector.read([request], [memoryview(buffer)]) == [len(big)]
        assert buffer == big
        await connector.close()
        faults = (ConnectorRefusedError, ConnectorUnavailableError)
        assert isinstance(await outcome_of(f"{url}?ca={made.ca}"), faults)
        assert isinstance(await outcome_of(url), ConnectorRefusedError)
        plain = url.replace("kvtiers", "kvtier")
        assert isinstance(await outcome_of(plain), ConnectorUnavailableError)
        assert running.stop() == 0


def test_a_server_that_is_told_to_stop_finishes_what_runs() -> None:
    data = bytes(1 << 20)
    with daemon("--drain-seconds=20") as running:
        with closing(WireClient(running.urls[0]).hello()) as busy:
            busy.send(Write(1, b"key"), data[:1000], announced=len(data))
            idler = WireClient(running.urls[0]).hello()
            running.process.send_signal(signal.SIGTERM)
            # The idle one is sent away; the busy one goes on.
            frame = idler.take()
            assert frame is not None
            assert frame.message == Refused(Status.UNAVAILABLE, "the server stops")
            idler.close()
            with pytest.raises(OSError, match="refused"):
                WireClient(running.urls[0])
            busy.socket.sendall(data[1000:])
            frame = busy.take()
            assert frame is not None
            assert frame.message.kind.name == "DONE"
        assert running.process.wait(20) == 0


def test_a_server_with_a_client_that_hangs_stops_in_time() -> None:
    with (
        daemon("--drain-seconds=0.2") as running,
        closing(WireClient(running.urls[0]).hello()) as client,
    ):
        client.send(Write(1, b"key"), b"x", announced=1 << 20)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0
        assert client.take() is None


def test_two_servers_never_share_a_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"unix:{tmp_path}/socket"
    with daemon(listen=(where,)) as running:
        assert "somebody listens there" in refusal(capsys, f"--listen={where}")
        mode = (tmp_path / "socket").stat().st_mode
        assert mode & 0o777 == 0o600
        running.process.kill()
        running.process.wait()
    # What a killed one has left behind is in nobody's way; a file that is no socket stays.
    with bound("--listen", Address(path=f"{tmp_path}/socket")) as listener:
        assert listener.getsockname() == f"{tmp_path}/socket"
    (tmp_path / "socket").write_text("mine")
    assert "there is a file of that name" in refusal(capsys, f"--listen={where}")
    assert (tmp_path / "socket").read_text() == "mine"


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        told = refusal(capsys, "--listen=127.0.0.1:0", f"--http={where}")
        assert f"--http = '{where}': cannot listen: Address already in use" in told


def test_a_hello_is_not_shown() -> None:
    assert "secret" not in repr(Hello(1, 1, b"secret"))
    messages: list[object] = [Read(1, b"key", 0, 1), Data(1, Status.OK, "")]
    assert messages[0] != messages[1]
