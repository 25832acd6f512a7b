"""The cache server's connector keeps the contract of connectors against a real server process.

Each test comes with a token of its own, and so to a store that is empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.testing.connector_contract import ConnectorContract
from kvtier.testing.lending_contract import LendingContract
from tests.lib.certificates import make_authority
from tests.lib.daemon import Daemon, daemon

CREDENTIALS = 200


@dataclass
class Room:
    """A server and the tokens to it."""

    running: Daemon
    tokens: Path
    ca: Path | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def connect(self, url: str) -> Connector:
        return connect(f"{url}token_file={self.tokens}&token_name=n{next(self.numbers)}")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    folder = tmp_path_factory.mktemp("daemon")
    tokens = write_tokens(folder)
    options = (f"--disk={folder}/disk", "--disk-bytes=256MiB", f"--token-file={tokens}")
    with daemon(*options, listen=("127.0.0.1:0", f"unix:{folder}/socket")) as running:
        yield Room(running, tokens)
        assert running.stop() == 0


@pytest.fixture(scope="module")
def tls_room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    folder = tmp_path_factory.mktemp("daemon-tls")
    tokens = write_tokens(folder)
    made = make_authority(folder / "authority")
    options = (f"--tls-cert={made.server_cert}", f"--tls-key={made.server_key}")
    with daemon(*options, f"--token-file={tokens}") as running:
        yield Room(running, tokens, ca=made.ca)
        assert running.stop() == 0


def write_tokens(folder: Path) -> Path:
    tokens = folder / "tokens"
    tokens.write_text("".join(f"n{number} secret-{number}\n" for number in range(CREDENTIALS)))
    return tokens


class _AtAServer(ConnectorContract):
    @pytest.fixture(autouse=True)
    def _room(self, room: Room) -> None:
        self.room = room


class TestOverTcp(_AtAServer):
    def make_connector(self) -> Connector:
        return self.room.connect(f"{self.room.running.urls[0]}?")


class TestOverTls(ConnectorContract):
    @pytest.fixture(autouse=True)
    def _room(self, tls_room: Room) -> None:
        self.room = tls_room

    def make_connector(self) -> Connector:
        return self.room.connect(f"{self.room.running.urls[0]}?ca={self.room.ca}&")


class TestOverAUnixSocket(_AtAServer):
    def make_connector(self) -> Connector:
        return self.room.connect(f"{self.room.running.urls[1]}?shared=no&")


class TestThroughSharedMemory(_AtAServer):
    def make_connector(self) -> Connector:
        return self.room.connect(f"{self.room.running.urls[1]}?shared_from=0&")


class TestLoans(LendingContract):
    @pytest.fixture(autouse=True)
    def _room(self, room: Room) -> None:
        self.room = room

    def make_connector(self) -> Connector:
        return self.room.connect(f"{self.room.running.urls[1]}?")


def test_memory_was_shared(room: Room) -> None:
    """The last one: those before it did not go by the socket in secret."""
    figures = room.running.get("/v1/stats", "secret-0")["connections"]
    assert figures["leases"] > 0
    assert figures["taken"] > 0
