"""What the cache server is told by a file and the command line together."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cli.main import run
from kvtier.config import Durability
from kvtier.constants import DAEMON_CONFIG_BYTES_MAX, GIB, MIB
from kvtier.errors import ConfigError
from kvtier_server.configure import configure
from kvtier_server.options import Options, read_options

FILE = """
listen = ["127.0.0.1:7070", "[::1]:7070"]
dram = "64MiB"
disk = "/kv"
disk_bytes = "1GiB"
quota = 1048576
insecure = true
drain_seconds = 3
[quotas]
ann = "2GiB"
ben = 0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "kvtier.toml"
    file.write_text(FILE)
    return file


def test_a_file_says_what_the_command_line_does_not(file: Path) -> None:
    options = read_options(str(file), {"dram": "128MiB", "connections": 7})
    assert options == Options(
        listen=("127.0.0.1:7070", "[::1]:7070"),
        dram="128MiB",
        disk=("/kv",),
        disk_bytes=GIB,
        quota="1048576",
        insecure=True,
        connections=7,
        drain_seconds=3.0,
        quotas={"ann": 2 * GIB, "ben": 0},
    )
    config = configure(options)
    assert config.cache.dram_bytes == 128 * MIB
    assert config.cache.disk is not None
    assert config.cache.disk.paths == ("/kv",)
    assert (config.quota_bytes, config.quotas) == (MIB, {"ann": 2 * GIB, "ben": 0})
    assert config.drain_s == 3.0


def test_without_a_file_the_defaults_hold() -> None:
    assert read_options(None, {"listen": ["127.0.0.1:0"]}) == Options(listen=("127.0.0.1:0",))


def test_the_disk_is_written_as_it_is_told_to() -> None:
    file = {"disk_admission": "second-touch", "disk_write_bytes_per_day": "1GiB"}
    given = {"listen": ["127.0.0.1:0"], "disk": ["/kv"], "durability": "each", **file}
    config = configure(read_options(None, given))
    disk = config.cache.disk
    assert disk is not None
    assert (disk.admission, disk.write_bytes_per_day) == ("second-touch", GIB)
    assert disk.durability == Durability.EACH
    shown = config.shown()
    assert (shown["disk_admission"], shown["durability"]) == ("second-touch", "each")
    assert shown["disk_write_bytes_per_day"] == GIB


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("disk_admission", "second-tuch", r"did you mean 'second-touch'\?"),
        ("durability", "all", "--durability = 'all': allowed is none, batch, each"),
        ("disk_write_bytes_per_day", "1GB", "--disk-write-bytes-per-day = '1GB': not a size"),
    ],
)
def test_what_is_written_to_disk_is_checked(name: str, value: str, said: str) -> None:
    options = read_options(None, {"listen": ["127.0.0.1:0"], "disk": ["/kv"], name: value})
    with pytest.raises(ConfigError, match=said):
        configure(options)


REFUSED = {
    "disk_byte = 1": r"kvtier.toml has no 'disk_byte' \(did you mean 'disk_bytes'\?\)",
    "[server]\nlisten = 'x'": "kvtier.toml has no 'server'",
    "connections = '7'": "kvtier.toml: connections = '7': allowed is a int",
    "connections = 0": "--connections = 0: allowed is 1 to 65536",
    "drain_seconds = -1": "--drain-seconds = -1.0: allowed is 0 to 3600",
    "log_level = 'loud'": "--log-level = 'loud': allowed is debug, info, warning, error",
    "disk_bytes = '1GB'": "kvtier.toml: disk_bytes: not a size",
    "insecure = 1": "kvtier.toml: insecure = 1: allowed is a bool",
    "allow_uid = ['root']": "kvtier.toml: allow_uid = 'root'",
    "quotas = 3": "quotas = 3: allowed is a table",
    "[quotas]\nann = '1GB'": "quotas.ann: not a size",
    "listen = [": "this is no TOML",
    "#" + DAEMON_CONFIG_BYTES_MAX * "#": "allowed are",
    "remote = 'redis://user:hunter2@host'": "remote holds a password; allowed is a file",
}


@pytest.mark.parametrize("text", REFUSED)
def test_b113_a_file_that_cannot_be_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=REFUSED[text]) as caught:
        read_options(str(file), {})
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--config = '/none': No such file"):
        read_options("/none", {})


def test_an_option_of_the_command_line_is_named_as_it_was_written(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--disk-bytes: not a size"):
        read_options(str(file), {"disk_bytes": "1GB"})


def test_a_quota_of_what_can_be_no_credential_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text("[quotas]\n'a b' = 1")
    with pytest.raises(ConfigError, match="quotas: 'a b' can be no credential's name"):
        configure(read_options(str(file), {"listen": ["127.0.0.1:0"]}))


def test_the_command_reads_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text("listen = '0.0.0.0:1'")
    with pytest.raises(SystemExit):
        run(["daemon", f"--config={file}"])
    assert "--listen = '0.0.0.0:1': whoever reaches this address" in capsys.readouterr().err


def test_what_goes_to_remotes_is_encoded_as_told() -> None:
    told = {"listen": ["127.0.0.1:0"], "remote": ["file:///a", "file:///b"]}
    plain = configure(read_options(None, told))
    zstd = configure(read_options(None, {**told, "remote_codec": "zstd"}))
    assert [each.byte_codec for each in plain.cache.remotes] == [None, None]
    assert [each.byte_codec for each in zstd.cache.remotes] == ["zstd", "zstd"]
    assert zstd.shown()["remote_codec"] == "zstd"
    # It cannot change while a server runs, and is named by itself.
    before, after = plain.fixed(), zstd.fixed()
    assert {name for name in before if before[name] != after[name]} == {"remote_codec"}


@pytest.mark.parametrize("codec", ["zsdt", "raw"])
def test_a_remote_codec_that_encodes_no_bytes_is_refused(codec: str) -> None:
    told = {"listen": ["127.0.0.1:0"], "remote": ["file:///a"], "remote_codec": codec}
    with pytest.raises(ConfigError, match=f"--remote-codec = '{codec}'"):
        configure(read_options(None, told))


def test_a_remote_codec_without_a_remote_is_refused() -> None:
    with pytest.raises(ConfigError, match="--remote-codec = 'zstd': allowed is with --remote"):
        configure(read_options(None, {"listen": ["127.0.0.1:0"], "remote_codec": "zstd"}))


@pytest.mark.parametrize("seconds", [0.5, 86_401, -1])
def test_a_time_that_idle_connections_cannot_have_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--idle-seconds"):
        read_options(None, {"listen": ["127.0.0.1:0"], "idle_seconds": float(seconds)})


NONSENSE = {
    'token_file = "/a\\u0000b"': "token_file = '/a\\x00b': allowed is a text",
    'admin_token_file = ""': "admin_token_file = '': allowed is a text of 1 to",
    'client_ca = "/a\\u0000b"': "client_ca = '/a\\x00b': allowed is a text",
    'disk = ""': "disk = '': allowed is a text",
    'disk = ["/kv", "/k\\u0000v"]': "disk = '/k\\x00v': allowed is a text",
    'disk = ["/kv", "/kv/below"]': "none inside another",
    'disk = "~nobody-at-all/kv"': "--disk = ['~nobody-at-all/kv']: Could not determine home",
    'remote = "redis://secret@h\\u0000"': "remote = (hidden): allowed is a text",
    'remote_codec = ""': "remote_codec = '': allowed is a text",
    'policy = "lruu"': "--policy = 'lruu': allowed is",
    'dram = "1.5GiB"': "--dram = '1.5GiB': not a size",
    "dram = 1.5": "dram = 1.5: allowed is a str",
    "disk_bytes = 1.5": "disk_bytes: not a size: 1.5",
    "allow_uid = -1": "--allow-uid = -1: allowed is 0 to 4294967294",
    "allow_uid = 4294967295": "--allow-uid = 4294967295",
    "idle_seconds = nan": "--idle-seconds = nan",
    "drain_seconds = inf": "--drain-seconds = inf",
    "connections = " + "9" * 5000: "this is no TOML",
    "connections = " + "[" * 5000: "this is no TOML",
    "quota = " + "9" * 30: "--quota = '" + "9" * 30,
    f'http = "{"x" * 9999}"': "http = '" + "x" * 9,
}


@pytest.mark.parametrize("text", NONSENSE, ids=lambda text: text[:30])
def test_b113_a_file_of_nonsense_is_an_error_that_names_the_setting(
    tmp_path: Path, text: str
) -> None:
    (file := tmp_path / "kvtier.toml").write_text(f'listen = "127.0.0.1:0"\n{text}\n')
    with pytest.raises(ConfigError) as caught:
        configure(read_options(str(file), {}))
    assert NONSENSE[text] in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert "secret" not in str(caught.value)
