"""What a start with a tiny model takes, refuses and says, before any request."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvtier.errors import ConfigError, KVTierError
from kvtier.testing.engine_double import wait_until
from kvtier_engine import serve as module
from kvtier_engine.api.errors import ApiError
from kvtier_engine.api.limits import QUEUED_SEQUENCES_MAX
from kvtier_engine.main import serve
from kvtier_engine.program import banner
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder
from tests.lib.tiny_server import made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), tiny_config(), tiny_tensors(tiny_config()))


def test_the_queue_is_as_long_as_its_limit(folder: Path) -> None:
    server = made(folder, "--max-num-seqs=2")
    with server.admission.hold(2 + QUEUED_SEQUENCES_MAX):
        assert server.admission.sequences == 2 + QUEUED_SEQUENCES_MAX
        with pytest.raises(ApiError, match="queue is full"), server.admission.hold(1):
            pass
    server.close()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--kv-bytes=1KiB"], ["--kv-bytes 1 KiB", "one block"]),
        (["--kv-bytes=1048576GiB"], ["--kv-bytes 1024 TiB", "no such memory"]),
        (["--kv-bytes=8KiB", "--chunk-tokens=64"], ["--kv-bytes", "64", "or more"]),
        (["--dram=1048576GiB"], ["--dram 1024 TiB"]),
        (["--max-model-len=513"], ["--max-model-len 513", "512"]),
        (["--max-model-len=512", "--kv-bytes=64KiB"], ["--max-model-len 512", "--kv-bytes 64 KiB"]),
        (
            ["--head-groups=5"],
            ["--head-groups 5", "2 KV heads", "allowed: 1, 2, or a multiple of 2"],
        ),
        (["--head-groups=65535"], ["--head-groups 65535", "2 KV heads"]),
        (["--device=cuda"], ["--device cuda", "CUDA"]),
        (["--disk=/tmp/x", "--disk-bytes=4KiB"], ["--disk-bytes 4 KiB", "chunk"]),
        (["--chunk-tokens=512"], ["--chunk-tokens 512", "512 tokens", "--no-cache"]),
        (["--model=/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
)
def test_b115_what_cannot_be_together_is_told_at_the_start(
    folder: Path, arguments: list[str], parts: list[str]
) -> None:
    with pytest.raises(KVTierError) as caught:
        made(folder, *arguments)
    assert isinstance(caught.value, ConfigError)
    for part in parts:
        assert part in str(caught.value), caught.value


@pytest.mark.parametrize("argument", ["--head-groups=5", "--max-model-len=513"])
def test_b115_what_no_such_model_can_is_told_before_it_is_loaded(
    folder: Path, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("its weights are read, which may take minutes")

    monkeypatch.setattr(module, "load_model", load)
    with pytest.raises(ConfigError, match=argument.replace("=", " ")):
        made(folder, argument)


def test_b115_a_tier_that_holds_no_chunk_is_refused(tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=9, max_position_embeddings=1 << 20)
    wide = write_folder(tmp_path, config, tiny_tensors(config))
    with pytest.raises(ConfigError, match="--dram 64 MiB holds no chunk, which takes 7"):
        made(wide, "--chunk-tokens=65536", "--kv-bytes=80MiB")


def test_the_banner_names_tiers_and_a_command(folder: Path, tmp_path: Path) -> None:
    server = made(folder, f"--disk={tmp_path}/kv", "--host=0.0.0.0")
    text = banner(server, 1234)
    server.close()
    for part in (
        "http://127.0.0.1:1234/v1", server.model.name, server.model.weights_id[:12], "float32",
        "64 MiB", f"10 GiB in {tmp_path}/kv", "write-through", "without --api-key", "curl -s",
    ):  # fmt: skip
        assert part in text
    quiet = made(folder, "--no-cache", "--api-key=sesame", "--host=::1")
    text = banner(quiet, 1234)
    assert "http://[::1]:1234/v1" in text
    assert "none (--no-cache)" in text
    assert "sesame" not in text
    assert "$KVTIER_API_KEY" in text


def test_the_banner_shows_where_remotes_are_and_no_secret(folder: Path) -> None:
    url = "redis://user:secret@127.0.0.1:1/0?ttl_s=60"
    server = made(folder, "--remote", url, "--remote-mode=back")
    text = banner(server, 1234)
    server.close()
    assert "  remote unbounded in redis://127.0.0.1:1/0, write-back" in text
    assert "secret" not in text
    server = made(folder, "--remote=memory://banner", "--remote-bytes=1GiB", "--remote-codec=zstd")
    text = banner(server, 1234)
    server.close()
    assert "  remote 1 GiB in memory://banner, zstd, write-through" in text


def test_the_banner_says_that_the_disk_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file is in the way")
    server = made(folder, f"--disk={tmp_path}/kv")
    wait_until(lambda: "note   disk is missing: " in banner(server, 1234), "the disk is not noted")
    server.close()


def test_auto_takes_what_is_there(folder: Path) -> None:
    server = made(folder, "--device=auto", "--no-cache")
    assert server.facts.device == ("cuda" if torch.cuda.is_available() else "cpu")


def test_names_and_identities_can_be_declared(folder: Path) -> None:
    server = made(folder, "--served-model-name=org/tiny", "--weights-id=declared", "--no-cache")
    assert (server.model.name, server.model.weights_id) == ("org/tiny", "declared")
    plain = made(folder, "--no-cache")
    assert plain.model.name == folder.name
    assert len(plain.model.weights_id) == 64


def test_an_interrupt_that_an_import_ignores_does_not_wait_for_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[object] = []

    class Importing(ModuleType):
        @property
        def build(self) -> Callable[[object], None]:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            return built.append

    monkeypatch.setitem(sys.modules, "kvtier_engine.serve", Importing("kvtier_engine.serve"))
    with pytest.raises(KeyboardInterrupt):
        serve(["--port=0"])
    assert built == []
