"""What the control plane refuses, and what the command line says of servers that refuse."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from kvtier.constants import (
    CONTROL_BODY_BYTES_MAX,
    CONTROL_KEYS_MAX,
    CONTROL_REQUESTS_MAX,
    CONTROL_WARM_S_MAX,
)
from kvtier.testing.engine_double import wait_until
from tests.lib.daemon import Daemon, daemon

EVERYTHING = {"objects": {"all": True}}


@pytest.fixture(scope="module")
def bare() -> Iterator[Daemon]:
    with daemon() as running:
        yield running
        assert running.stop() == 0


def test_bodies_and_lists_beyond_the_limits_are_refused(bare: Daemon) -> None:
    keys = ["00"] * (CONTROL_KEYS_MAX + 1)
    status, told = bare.ask("POST", "/v1/evict", {"objects": {"keys": keys}})
    assert (status, told["error"]["type"]) == (422, "invalid")
    assert len(told["error"]["message"]) <= 1000
    long = {"objects": {"keys": ["00" * 1024] * (CONTROL_BODY_BYTES_MAX // 2048)}}
    status, told = bare.ask("POST", "/v1/evict", long)
    assert status == 413
    assert str(CONTROL_BODY_BYTES_MAX) in told["error"]["message"]
    # The same without a length, a piece at a time.
    pieces = (b" " * 65_536 for _ in range(CONTROL_BODY_BYTES_MAX // 65_536 + 1))
    request = urllib.request.Request(bare.http + "/v1/evict", pieces, method="POST")
    request.add_header("Content-Type", "application/json")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    assert caught.value.code == 413
    caught.value.close()
    assert bare.get("/ready") == {"ready": True}


def test_times_beyond_the_limit_are_refused(bare: Daemon) -> None:
    warm = {**EVERYTHING, "seconds": CONTROL_WARM_S_MAX}
    assert bare.ask("POST", "/v1/warm", warm)[0] == 200
    status, told = bare.ask("POST", "/v1/warm", {**warm, "seconds": CONTROL_WARM_S_MAX + 1})
    assert (status, told["error"]["type"]) == (422, "invalid")
    assert "seconds" in told["error"]["message"]


def test_connections_beyond_the_limit_are_told_to_come_later(bare: Daemon) -> None:
    where = ("127.0.0.1", urlsplit(bare.http).port)
    with ExitStack() as undo:
        for _ in range(CONTROL_REQUESTS_MAX):
            idle = undo.enter_context(socket.create_connection(where, timeout=20))
            idle.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            said = idle.recv(64)
        assert said.startswith(b"HTTP/1.1 503 ")
        with pytest.raises(urllib.error.HTTPError) as caught:
            bare.get("/ready")
        assert caught.value.code == 503
        caught.value.close()

    def served() -> bool:
        try:
            bare.get("/ready")
        except urllib.error.HTTPError as error:
            error.close()
            return False
        return True

    wait_until(served, "the server has not seen that they are gone")


def test_a_page_of_another_place_changes_nothing(bare: Daemon) -> None:
    for origin in ("https://evil.example", "null"):
        status, told = bare.ask("POST", "/v1/evict", EVERYTHING, Origin=origin)
        assert (status, told["error"]["type"]) == (403, "forbidden")
    pointed = {"Host": "evil.example", "Origin": "http://evil.example"}
    status, _ = bare.ask("POST", "/v1/evict", EVERYTHING, **pointed)
    assert status == 403
    assert bare.ask("POST", "/v1/evict", EVERYTHING, Origin=bare.http)[0] == 200
    assert bare.ask("POST", "/v1/evict", EVERYTHING)[0] == 200


def test_the_command_line_says_what_is_wrong_with_a_server(bare: Daemon, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        ended = CliRunner().invoke(app, arguments)
        assert ended.exit_code, ended.output
        return str(ended.exception)

    data_plane = bare.urls[0].replace("kvtier://", "http://")
    assert "no answer of a server" in said("ls", data_plane)
    assert "no answer of a server" in said("ls", "http://127.0.0.1:1")
    assert said("evict", bare.http).endswith("or --all")
    assert said("pin", bare.http, "--seconds=1").endswith("of kvtier-serve: --file")
    assert "--key: allowed is a key" in said("evict", bare.http, "--key=xyz")
    assert "there is no disk" in said("verify", bare.http)
    assert "there is no disk" in said("evict", bare.http, "--all", "--tier=disk")
    assert "known are default" in said("invalidate", bare.http, "--all", "--credential=nobody")
    assert "allowed is one" in said("warm", "--all")
    assert "prompts, for kvtier-serve" in said("warm", bare.http, "--file=x", "--all")
    tokens = tmp_path / "tokens"
    tokens.write_text("ann secret-of-ann\nben secret-of-ben\n")
    with daemon(f"--token-file={tokens}") as guarded:
        assert "(--token-file)" in said("ls", guarded.http)
        own = (f"--token-file={tokens}", "--token-name=ann")
        assert "only an operator" in said("evict", guarded.http, "--all", "--credential=ben", *own)
        assert guarded.stop() == 0
