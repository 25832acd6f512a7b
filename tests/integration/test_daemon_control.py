"""The control plane of a running cache server, with objects: what is told, and what is done."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from kvtier.registry import connect
from kvtier.testing.engine_double import wait_until
from kvtier.types import ReadRequest, WriteItem
from tests.lib.daemon import Daemon, daemon

MIB = 1 << 20
OPERATOR = "secret-of-operators"
#: Each test has two credentials of its own.
NAMES = [f"{name}-{number}" for number in range(10) for name in ("ann", "ben")]
KEYS = [b"key %d" % number for number in range(8)]
HEX = [key.hex() for key in KEYS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("control")
    lines = [f"{name} secret-of-{name}\n" for name in NAMES]
    (folder / "tokens").write_text("".join(lines))
    (folder / "operators").write_text(OPERATOR)
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Daemon]:
    options = (f"--token-file={folder}/tokens", f"--admin-token-file={folder}/operators")
    with daemon(*options, f"--disk={folder}/disk", "--disk-bytes=256MiB") as running:
        running.wait_until_ready()
        yield running
        assert running.stop() == 0
        assert "secret" not in "\n".join(running.log)


@dataclass(frozen=True)
class Who:
    """Two credentials that nobody else uses, and the tokens of both."""

    ann: str
    ben: str

    @property
    def ann_token(self) -> str:
        return f"secret-of-{self.ann}"

    @property
    def ben_token(self) -> str:
        return f"secret-of-{self.ben}"


_left = iter(NAMES)


@pytest.fixture
def who() -> Who:
    return Who(next(_left), next(_left))


def payload(key: bytes) -> bytes:
    return (key * (MIB // len(key) + 1))[:MIB]


async def store(running: Daemon, folder: Path, name: str, *, all_of_it: bool = True) -> None:
    """Write all keys as a credential, and wait until they lie on disk."""
    connector = connect(f"{running.urls[0]}?token_file={folder}/tokens&token_name={name}")
    items = [WriteItem(key, memoryview(payload(key))) for key in KEYS]
    outcomes = await connector.write(items)
    await connector.close()
    assert outcomes == [None] * len(KEYS) or not all_of_it
    running.wait_until_written(OPERATOR)


async def held(running: Daemon, folder: Path, name: str) -> list[bool]:
    """Read all keys as a credential; no byte is a wrong one."""
    connector = connect(f"{running.urls[0]}?token_file={folder}/tokens&token_name={name}")
    buffers = [bytearray(MIB) for _ in KEYS]
    requests = [ReadRequest(key, 0, MIB) for key in KEYS]
    outcomes = await connector.read(requests, [memoryview(buffer) for buffer in buffers])
    await connector.close()
    found = [outcome == MIB for outcome in outcomes]
    for key, buffer, there in zip(KEYS, buffers, found, strict=True):
        assert not there or buffer == payload(key)
    return found


def ok(answer: tuple[int, Any]) -> Any:
    assert answer[0] == 200, answer
    return answer[1]


def of(running: Daemon, name: str) -> dict[str, Any]:
    """What a credential has in its present epoch."""
    told = ok(running.ask("GET", "/v1/namespaces", token=OPERATOR))["namespaces"]
    found = [each for each in told if each["credential"] == name and each["current"]]
    return found[0] if found else {"dram_bytes": 0, "disk_bytes": 0, "pinned_bytes": 0}


async def test_what_there_is_is_told_by_credential(running: Daemon, folder: Path, who: Who) -> None:
    await store(running, folder, who.ann)
    await store(running, folder, who.ben)
    told = ok(running.ask("GET", "/v1/namespaces", token=OPERATOR))["namespaces"]
    theirs = [each for each in told if each["credential"] in {who.ann, who.ben}]
    assert len(theirs) == 2
    for each in theirs:
        assert each["dram_bytes"] >= len(KEYS) * MIB
        assert each["disk_bytes"] >= len(KEYS) * MIB
        assert (each["epoch"], each["current"], each["quota_bytes"]) == (0, True, 0)
    own = ok(running.ask("GET", "/v1/namespaces", token=who.ann_token))["namespaces"]
    assert [each["credential"] for each in own] == [who.ann]


async def test_evicted_from_memory_it_comes_from_disk_and_warmed_it_is_there_before(
    running: Daemon, folder: Path, who: Who
) -> None:
    await store(running, folder, who.ann)
    body = {"objects": {"keys": HEX}, "tiers": ["dram"]}
    told = ok(running.ask("POST", "/v1/evict", body, who.ann_token))
    assert told == {"credential": who.ann, "evicted": 8, "absent": 0, "pinned": 0, "busy": 0}
    assert of(running, who.ann)["dram_bytes"] == 0
    some = {"objects": {"keys": [*HEX[:3], "ff"]}}
    told = ok(running.ask("POST", "/v1/warm", some, who.ann_token))
    counts = {"warmed": 3, "warmed_bytes": 3 * MIB, "absent": 1, "refused": 0, "late": 0}
    assert told == {"credential": who.ann, **counts}
    assert 3 * MIB <= of(running, who.ann)["dram_bytes"] < 4 * MIB
    told = ok(running.ask("POST", "/v1/warm", {"objects": {"all": True}}, who.ann_token))
    assert told["warmed"] == 8
    assert await held(running, folder, who.ann) == [True] * 8
    told = ok(running.ask("POST", "/v1/evict", {"objects": {"all": True}}, who.ann_token))
    assert told["evicted"] == 8
    assert await held(running, folder, who.ann) == [False] * 8


async def test_what_is_pinned_stays_until_it_is_unpinned(
    running: Daemon, folder: Path, who: Who
) -> None:
    await store(running, folder, who.ann)
    chosen = {"keys": [*HEX[:2], "ff"]}
    told = ok(running.ask("POST", "/v1/pin", {"objects": chosen, "seconds": 600}, who.ann_token))
    assert told == {"credential": who.ann, "pinned": 2, "absent": 1, "no_room": 0}
    assert of(running, who.ann)["pinned_bytes"] >= 4 * MIB
    (row,) = running.get("/v1/pin", who.ann_token)["pins"]
    assert (row["credential"], row["objects"], 590 < row["seconds"] <= 600) == (who.ann, 2, True)
    assert row["dram_bytes"] + row["disk_bytes"] >= 4 * MIB
    all_of_them = running.get("/v1/pin", OPERATOR)["pins"]
    assert [each["objects"] for each in all_of_them if each["credential"] == who.ann] == [2]
    assert running.get("/v1/pin", who.ben_token) == {"pins": []}
    everything = {"objects": {"all": True}}
    told = ok(running.ask("POST", "/v1/evict", everything, who.ann_token))
    assert told == {"credential": who.ann, "evicted": 6, "absent": 0, "pinned": 2, "busy": 0}
    assert await held(running, folder, who.ann) == [True, True, *[False] * 6]
    told = ok(running.ask("POST", "/v1/unpin", {"objects": chosen}, who.ann_token))
    assert told == {"credential": who.ann, "unpinned": 2, "absent": 1}
    assert ok(running.ask("POST", "/v1/evict", everything, who.ann_token))["evicted"] == 2
    assert of(running, who.ann)["pinned_bytes"] == 0


async def test_invalidated_it_is_never_found_again(running: Daemon, folder: Path, who: Who) -> None:
    await store(running, folder, who.ann)
    await store(running, folder, who.ben)
    told = ok(running.ask("POST", "/v1/invalidate", {"objects": {"keys": HEX[:2]}}, who.ann_token))
    assert (told["removed"], told["busy"], told["epoch"]) == (2, 0, None)
    assert await held(running, folder, who.ann) == [False, False, *[True] * 6]
    told = ok(running.ask("POST", "/v1/invalidate", {"objects": {"all": True}}, who.ann_token))
    assert told == {"credential": who.ann, "epoch": 1, "removed": None, "busy": None}
    assert await held(running, folder, who.ann) == [False] * 8
    assert await held(running, folder, who.ben) == [True] * 8
    await store(running, folder, who.ann)
    assert await held(running, folder, who.ann) == [True] * 8
    assert of(running, who.ann)["epoch"] == 1


def test_b100_whoever_may_not_is_told_so_and_changes_nothing(running: Daemon, who: Who) -> None:
    whose = {"objects": {"credential": who.ben, "all": True}}
    own = {"objects": {"all": True}}
    changes: list[tuple[str, str, Any]] = [
        ("POST", "/v1/evict", own),
        ("POST", "/v1/pin", {**own, "seconds": 1}),
        ("POST", "/v1/unpin", own),
        ("POST", "/v1/warm", own),
        ("POST", "/v1/invalidate", own),
        ("PUT", "/v1/quotas", {"quota_bytes": 1}),
        ("POST", "/v1/config", None),
        ("POST", "/v1/verify", None),
        ("POST", "/v1/drain", None),
        ("GET", "/v1/namespaces", None),
        ("GET", "/v1/quotas", None),
        ("GET", "/v1/verify", None),
    ]
    for method, path, body in changes:
        for token in ("", "wrong", who.ann, who.ann_token[:-1]):
            status, told = running.ask(method, path, body, token)
            assert (status, told["error"]["type"]) == (401, "unauthorized"), path
    for method, path, body in changes[5:9]:
        status, told = running.ask(method, path, body, who.ann_token)
        assert (status, told["error"]["type"]) == (403, "forbidden"), path
    for _, path, body in changes[:5]:
        status, told = running.ask("POST", path, {**body, **whose}, who.ann_token)
        assert (status, told["error"]["type"]) == (403, "forbidden"), path
        assert running.ask("POST", path, {**body, **whose}, OPERATOR)[0] == 200
    assert running.get("/ready") == {"ready": True}


async def test_quotas_change_while_it_runs(running: Daemon, folder: Path, who: Who) -> None:
    body = {"credential": who.ann, "quota_bytes": 4 * MIB}
    told = ok(running.ask("PUT", "/v1/quotas", body, OPERATOR))
    assert told == {"quota_bytes": 0, "quotas": {who.ann: 4 * MIB}}
    assert ok(running.ask("GET", "/v1/quotas", token=who.ben_token))["quotas"] == {}
    await store(running, folder, who.ann, all_of_it=False)
    await store(running, folder, who.ben)
    space = of(running, who.ann)
    assert 0 < space["dram_bytes"] + space["disk_bytes"] <= 4 * MIB
    assert of(running, who.ben)["dram_bytes"] >= 8 * MIB
    told = ok(running.ask("PUT", "/v1/quotas", {**body, "quota_bytes": None}, OPERATOR))
    assert told["quotas"] == {}
    await store(running, folder, who.ann)
    assert of(running, who.ann)["dram_bytes"] >= 8 * MIB


async def test_the_command_line_does_all_of_it(running: Daemon, folder: Path, who: Who) -> None:
    await store(running, folder, who.ann)
    own = (f"--token-file={folder}/tokens", f"--token-name={who.ann}")
    operator = f"--token-file={folder}/operators"
    (folder / "keys").write_text("\n".join(HEX) + "\n")

    def said(*arguments: object, status: int = 0) -> str:
        ended = CliRunner().invoke(app, list(map(str, arguments)))
        assert ended.exit_code == status, ended.output
        return ended.stdout

    listed = said("ls", running.http, operator)
    assert who.ann in listed
    assert who.ben not in listed
    told = said("pin", running.http, *own, "--keys", folder / "keys", "--seconds=60")
    assert told == f"{who.ann}: pinned 8, absent 0, no room 0\n"
    assert said("pin", running.http, *own, "--key=ff", "--seconds=60", status=1)
    listed = said("pins", running.http, operator)
    assert re.search(rf"{who.ann} +\d+ s +8 ", listed), listed
    assert json.loads(said("pins", running.http, *own, "--json"))["pins"][0]["objects"] == 8
    told = said("evict", running.http, operator, f"--credential={who.ann}", "--all", "--json")
    assert json.loads(told)["pinned"] == 8
    assert "unpinned 8" in said("unpin", running.http, *own, "--all")
    assert "evicted 8" in said("evict", running.http, *own, "--all", "--tier=dram")
    assert "warmed 8" in said("warm", running.http, *own, "--keys", folder / "keys")
    assert "sound shards" in said("verify", running.http, operator)
    assert json.loads(said("stat", running.http, *own, "--json"))["tiers"]
    assert "removed 1" in said("invalidate", running.http, *own, f"--key={HEX[0]}")
    assert "epoch 1" in said("invalidate", running.http, *own, "--all")


async def test_verify_finds_what_is_spoiled(running: Daemon, folder: Path, who: Who) -> None:
    await store(running, folder, who.ann)
    spoiled = min((folder / "disk" / "shards").rglob("*.kvs"))
    sound = spoiled.read_bytes()
    spoiled.write_bytes(sound[: len(sound) // 2] + b"spoiled" + sound[len(sound) // 2 + 7 :])
    options = [f"--token-file={folder}/operators", "--json"]
    ended = CliRunner().invoke(app, ["verify", running.http, *options])
    assert ended.exit_code == 1, ended.output
    told = json.loads(ended.stdout)
    assert (told["state"], told["clean"]) == ("done", False)
    assert [each["file"] for each in told["findings"]] == [spoiled.name]
    spoiled.write_bytes(sound)
    assert CliRunner().invoke(app, ["verify", running.http, *options]).exit_code == 0


async def test_a_remote_gives_back_what_was_evicted_and_forgets_what_is_invalidated(
    folder: Path, who: Who, tmp_path: Path
) -> None:
    options = (f"--token-file={folder}/tokens", f"--admin-token-file={folder}/operators")
    with daemon(*options, f"--remote=file://{tmp_path}") as running:
        await store(running, folder, who.ann)
        body = {"objects": {"keys": HEX}}
        assert ok(running.ask("POST", "/v1/evict", body, who.ann_token))["evicted"] == 8
        assert of(running, who.ann)["dram_bytes"] == 0
        absent = ok(running.ask("POST", "/v1/pin", {**body, "seconds": 60}, who.ann_token))
        assert (absent["pinned"], absent["absent"]) == (0, 8), "it lies in neither tier of ours"
        assert ok(running.ask("POST", "/v1/warm", body, who.ann_token))["warmed"] == 8
        assert of(running, who.ann)["dram_bytes"] >= 8 * MIB
        told = ok(running.ask("POST", "/v1/invalidate", body, who.ann_token))
        assert (told["removed"], told["busy"]) == (8, 0)
        assert await held(running, folder, who.ann) == [False] * 8
        assert running.stop() == 0


def test_a_credential_that_nobody_has_is_an_error_that_names_those_that_are(
    running: Daemon, folder: Path, who: Who
) -> None:
    """Whoever mistyped it would believe that it was done."""
    operator = (f"--token-file={folder}/operators", f"--credential={who.ann}x")
    for command in ("evict", "unpin", "warm", "invalidate", "pin"):
        more = ["--seconds=1"] if command == "pin" else []
        ended = CliRunner().invoke(app, [command, running.http, "--all", *operator, *more])
        assert ended.exit_code, ended.output
        said = str(ended.exception)
        assert f"no credential is named '{who.ann}x' (did you mean '{who.ann}'?)" in said
        assert f"known are {min(NAMES)}, " in said
    body = {"credential": f"{who.ann}x", "quota_bytes": 1}
    status, told = running.ask("PUT", "/v1/quotas", body, OPERATOR)
    assert (status, told["error"]["type"]) == (404, "unknown_credential")
    assert f"{who.ann}x" not in running.get("/v1/quotas", OPERATOR)["quotas"]
    assert running.ask("POST", "/v1/evicted", {}, OPERATOR)[1]["error"]["type"] == "not_found"


async def test_what_lies_here_for_a_credential_without_a_token_can_be_invalidated(
    tmp_path: Path,
) -> None:
    """It was withdrawn, and the server started anew: nobody has that name, and its objects do."""
    (tmp_path / "tokens").write_text("ann secret-of-ann\nben secret-of-ben\n")
    (tmp_path / "operators").write_text(OPERATOR)
    options = (
        f"--token-file={tmp_path}/tokens",
        f"--admin-token-file={tmp_path}/operators",
        f"--disk={tmp_path}/disk",
        "--disk-bytes=256MiB",
    )
    with daemon(*options) as running:
        await store(running, tmp_path, "ben")
        assert running.stop() == 0
    (tmp_path / "tokens").write_text("ann secret-of-ann\n# nobody else\ncat secret-of-cat\n")
    with daemon(*options) as running:
        running.wait_until_ready()
        body = {"objects": {"all": True, "credential": "ben"}}
        told = ok(running.ask("POST", "/v1/invalidate", body, OPERATOR))
        assert told["epoch"] == 1
        body["objects"]["credential"] = "dan"
        assert running.ask("POST", "/v1/invalidate", body, OPERATOR)[0] == 404
        assert running.stop() == 0


async def test_what_is_asked_for_once_is_not_written_where_that_is_the_admission(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokens").write_text("ann secret-of-ann\n")
    (tmp_path / "operators").write_text(OPERATOR)
    files = (f"--token-file={tmp_path}/tokens", f"--admin-token-file={tmp_path}/operators")
    with daemon(
        *files, f"--disk={tmp_path}/disk", "--disk-bytes=256MiB", "--disk-admission=second-touch"
    ) as running:
        running.wait_until_ready()
        await store(running, tmp_path, "ann")
        assert of(running, "ann")["disk_bytes"] == 0
        assert all(await held(running, tmp_path, "ann"))
        size = len(KEYS) * MIB
        wait_until(lambda: of(running, "ann")["disk_bytes"] >= size, "nothing is written")
