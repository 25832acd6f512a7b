"""Settings of ``kvtier-serve``: where values come from, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvtier.config import Durability, WriteMode
from kvtier.constants import GIB, MIB
from kvtier.errors import ConfigError
from kvtier_engine.options import OPTIONS, shown_default, usage
from kvtier_engine.settings import Settings, load_settings


def load(*arguments: str, environment: Mapping[str, str] | None = None) -> Settings:
    return load_settings(arguments, environment or {})


def refusal(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*arguments, environment=environment)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_serve_the_bundled_model_from_loopback() -> None:
    config = load().config
    assert (config.model, config.host, config.port) == ("smollm2-135m", "127.0.0.1", 8000)
    assert (config.kv_bytes, config.dram, config.disk) == (512 * MIB, GIB, ())
    cache = config.cache_config()
    assert cache is not None
    assert cache.disk is None


def test_defaults_pass_their_own_checks() -> None:
    for option in OPTIONS:
        if option.default:
            assert option.parse(option.default) == option.default, option.name


def test_values_are_parsed_into_their_types() -> None:
    config = load(
        "--kv-bytes=64MiB", "--disk", "/tmp/d", "--disk-mode", "back", "--durability", "each",
        "--port", "0", "--drain-seconds", "2.5", "--disk-bytes", "20GiB",
    ).config  # fmt: skip
    assert config.kv_bytes == 64 * MIB
    assert (config.disk_mode, config.durability) == (WriteMode.BACK, Durability.EACH)
    assert (config.port, config.drain_seconds) == (0, 2.5)
    cache = config.cache_config()
    assert cache is not None
    assert cache.disk is not None
    assert cache.disk.capacity_bytes == 20 * GIB


@pytest.mark.parametrize("worth", ["1e-6", "1", "250", "1e6"])
def test_computing_may_be_worth_as_much_as_one_likes(worth: str) -> None:
    cache = load("--gpu-time-worth", worth).config.cache_config()
    assert cache is not None
    assert cache.gpu_time_worth == float(worth)


def test_b113_command_line_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nblock_tokens = 8\nchunk_tokens = 64\nkv_bytes = "64MiB"\n')
    environment = {"KVTIER_SERVE_PORT": "2", "KVTIER_SERVE_BLOCK_TOKENS": "32"}
    settings = load("--config", str(file), "--port", "3", environment=environment)
    config = settings.config
    assert (config.port, config.block_tokens, config.chunk_tokens) == (3, 32, 64)
    report = settings.report()
    assert report["port"] == {"value": 3, "source": "command line"}
    assert report["block_tokens"]["source"] == "environment KVTIER_SERVE_BLOCK_TOKENS"
    assert report["chunk_tokens"] == {"value": 64, "source": f"file {file}"}
    assert report["dram"] == {"value": GIB, "source": "default"}


def test_b113_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("port = 7")
    assert load(environment={"KVTIER_SERVE_CONFIG": str(file)}).config.port == 7


def test_b113_a_misspelt_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('durabilty = "each"')
    assert "'durabilty' (did you mean 'durability'?)" in refusal("--config", str(file))


def test_b113_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")
    assert missing in refusal("--config", missing)
    assert missing in refusal(environment={"KVTIER_SERVE_CONFIG": missing})
    broken = tmp_path / "broken.toml"
    broken.write_text("port = = 3")
    assert "not valid TOML" in refusal("--config", str(broken))


def test_b113_a_misspelt_variable_names_the_nearest() -> None:
    message = refusal(environment={"KVTIER_SERVE_PROT": "1"})
    assert "KVTIER_SERVE_PROT (did you mean 'KVTIER_SERVE_PORT'?)" in message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--prot", "1"], ["--prot", "'--port'"]),
        (["--disk-mod", "back"], ["--disk-mod", "'--disk-mode'"]),
        (["serve"], ["'serve'"]),
        (["--port"], ["--port needs a value"]),
        (["--port", "--device"], ["--port needs a value"]),
        (["--port", "1", "--port", "2"], ["--port is given twice"]),
        (["--port", "65536"], ["--port", "'65536'", "0 to 65535"]),
        (["--port", "eighty"], ["--port", "'eighty'"]),
        (["--kv-bytes", "1GB"], ["--kv-bytes", "'1GB'", "'GiB'"]),
        (["--kv-bytes", "-1"], ["--kv-bytes", "'-1'"]),
        (["--kv-bytes", "0"], ["--kv-bytes", "at least 1 B"]),
        (["--device", "cud"], ["--device", "'cud'", "auto, cpu, cuda", "did you mean 'cuda'"]),
        (["--dtype", "fp32"], ["--dtype", "float32"]),
        (["--durability", "eahc"], ["--durability", "none, batch, each", "'each'"]),
        (["--codec", "rwa"], ["--codec", "'rwa'", "'raw'"]),
        (["--codec", "zstd"], ["--codec", "'zstd'"]),
        (["--disk", "/x", "--disk-codec", "zsdt"], ["--disk-codec", "'zsdt'", "'zstd'"]),
        (["--disk", "/x", "--disk-codec", "zstd+raw"], ["--disk-codec", "zstd"]),
        (["--remote", "memory://", "--remote-codec", "zsdt"], ["--remote-codec", "'zstd'"]),
        (["--remote", "memory://", "--remote-codec", "int4"], ["--codec", "allowed: zstd"]),
        (["--remote", "memory://", "--remote-codec", "int4+zstd"], ["--remote-codec"]),
        (["--policy", "gitins"], ["--policy", "'gitins'", "arc", "did you mean 'gittins'"]),
        (["--disk-policy", "lur"], ["--disk-policy", "'lur'", "did you mean 'lru'"]),
        (
            ["--disk-admission", "secnd-touch"],
            ["--disk-admission", "'secnd-touch'", "'second-touch'"],
        ),
        (["--disk-write-bytes-per-day", "1GB"], ["--disk-write-bytes-per-day", "'GiB'"]),
        (["--disk", "/a,/b/,/a"], ["--disk", "each named once"]),
        (["--disk", "/a,"], ["--disk", "not empty"]),
        (["--drain-seconds=nan"], ["--drain-seconds", "'nan'", "from 0 to 3600"]),
        (["--drain-seconds= 5"], ["--drain-seconds", "' 5'", "from 0 to 3600"]),
        (["--gpu-time-worth=1_0"], ["--gpu-time-worth", "'1_0'", "from 1e-06"]),
        (["--tenant-quota", "9" * 30], ["--tenant-quota", "TiB"]),
        (["--port", "9" * 5000], ["--port", "(5002 characters)", "from 0 to 65535"]),
        (["--model=~nobody-at-all/x"], ["--model", "home"]),
        (["--access-log="], ["--access-log", "not empty"]),
        (["--drain-seconds", "nan"], ["--drain-seconds", "'nan'"]),
        (["--gpu-time-worth", "2e6"], ["--gpu-time-worth", "1e-06 to 1e+06"]),
        (["--weights-id", "a b"], ["--weights-id", "'a b'"]),
        (["--no-cache=maybe"], ["--no-cache", "true, false"]),
        (["--served-model-name="], ["--served-model-name", "not empty"]),
    ],
)
def test_a_bad_option_is_named_with_what_is_allowed(arguments: list[str], parts: list[str]) -> None:
    message = refusal(*arguments)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--no-cache", "--disk", "/d"], ["--no-cache", "--disk"]),
        (["--no-cache", "--dram", "1GiB"], ["--no-cache", "--dram"]),
        (["--no-cache", "--codec", "raw"], ["--no-cache", "--codec"]),
        (["--chunk-tokens", "100"], ["--chunk-tokens 100", "--block-tokens 16"]),
        (["--dram", "0"], ["--dram 0", "--remote URL", "--disk PATH", "--no-cache"]),
        (["--dram", "0", "--disk", "/d", "--disk-mode", "back"], ["--dram 0", "'back'", "through"]),
        (["--dram", "1MiB"], ["--dram 1 MiB", "64 MiB"]),
        (["--disk-bytes", "1GiB"], ["--disk-bytes", "--disk PATH"]),
        (["--disk-mode", "back"], ["--disk-mode", "--disk PATH"]),
        (["--durability", "each"], ["--durability", "--disk PATH"]),
        (["--disk-policy", "arc"], ["--disk-policy", "--disk PATH"]),
        (["--disk-write-bytes-per-day", "0"], ["--disk-write-bytes-per-day", "--disk PATH"]),
        (["--no-cache", "--policy", "arc"], ["--no-cache", "--policy"]),
        (
            ["--max-num-batched-tokens", "8"],
            ["--max-num-batched-tokens 8", "--max-num-seqs 16"],
        ),
        (["--disk", "/d", "--disk-bytes", "10"], ["--disk-bytes 10 B", "capacity_bytes"]),
    ],
)
def test_b115_contradictions_end_the_start(arguments: list[str], parts: list[str]) -> None:
    message = refusal(*arguments)
    for part in parts:
        assert part in message, message


def test_each_tier_has_its_policy() -> None:
    cache = load(
        "--disk", "/d", "--policy", "gittins", "--disk-policy", "arc",
        "--disk-write-bytes-per-day", "1TiB", "--disk-admission", "learned",
    ).config.cache_config()  # fmt: skip
    assert cache is not None
    assert cache.disk is not None
    assert (cache.policy, cache.disk.policy) == ("gittins", "arc")
    assert (cache.disk.admission, cache.disk.write_bytes_per_day) == ("learned", 1024 * GIB)


def test_b116_directories_of_the_disk_share_one_bound(tmp_path: Path) -> None:
    """``--disk-bytes`` is for all directories together, however they are given."""
    file = tmp_path / "serve.toml"
    file.write_text('disk = ["/a", "/b, c"]\ndisk_bytes = "20GiB"\n')
    for settings, paths in [
        (load("--disk", "/a/, /b", "--disk-bytes", "20GiB"), ("/a", "/b")),
        (load("--config", str(file)), ("/a", "/b, c")),
    ]:
        cache = settings.config.cache_config()
        assert cache is not None
        assert cache.disk is not None
        assert cache.disk.paths == paths
        assert cache.disk.capacity_bytes == 20 * GIB
        assert settings.report()["disk"]["value"] == paths


@pytest.mark.parametrize("value", ["[]", "[3]", '["/a", "/a"]', "3", '[""]'])
def test_b113_a_bad_list_of_directories_is_refused(tmp_path: Path, value: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f"disk = {value}\n")
    assert f"{file}: disk" in refusal("--config", str(file))


def test_no_cache_works_from_the_environment() -> None:
    settings = load(environment={"KVTIER_SERVE_NO_CACHE": "true"})
    assert settings.config.cache_config() is None
    assert load(environment={"KVTIER_SERVE_NO_CACHE": "0"}).config.cache_config() is not None


def test_the_api_key_is_never_shown() -> None:
    settings = load("--port", "1", environment={"KVTIER_API_KEY": "sesame"})
    assert settings.config.api_key == "sesame"
    assert settings.report()["api_key"] == {
        "value": "********",
        "source": "environment KVTIER_API_KEY",
    }
    assert "sesame" not in repr(settings)
    assert "sesame" not in str(settings.report())
    assert "sesame" not in refusal(environment={"KVTIER_API_KEY": "sesame", "KVTIER_SERVE_X": ""})


def test_an_empty_api_key_is_refused_rather_than_open() -> None:
    assert "KVTIER_API_KEY" in refusal(environment={"KVTIER_API_KEY": ""})


def test_file_values_keep_their_types(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('no_cache = true\nport = 9\nkv_bytes = 1048576\ndevice = "cpu"\n')
    config = load("--config", str(file)).config
    assert (config.no_cache, config.port, config.kv_bytes) == (True, 9, MIB)
    file.write_text("port = true")
    assert f"{file}: port" in refusal("--config", str(file))
    file.write_text("device = 3")
    assert f"{file}: device" in refusal("--config", str(file))


def test_a_server_without_tiers_may_log_accesses() -> None:
    """How large a cache would have to be is asked before there is one."""
    assert load("--no-cache", "--access-log", "/tmp/a").config.access_log == "/tmp/a"


def test_help_names_every_option() -> None:
    text = usage()
    for option in OPTIONS:
        assert f"  {option.flag} {option.metavar}".rstrip() in text
    assert max(map(len, text.splitlines())) <= 100


REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def table_rows(page: str) -> list[list[str]]:
    """The cells of every table row of a page, without the code marks."""
    lines = (REFERENCE / page).read_text().replace("`", "").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]


def test_the_page_of_options_lists_each_as_it_is() -> None:
    rows = table_rows("serve-options.md")
    for option in OPTIONS:
        name = f"{option.flag} {option.metavar}".rstrip()
        assert [name, shown_default(option), option.help] in rows, name
    assert len(rows) == len(OPTIONS) + len(["head", "rule", "--config", "--help", "--version"])


def test_the_page_of_variables_lists_each_as_it_is() -> None:
    rows = table_rows("env.md")
    for option in OPTIONS:
        row = [option.variable, option.flag, shown_default(option), option.help]
        assert row in rows, option.name


@pytest.mark.parametrize(
    ("asked", "codec", "byte_codec"),
    [("zstd", None, "zstd"), ("int8", "int8", None), ("raw+zstd", "raw", "zstd"), ("", None, None)],
)
def test_a_disk_codec_may_have_a_byte_codec_on_top(
    asked: str, codec: str | None, byte_codec: str | None
) -> None:
    arguments = ("--disk", "/x", "--codec", "int4-g128", "--disk-codec", asked)
    cache = load(*arguments[: 6 if asked else 4]).config.cache_config()
    assert cache is not None
    assert cache.disk is not None
    assert (cache.disk.codec, cache.disk.byte_codec) == (codec, byte_codec)
    assert cache.codecs == ("int4-g128", *([codec] if codec else []))


@pytest.mark.parametrize("edge", ["disk", "remote"])
def test_what_a_byte_codec_needs_is_asked_for_at_once(
    edge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=rf'--{edge}-codec.*pip install "kvtier\[zstd\]"'):
        load(f"--{edge}", "memory:///x", f"--{edge}-codec", "zstd")


def test_a_byte_codec_is_for_all_remotes() -> None:
    remotes = ("--remote", "memory://a", "--remote", "memory://b")
    for told, byte_codec in (((), None), (("--remote-codec", "zstd"), "zstd")):
        cache = load(*remotes, *told).config.cache_config()
        assert cache is not None
        assert [each.byte_codec for each in cache.remotes] == [byte_codec] * 2


def test_remotes_may_be_several_and_are_not_shown() -> None:
    settings = load(
        "--remote", "memory://user:secret@a", "--remote=memory://b", "--remote-bytes=1GiB"
    )
    cache = settings.config.cache_config()
    assert cache is not None
    assert [remote.url for remote in cache.remotes] == ["memory://user:secret@a", "memory://b"]
    assert cache.remotes[0].capacity_bytes == GIB
    assert "secret" not in repr(cache) + repr(settings.report())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--remote", "ftp://host"),
        ("--remote", "memory"),
        ("--remote", "encrypted+ftp://host"),
        ("--remote", "memory://a", "--remote", "memory://a"),
        ("--remote-bytes", "1GiB"),
        ("--remote-mode", "back"),
        ("--remote", "memory://a", "--no-cache"),
        ("--remote", "memory://a", "--dram", "0", "--remote-mode", "back"),
    ],
)
def test_remotes_that_cannot_be_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="remote"):
        load(*arguments)


def test_a_remote_may_be_decorated() -> None:
    url = "encrypted+sharded+redis://a,b?encryption_key_file=/run/secrets/kv"
    cache = load("--remote", url).config.cache_config()
    assert cache is not None
    assert [remote.url for remote in cache.remotes] == [url]


def test_a_url_without_its_option_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(["redis://:s3cret@host"], {})
    assert "unexpected argument" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["port = " + "9" * 5000, "port = " + "[" * 5000, 'model = "/a\\u0000b"']
)
def test_b113_a_file_of_nonsense_is_refused(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "serve.toml").write_text(text)
    assert str(file) in refusal(f"--config={file}")
