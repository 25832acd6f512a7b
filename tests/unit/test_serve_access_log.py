"""A server that logs accesses: what stands in the file, what does not, and that it can be used."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from kvtier.errors import ConfigError
from kvtier.keys import encode_tokens
from kvtier.policies.lru import LRU
from kvtier.registry import policies
from kvtier.testing.engine_double import wait_until
from kvtier.types import ChunkKey, Entry, Features, Hint
from kvtier_engine.serve import Server
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder
from tests.lib.tiny_server import SEVENTEEN, complete, made, running

FIELDS = {"time", "keys", "chunk_tokens", "prompt_tokens", "hit_tokens", "turn", "hint"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), tiny_config(), tiny_tensors(tiny_config()))


async def chat(client: httpx.AsyncClient, *texts: str, **fields: Any) -> None:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = {"messages": messages, "max_tokens": 2, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_line_tells_what_the_client_was_told(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with running(made(folder, f"--access-log={path}")) as client:
        usage = [(await complete(client))["usage"] for _ in range(2)]
        await complete(client, n=2, cache_salt="tenant")
    lines = lines_of(path)
    assert len(lines) == 4
    for line, told in zip(lines, usage, strict=False):
        assert set(line) == FIELDS
        assert line["prompt_tokens"] == told["prompt_tokens"] == 17
        tiers = told["prompt_tokens_details"]["kvtier"]
        assert line["hit_tokens"] == {tier: count for tier, count in tiers.items() if count}
        assert line["chunk_tokens"] == 8
    assert sum(lines[1]["hit_tokens"].values()) == 16
    assert lines[0]["keys"] == lines[1]["keys"]
    assert len(lines[0]["keys"]) == 2
    assert lines[2]["keys"] == lines[3]["keys"]
    assert not set(lines[0]["keys"]) & set(lines[2]["keys"])
    assert sorted(line["time"] for line in lines) == [line["time"] for line in lines]


async def test_turns_and_hints_come_from_the_requests(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with running(made(folder, f"--access-log={path}")) as client:
        await complete(client)
        await chat(client, "a", "b", "c", kvtier={"will_continue": True, "done": False})
        await chat(client, "a", "b", "c", "d", "e", kvtier={"done": True})
        await chat(client, "a", kvtier={})
    told = [(line["turn"], Hint(line["hint"])) for line in lines_of(path)]
    assert told == [(1, Hint.NONE), (2, Hint.WILL_CONTINUE), (3, Hint.DONE), (1, Hint.NONE)]


def stores_inflight(server: Server) -> int:
    cache = server.snapshot().cache
    assert cache is not None
    return cache.stores_inflight


class WatchedLRU(LRU):
    """Keeps the features of all that it is told."""

    told: ClassVar[list[tuple[str, Features]]] = []

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        self.told.append(("admit", entry.features))
        return super().admit(entry, now)

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        self.told.append(("touch", features))
        super().touch(key, now, features)


async def test_turns_and_hints_reach_the_policies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "load", {"lru": WatchedLRU}.__getitem__)
    texts = ["a" * 9, "b" * 9, "c" * 9]
    server = made(folder)
    async with running(server) as client:
        await chat(client, *texts, kvtier={"will_continue": True})
        wait_until(lambda: not stores_inflight(server), "the store does not end")
        server.engine.forget_prefixes()
        await chat(client, *texts, kvtier={"done": True})
    first, second = Features(2, Hint.WILL_CONTINUE), Features(2, Hint.DONE)
    admitted = {features for word, features in WatchedLRU.told if word == "admit"}
    assert admitted == {first}
    touched = [features for word, features in WatchedLRU.told if word == "touch"]
    assert set(touched) <= {first, second}
    assert second in touched


async def test_no_text_no_token_and_no_key_is_logged(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    server = made(folder, f"--access-log={path}", f"--disk={tmp_path / 'disk'}")
    words = "xylophone quartz"
    tokens = server.tokenizer.encode(words)
    async with running(server) as client:
        await complete(client)
        await complete(client, prompt=words, cache_salt="sesame-salt")
        await chat(client, words * 4)
    data = path.read_bytes()
    for line in lines_of(path):
        assert set(line) == FIELDS
        assert all(len(key) == 16 for key in line["keys"])
    assert b"xylophone" not in data
    assert b"sesame" not in data
    for prompt in (tokens, SEVENTEEN):
        assert encode_tokens(prompt[:3]) not in data
        assert ",".join(map(str, prompt[:3])).encode() not in data.replace(b" ", b"")
    stored = {file.name for file in (tmp_path / "disk").rglob("*") if file.is_file()}
    assert stored
    keys = {key for line in lines_of(path) for key in line["keys"]}
    assert not any(key in name for key in keys for name in stored)


async def test_the_simulator_reads_what_a_server_wrote(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with running(made(folder, "--no-cache", f"--access-log={path}")) as client:
        for turn in range(24):
            await complete(client, prompt=[turn % 5, *SEVENTEEN * (1 + turn // 8)], max_tokens=1)
    arguments = ["sim", str(path), "--policy", "lru,min", "--capacity", "50%", "--workers", "1"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    lru, optimum = json.loads(result.stdout)["results"]
    assert (lru["policy"], optimum["policy"]) == ("lru", "min")
    assert 0 < lru["prefix_hit_percent"] <= optimum["prefix_hit_percent"] < 100
    assert "24 requests" in CliRunner().invoke(app, arguments).stdout


async def test_a_full_disk_ends_the_log_and_no_request(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    async with running(made(folder, f"--access-log={path}")) as client:
        answers = [await complete(client) for _ in range(4)]
        health = (await client.get("/health")).json()
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert health["status"] == "ok"
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "the access log has ended" in warnings[0].message


@pytest.mark.parametrize("path", ["/dev/null/log", "{tmp}/missing/log", "{tmp}"])
def test_b115_a_log_that_cannot_be_written_ends_the_start(
    folder: Path, tmp_path: Path, path: str
) -> None:
    path = path.format(tmp=tmp_path)
    with pytest.raises(ConfigError, match="--access-log") as caught:
        made(folder, f"--access-log={path}")
    assert path in str(caught.value)


def test_b115_a_start_that_fails_later_gives_the_log_back(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    with pytest.raises(ConfigError, match="--dram"):
        made(folder, f"--access-log={path}", "--dram=1048576GiB")
    made(folder, f"--access-log={path}").close()
