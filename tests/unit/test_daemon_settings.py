"""What the cache server is told: addresses, credentials, and what is shown of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.config import CacheConfig, DiskConfig, RemoteConfig
from kvtier.constants import DAEMON_TOKENS_MAX, MIB, WIRE_TOKEN_BYTES_MAX
from kvtier.errors import ConfigError
from kvtier_server.credentials import DEFAULT, Door, Tokens, read_tokens
from kvtier_server.settings import Address, DaemonConfig, parse_address, tls_files

ADDRESSES = {
    "127.0.0.1:7070": (Address("127.0.0.1", 7070), True),
    "localhost:0": (Address("localhost", 0), True),
    "[::1]:7070": (Address("::1", 7070), True),
    "0.0.0.0:7070": (Address("0.0.0.0", 7070), False),
    "10.1.2.3:7070": (Address("10.1.2.3", 7070), False),
    "host.example:7070": (Address("host.example", 7070), False),
    "unix:/tmp/socket": (Address(path="/tmp/socket"), True),
}


@pytest.mark.parametrize("text", ADDRESSES)
def test_addresses(text: str) -> None:
    address, loopback = ADDRESSES[text]
    assert parse_address("--listen", text) == address
    assert str(address) == text
    assert address.loopback is loopback


@pytest.mark.parametrize(
    "text", ["", ":7070", "host", "host:", "host:x", "::1:7070", "host:65536", "unix:x", "unix:"]
)
def test_what_is_no_address_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--listen = .* allowed"):
        parse_address("--listen", text)


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="107 bytes"):
        parse_address("--listen", "unix:/" + 107 * "x")
    with pytest.raises(ConfigError, match="no folder"):
        parse_address("--listen", f"unix:{tmp_path}/none/socket")


def test_the_door() -> None:
    own = os.geteuid()
    tokens = Tokens({"ann": b"a", "ben": b"b"})
    guarded, open_door = Door(tokens, {own + 1}), Door(None)
    assert guarded.credential(b"a", None) == "ann"
    assert guarded.credential(b"b", own) == "ben"
    assert guarded.credential(b"c", None) is None
    assert guarded.credential(b"c", own) is None
    assert guarded.credential(b"", None) is None
    assert guarded.credential(b"", own) == DEFAULT
    assert guarded.credential(b"", own + 1) == f"uid-{own + 1}"
    assert guarded.credential(b"", own + 2) is None
    assert open_door.credential(b"", None) == DEFAULT
    assert open_door.credential(b"a", None) is None
    assert open_door.credential(b"", own + 1) is None


def test_token_files(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("secret\n")
    assert read_tokens(str(file)).by_name == {DEFAULT: b"secret"}
    file.write_text("# who\nann  secret-1\n\nben secret-2\n")
    tokens = read_tokens(str(file))
    assert tokens.by_name == {"ann": b"secret-1", "ben": b"secret-2"}
    assert "secret" not in repr(tokens)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_token_file_that_others_may_read_is_warned_of(
    tmp_path: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    file.write_text("hidden-token\n")
    file.chmod(mode)
    read_tokens(str(file))
    assert (f"chmod 600 {file}" in caplog.text) is warned
    assert "hidden-token" not in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "a b c\n",
        "ann x\nann y\n",
        "a/b x\n",
        "x\ny\n",
        "ann " + "x" * (WIRE_TOKEN_BYTES_MAX + 1),
        "".join(f"n{number} x\n" for number in range(DAEMON_TOKENS_MAX + 1)),
    ],
)
def test_a_token_file_that_cannot_be_is_refused_unseen(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--token-file = ") as caught:
        read_tokens(str(file))
    assert "xx" not in str(caught.value)


def test_what_is_shown_holds_no_secret() -> None:
    config = DaemonConfig(
        listen=(Address("127.0.0.1", 7070),),
        cache=CacheConfig(
            64 * MIB,
            DiskConfig("/kv"),
            remotes=(RemoteConfig("redis://user:secret@host?password=secret"),),
        ),
        door=Door(Tokens({"ann": b"secret"})),
        tls=tls_files("cert", "key.pem", None),
    )
    shown = config.shown()
    assert "secret" not in repr(shown) + repr(config)
    assert shown["credentials"] == ["ann"]
    assert shown["remote"] == ["redis://***"]


def test_settings_that_contradict_are_refused() -> None:
    cache, door = CacheConfig(64 * MIB), Door(None)
    beyond = Address("10.0.0.1", 7070)
    with pytest.raises(ConfigError, match="--listen is missing"):
        DaemonConfig((), cache, door)
    with pytest.raises(ConfigError, match="each address once"):
        DaemonConfig((Address("::1", 7), Address("::1", 7)), cache, door)
    with pytest.raises(ConfigError, match="--token-file, --client-ca, or --insecure"):
        DaemonConfig((beyond,), cache, door)
    # TLS alone lets anybody in; certificates of clients do not.
    with pytest.raises(ConfigError, match="--insecure"):
        DaemonConfig((beyond,), cache, door, tls=tls_files("c", "k", None))
    asked = Door(None, certificates=True)
    DaemonConfig((beyond,), cache, asked, tls=tls_files("c", "k", "a"))
    DaemonConfig((beyond,), cache, Door(Tokens({"ann": b"x"})))
    DaemonConfig((beyond,), cache, door, insecure=True)
    with pytest.raises(ConfigError, match=r"--http.*--admin-token-file"):
        DaemonConfig((Address("::1", 7),), cache, asked, http=beyond)
    operators = Tokens({"default": b"x"})
    DaemonConfig((Address("::1", 7),), cache, door, http=beyond, operators=operators)
    for cert, key, ca in (("c", None, None), (None, "k", None), (None, None, "a")):
        with pytest.raises(ConfigError, match="--tls-cert, --tls-key"):
            tls_files(cert, key, ca)
