"""What is wrong with the settings is told before the model is loaded, and no secret is."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtier.errors import ConfigError, KVTierError, MissingExtraError
from kvtier.interfaces import Connector
from kvtier.registry import connect, shown_url
from kvtier_connectors.memory import MemoryConnector
from kvtier_engine.beforehand import check_beforehand
from kvtier_engine.main import EXIT_SETTINGS, run
from kvtier_engine.settings import load_settings

WITHOUT = builtins.__import__


def check(*arguments: str) -> None:
    check_beforehand(load_settings(arguments, {}).config)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("redis://user:secret@h:99999", ["--remote redis://h:99999: ", "'99999'"]),
        ("redis://user:secret@h/?ttl=3", ["--remote redis://h/: ", "ttl_s"]),
        ("s3://bucket/?endpont=x", ["--remote s3://bucket/: ", "endpoint"]),
        ("file://folder", ["--remote file://folder: ", "three slashes"]),
        ("sharded+redis://u:secret@h:99999,i", ["--remote sharded+redis://h:99999,i: "]),
        ("memory://[", ["--remote memory://[: "]),
    ],
)
def test_b113_a_remote_that_cannot_be_is_told_at_once(url: str, parts: list[str]) -> None:
    with pytest.raises(KVTierError) as caught:
        check("--remote", url)
    for part in parts:
        assert part in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_package_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("kvtier_connectors.redis")]:
        monkeypatch.delitem(sys.modules, name)

    def without_redis(
        name: str,
        scope: Mapping[str, object] | None = None,
        inner: Mapping[str, object] | None = None,
        wanted: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if name.partition(".")[0] == "redis" and not level:
            raise ModuleNotFoundError("No module named 'redis'", name="redis")
        return WITHOUT(name, scope, inner, wanted, level)

    monkeypatch.setattr(builtins, "__import__", without_redis)
    with pytest.raises(MissingExtraError, match=r'--remote redis://h: .*pip install "kvtier\['):
        check("--remote", "redis://h")


def test_a_store_that_is_down_is_no_error_and_what_was_opened_is_closed() -> None:
    opened: list[MemoryConnector] = []

    class Watched(MemoryConnector):
        closed = False

        async def close(self) -> None:
            self.closed = True
            await super().close()

    def watched(url: str) -> Connector:
        assert url == "memory://a"
        opened.append(Watched("a"))
        return opened[-1]

    check("--remote", "redis://127.0.0.1:1")
    check_beforehand(load_settings(["--remote", "memory://a"], {}).config, connect=watched)
    (one,) = opened
    assert isinstance(one, Watched)
    assert one.closed


def test_a_store_that_cannot_be_bounded_from_here() -> None:
    with pytest.raises(ConfigError, match="--remote kvtier://h:1: --remote-bytes needs a store"):
        check("--remote", "kvtier://h:1", "--remote-bytes", "1GiB")
    check("--remote", "memory://a", "--remote-bytes", "1GiB")


def test_other_options_are_tried_too(tmp_path: Path) -> None:
    for arguments, part in (
        (["--model", str(tmp_path / "no")], "there is no such file or folder"),
        (["--access-log", str(tmp_path / "no" / "log")], "--access-log: salt"),
        (["--kv-events", "tcp://nowhere"], "--kv-events: "),
        (["--traces"], "--traces: "),
    ):
        with pytest.raises(KVTierError) as caught:
            check(*arguments)
        assert part in str(caught.value)
    check("--kv-events", f"ipc://{tmp_path}/events", "--access-log", str(tmp_path / "log"))


def test_the_program_ends_before_it_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtier-serve", "--port=0", "--remote", "redis://h:99999"])
    assert run() == EXIT_SETTINGS
    told: Any = capsys.readouterr().err
    assert told.startswith("kvtier-serve: --remote redis://h:99999: ")
    assert "loading" not in told


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://kv.internal:6379/0?ttl_s=60", "redis://kv.internal:6379/0"),
        ("rediss://user:secret@kv.internal", "rediss://kv.internal"),
        ("rediss://:secret@kv.internal?password_file=/secret", "rediss://kv.internal"),
        ("redis://user:sec/secret@h", "redis://..."),
        ("redis://user:sec?secret@h", "redis://..."),
        ("redis://user:sec@secret@h", "redis://..."),
        ("redis://h/?prefix=secret@a", "redis://..."),
        ("sharded+redis://u:secret@a,b:2", "sharded+redis://a,b:2"),
        ("file:///srv/kv", "file:///srv/kv"),
        ("secret", "a URL without a scheme"),
    ],
)
def test_of_a_url_no_secret_is_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_what_is_shown_is_what_was_asked_for() -> None:
    assert connect(shown_url("memory://a")) is not None
