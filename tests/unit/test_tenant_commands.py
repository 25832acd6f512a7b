"""``kvtier warm``, ``pin`` and ``delete-tenant``: what they send, say and leave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtier.cli.main import app
from kvtier.errors import ConfigError, KVTierError, TierUnavailableError
from kvtier.keys import tenant_digest
from tests.lib.cache_setup import CHUNK, CacheSetup, cache_setup, of_tenant, written

Reply = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
FIVE = range(5 * CHUNK)


def held(body: dict[str, Any], held_tokens: int = 8, pinned: int = 8) -> tuple[int, dict[str, Any]]:
    """What a server says that has done all that it was asked."""
    tiers = {"hbm": 0, "dram": 4} | ({"pinned": pinned} if "pin" in body.get("kvtier", {}) else {})
    details = {"cached_tokens": 4, "kvtier": tiers}
    usage = {"prompt_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": details}
    return 200, {"usage": usage, "prompts": [{"prompt_tokens": 9, "held_tokens": held_tokens}]}


class Stub:
    """A server that notes what it is sent."""

    def __init__(self) -> None:
        self.reply: Reply = held
        self.pins: dict[str, tuple[int, dict[str, Any]]] = {}
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                stub.sent.append((self.path, self.headers.get("authorization", ""), body))
                status, answer = stub.reply(body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                stub.sent.append((self.path, self.headers.get("authorization", ""), {}))
                status, answer = stub.pins.get(self.path, (404, {}))
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    thread = threading.Thread(target=stub.server.serve_forever, args=(0.01,))
    thread.start()
    yield stub
    stub.server.shutdown()
    stub.server.server_close()
    thread.join()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "one"}, {"messages": [{"role": "user", "content": "two"}]}]
    file.write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    return file


def run(*arguments: object, told: str = "") -> Result:
    result = CliRunner().invoke(app, [str(each) for each in arguments], input=told)
    if isinstance(result.exception, KVTierError):
        raise result.exception
    return result


def test_every_line_is_sent_and_what_came_of_it_is_told(stub: Stub, prompts: Path) -> None:
    result = run("warm", "--url", stub.url, "--file", prompts)
    assert result.exit_code == 0, result.output
    assert result.stdout == "2 prompts of 18 tokens: 8 were there, 16 are held\n"
    assert [body for _, _, body in stub.sent] == [
        {"prompt": "one"},
        {"messages": [{"role": "user", "content": "two"}]},
    ]
    assert {path for path, _, _ in stub.sent} == {"/v1/kvtier/warm"}


def test_figures_are_told_as_json(stub: Stub, prompts: Path) -> None:
    result = run("warm", "--url", stub.url, "--file", prompts, "--json")
    assert json.loads(result.stdout) == {
        "prompts": 2,
        "prompt_tokens": 18,
        "cached_tokens": 8,
        "held_tokens": 16,
    }


def test_secrets_come_from_a_file_and_the_environment(
    stub: Stub, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_API_KEY", "key")
    salt = tmp_path / "salt"
    salt.write_bytes(b"a salt\r\n")
    run("warm", "--url", stub.url, "--file", prompts, "--salt-file", salt)
    run("warm", "--url", stub.url, "--file", prompts, "--salt-file", "-", told="another\n")
    assert [body["cache_salt"] for _, _, body in stub.sent] == ["a salt"] * 2 + ["another"] * 2
    assert {authorization for _, authorization, _ in stub.sent} == {"Bearer key"}


def test_pins_are_asked_for_and_what_could_not_be_is_a_failure(stub: Stub, prompts: Path) -> None:
    result = run("pin", "--url", stub.url, "--file", prompts, "--seconds", 60)
    assert (result.exit_code, result.stdout) == (
        0,
        "2 prompts of 18 tokens: 8 were there, 16 are held, 16 pinned\n",
    )
    assert [body["kvtier"] for _, _, body in stub.sent] == [{"pin": 60.0}] * 2
    stub.reply = lambda body: held(body, pinned=4)
    result = run("pin", "--url", stub.url, "--file", prompts, "--seconds", 60)
    assert result.exit_code == 1
    assert "8 pinned" in result.stdout


def test_pins_are_taken_back_and_how_much_was_pinned_is_told(stub: Stub, prompts: Path) -> None:
    answer = {"prompts": [{"prompt_tokens": 9, "unpinned_tokens": 8}]}
    stub.reply = lambda _: (200, answer)
    lines = prompts.read_text()
    prompts.write_text(lines.replace('"one"', '"one", "priority": 1, "kvtier": {"ttl_s": 5}'))
    result = run("unpin", "--url", stub.url, "--file", prompts)
    assert (result.exit_code, result.stdout) == (0, "2 prompts of 18 tokens: 16 were pinned\n")
    assert {path for path, _, _ in stub.sent} == {"/v1/kvtier/unpin"}
    assert stub.sent[0][2] == {"prompt": "one"}
    result = run("unpin", stub.url, "--file", prompts, "--json")
    assert json.loads(result.stdout) == {
        "prompts": 2,
        "prompt_tokens": 18,
        "unpinned_tokens": 16,
    }


def test_pins_of_an_engine_are_listed_by_tenant(stub: Stub) -> None:
    row = {"tenant": "ab" * 32, "seconds": 31, "objects": 7, "dram_bytes": 4096, "disk_bytes": 0}
    stub.pins["/v1/kvtier/pins"] = (200, {"pins": [row]})
    result = run("pins", stub.url, "--api-key", "k")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].split() == [
        "(abababababab)",
        "31",
        "s",
        "7",
        "4",
        "KiB",
        "0",
        "B",
    ]
    assert [(path, token) for path, token, _ in stub.sent] == [
        ("/v1/pin", "Bearer k"),
        ("/v1/kvtier/pins", "Bearer k"),
    ]
    assert json.loads(run("pins", stub.url, "--json").stdout) == {"pins": [row]}


@pytest.mark.parametrize("answer", [{}, {"pins": [{}]}, {"pins": [7]}])
def test_what_is_no_list_of_pins_is_said(stub: Stub, answer: dict[str, Any]) -> None:
    stub.pins["/v1/pin"] = (200, answer)
    with pytest.raises(TierUnavailableError, match="not one of a cache server"):
        run("pins", stub.url)


def test_a_server_that_knows_no_pins_is_said(stub: Stub) -> None:
    with pytest.raises(TierUnavailableError, match="no cache server"):
        run("pins", stub.url)


def test_a_refusal_names_the_line_and_says_what_the_server_said(stub: Stub, prompts: Path) -> None:
    stub.reply = lambda _: (400, {"error": {"message": "too long"}})
    with pytest.raises(TierUnavailableError, match=r"prompts.jsonl:1: 400 too long"):
        run("warm", "--url", stub.url, "--file", prompts)
    assert len(stub.sent) == 1


@pytest.mark.parametrize("answer", [{}, {"usage": None, "prompts": []}, {"usage": {}}])
@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_of_something_else_is_named(
    stub: Stub, prompts: Path, status: int, answer: dict[str, Any]
) -> None:
    stub.reply = lambda _: (status, answer | {"error": "a text"})
    with pytest.raises(TierUnavailableError):
        run("warm", "--url", stub.url, "--file", prompts)


@pytest.mark.parametrize("line", [b"no json", b"[" * 100_000, b"[1]", b'{"kvtier": 1}', b"\xff"])
def test_a_line_that_cannot_be_is_named_before_anything_is_sent(
    stub: Stub, prompts: Path, line: bytes
) -> None:
    prompts.write_bytes(prompts.read_bytes() + line)
    with pytest.raises(ConfigError, match=r"prompts.jsonl:5"):
        run("warm", "--url", stub.url, "--file", prompts)
    assert not stub.sent


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://host", "http://", "http://host:99999"])
def test_an_address_that_cannot_be_is_refused(url: str, prompts: Path) -> None:
    with pytest.raises(ConfigError, match="URL"):
        run("warm", "--url", url, "--file", prompts)


def test_no_server_is_an_error_in_one_line(prompts: Path) -> None:
    stub = Stub()
    stub.server.server_close()
    with pytest.raises(TierUnavailableError, match="no answer"):
        run("warm", "--url", stub.url, "--file", prompts)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e12"])
def test_a_pin_has_a_time(stub: Stub, prompts: Path, seconds: str) -> None:
    with pytest.raises(ConfigError, match="--seconds"):
        run("pin", "--url", stub.url, "--file", prompts, "--seconds", seconds)


# delete-tenant


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


@pytest.fixture
def disk(setup: CacheSetup) -> Path:
    """A stopped directory with five chunks of each of two tenants."""
    ours = setup.open(salt="ours")
    theirs = of_tenant(ours, "theirs")
    for engine in (ours, theirs):
        engine.store(engine.sequence(FIVE))
        written(engine)
    theirs.close()
    setup.close(ours)
    return setup.folder / "disk"


def found(setup: CacheSetup, salt: str) -> int:
    engine = setup.open(salt=salt)
    tokens = engine.match(engine.sequence(FIVE)).tokens
    setup.close(engine)
    return tokens


def test_a_tenant_is_deleted_and_its_bytes_are_given_back(setup: CacheSetup, disk: Path) -> None:
    result = run("delete-tenant", disk, "--salt-file", "-", told="ours\n")
    assert result.exit_code == 0, result.output
    digest = tenant_digest("ours").hex()
    assert result.stdout == f"tenant {digest}: deleted, 80 KiB given back\n"
    assert "ours" not in result.output
    assert len(setup.shard_files()) == 5
    assert (found(setup, "ours"), found(setup, "theirs")) == (0, 40)


def test_a_tenant_that_holds_nothing_is_deleted_too(setup: CacheSetup, disk: Path) -> None:
    run("delete-tenant", disk, "--salt-file", "-", told="nobody")
    assert (found(setup, "ours"), found(setup, "theirs")) == (40, 40)


def test_a_directory_in_use_is_refused(setup: CacheSetup, disk: Path) -> None:
    engine = setup.open(salt="ours")
    engine.match(engine.sequence(FIVE))
    with pytest.raises(TierUnavailableError, match="in use"):
        run("delete-tenant", disk, "--salt-file", "-", told="ours")
    assert engine.match(engine.sequence(FIVE)).tokens == 40


def test_a_directory_that_is_no_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no disk tier"):
        run("delete-tenant", tmp_path, "--salt-file", "-", told="ours")


@pytest.mark.parametrize("told", ["", "\n", "x" * 70_000])
def test_a_salt_that_cannot_be_is_refused_and_not_shown(disk: Path, told: str) -> None:
    with pytest.raises(ConfigError, match="salt") as refused:
        run("delete-tenant", disk, "--salt-file", "-", told=told)
    assert "xxxx" not in str(refused.value)


def test_a_salt_file_that_is_missing_is_named(disk: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        run("delete-tenant", disk, "--salt-file", tmp_path / "none")
