"""Who is not let in learns why in plain words, and so does the operator, without a flood."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConnectorError, ConnectorRefusedError
from kvtier.registry import connect
from kvtier.testing.engine_double import wait_until
from kvtier.types import ReadRequest
from tests.lib.certificates import Authority, make_authority
from tests.lib.daemon import Daemon, daemon

TRIES = 5


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority") / "files")


@pytest.fixture(scope="module")
def secured(authority: Authority) -> Iterator[Daemon]:
    files = (f"--tls-cert={authority.server_cert}", f"--tls-key={authority.server_key}")
    with daemon(*files, f"--client-ca={authority.ca}") as running:
        yield running
        assert running.stop() == 0


async def outcome_of(url: str) -> ConnectorError:
    connector = connect(url)
    (outcome,) = await connector.read([ReadRequest(b"key", 0, 7)], [memoryview(bytearray(7))])
    await connector.close()
    assert isinstance(outcome, ConnectorError)
    return outcome


def told(running: Daemon, part: str) -> list[str]:
    return [line for line in running.log if part in line]


async def test_b100_a_wrong_token_is_logged_once_for_each_peer_and_counted(tmp_path: Path) -> None:
    (tokens := tmp_path / "tokens").write_text("ann secret-of-ann\n")
    (wrong := tmp_path / "wrong").write_text("secret-of-cat\n")
    listen = ("127.0.0.1:0", f"unix:{tmp_path}/socket")
    with daemon(f"--token-file={tokens}", listen=listen) as running:
        for url in running.urls:
            for _ in range(TRIES):
                outcome = await outcome_of(f"{url}?token_file={wrong}")
                assert isinstance(outcome, ConnectorRefusedError)
        running.wait_for_line(f"user {os.geteuid()} is refused")
        assert running.get("/v1/stats", "secret-of-ann")["connections"]["refused"] == 2 * TRIES
        assert running.stop() == 0
        lines = told(running, "is refused")
    assert len(lines) == 2, lines
    assert all("not allowed: the token is wrong" in line for line in lines)
    assert "127.0.0.1" in lines[0]
    assert "secret" not in "\n".join(running.log)


async def test_a_plain_url_of_a_server_with_tls_says_what_is_likely(secured: Daemon) -> None:
    outcome = await outcome_of(secured.urls[0].replace("kvtiers://", "kvtier://"))
    assert "perhaps it speaks TLS: kvtiers://" in str(outcome)
    secured.wait_for_line("127.0.0.1 is refused: it ")
    assert secured.connections()["refused"] >= 1


async def test_who_shows_no_certificate_learns_that_one_is_wanted(
    secured: Daemon, authority: Authority
) -> None:
    before = secured.connections()["refused"]
    outcome = await outcome_of(f"{secured.urls[0]}?ca={authority.ca}")
    assert "perhaps it wants a certificate of ours" in str(outcome)
    wait_until(lambda: secured.connections()["refused"] > before, "it is not counted")


async def test_a_url_with_tls_of_a_plain_server_says_what_is_likely(authority: Authority) -> None:
    with daemon() as running:
        (url,) = running.urls
        outcome = await outcome_of(f"{url.replace('kvtier://', 'kvtiers://')}?ca={authority.ca}")
        assert "the server speaks no TLS: connect to kvtier://" in str(outcome)
        outcome = await outcome_of(running.http.replace("http://", "kvtier://"))
        assert "perhaps this is the address of --http" in str(outcome)
        assert running.stop() == 0
