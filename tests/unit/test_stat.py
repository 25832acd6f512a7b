"""``kvtier stat``: what a server says and what lies in a directory, as tables and as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import Request

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from kvtier import Cache, CacheConfig, DiskConfig, GroupKind, KVGroup, KVLayout, Namespace
from kvtier.cli.main import app
from kvtier.cli.stat import said, watch
from kvtier.cli.stat_view import rest_view, server_view
from kvtier.constants import MIB
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.testing.clock import FakeClock
from kvtier.testing.engine_double import EngineDouble
from kvtier.tiers.disk.at_rest import HeldKind, at_rest
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.journal import Journal
from kvtier.tiers.disk.rows import Kind, Row, Rows
from kvtier.types import ChunkKey, ShardId

GROUP = KVGroup(GroupKind.FULL, (0, 1, 2), kv_heads=2, k_dim=8, v_dim=8, dtype="float32")
LAYOUT = KVLayout((GROUP,), chunk_tokens=16, section_layers=1)
CHUNK_BYTES = 4 * 4096

DISK: dict[str, Any] = {
    "name": "disk", "state": "failing", "detail": "[red]No space[/red]", "codec": "raw",
    "used_bytes": 1024, "capacity_bytes": 2048, "chunks": 7, "hit_tokens": 512,
    "miss_tokens": {"absent": 3, "corrupt": 1}, "read_bytes": 4e9, "written_bytes": 1e9,
    "read_s": {"count": 2, "total": 0.1, "p50": 0.002, "p90": 0.01, "p99": 0.05},
}  # fmt: skip
SAID: dict[str, Any] = {
    "model": "toy", "uptime_s": 8.0, "degraded": True, "prompt_tokens": 200,
    "hit_tokens": {"hbm": 40, "disk": 10},
    "tiers": [{"name": "hbm", "state": "ok", "used_bytes": 0, "capacity_bytes": 0}, DISK],
    "cache": {"saved_compute_s": 12.5, "lost_compute_s": 0.5, "loads_inflight": 3},
    "tenants": {"0a1b": {"hit_tokens": {"disk": 5}, "miss_tokens": {"disk": {"absent": 6}}}},
}  # fmt: skip


def shown(view: RenderableType) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(view)
    console.file.close()
    return console.export_text()


class Answers(BaseHTTPRequestHandler):
    """Answers what the test wants next; the last one again and again."""

    queue: ClassVar[list[tuple[int, bytes]]] = []
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("authorization")))
        status, body = self.queue.pop(0) if len(self.queue) > 1 else self.queue[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Answers.queue, Answers.asked = [(200, json.dumps(SAID).encode())], []
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_figure_of_a_tier_is_shown() -> None:
    text = shown(server_view(SAID, None))
    for part in (
        "toy: degraded, up 8 s", "disk is failing: [red]No space[/red]", "0.500", "0.125",
        "2.0/50.0", "absent 3, corrupt 1", "50 of 200 prompt tokens", "25.0%",
        "12.5 s of computing saved", "3 loads", "0a1b", "disk absent 6",
    ):  # fmt: skip
        assert part in text, text


def test_rates_are_those_since_the_last_look() -> None:
    before = {**SAID, "uptime_s": 6.0, "tiers": [{**DISK, "read_bytes": 2e9}]}
    assert "1.000" in shown(server_view(SAID, before))


def test_a_server_that_was_started_anew_has_no_negative_rates() -> None:
    before = {**SAID, "uptime_s": 1000.0, "tiers": [{**DISK, "read_bytes": 9e12}]}
    text = shown(server_view(SAID, before))
    assert "0.500" in text
    assert "-" not in text


def test_a_server_fits_into_a_terminal_of_eighty_columns() -> None:
    tier = {**DISK, "name": "remote", "state": "ok", "detail": "", "codec": "float32"}
    tier |= {"used_bytes": 511 * MIB + MIB // 2, "capacity_bytes": 511 * MIB + MIB // 2}
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(server_view({**SAID, "tiers": [tier]}, None))
    console.file.close()
    text = console.export_text()
    assert "…" not in text, text
    assert "remote ok" in text


@pytest.mark.parametrize("nothing", [0, None])
def test_what_a_remote_without_a_bound_holds_is_left_open(nothing: int | None) -> None:
    held = dict.fromkeys(("used_bytes", "capacity_bytes", "chunks"), nothing)
    text = shown(server_view({**SAID, "tiers": [{**DISK, "name": "remote", **held}]}, None))
    assert "no bound" in text
    assert "0 B" not in text


def test_a_server_without_tiers_and_requests_is_shown() -> None:
    text = shown(server_view({"model": "toy", "tiers": []}, None))
    assert "0 of 0 prompt tokens" in text


def test_a_cache_server_tells_of_objects_also_where_it_read_more_than_it_was_asked_for() -> None:
    said = {"model": "kvtier daemon", "connections": {}, "hit_tokens": {"disk": 2}, "tiers": []}
    assert "0 objects were asked for, 2 were read" in shown(server_view(said, None))


def test_once_shows_a_table_and_json_what_was_said(url: str) -> None:
    result = CliRunner().invoke(app, ["stat", url, "--once"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "toy: degraded" in result.stdout
    result = CliRunner().invoke(app, ["stat", f"{url}/any/path", "--json", "--api-key", "k"])
    assert json.loads(result.stdout) == SAID
    assert Answers.asked == [
        ("/v1/kvtier/stats", None),
        ("/v1/kvtier/stats", "Bearer k"),
    ]


class Impatient(FakeClock):
    """Interrupts after so many sleeps."""

    def __init__(self, sleeps: int) -> None:
        super().__init__()
        self.left = sleeps

    def sleep(self, seconds: float) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.advance(seconds)


@pytest.mark.parametrize(
    "body",
    [
        b'{"tiers": [1]}',
        b'{"tiers": [], "uptime_s": "1"}',
        b'{"tiers": [{"used_bytes": "1"}]}',
        b'{"tiers": [{"miss_tokens": [1]}]}',
        b'{"tiers": [], "tenants": [1]}',
        b"[" * 100_000,
    ],
)
def test_an_answer_of_something_else_is_named(url: str, body: bytes) -> None:
    Answers.queue = [(200, body)]
    result = CliRunner().invoke(app, ["stat", url, "--once"])
    assert isinstance(result.exception, TierUnavailableError), result.exception
    assert str(result.exception).startswith(url)


def test_a_server_is_watched_until_it_is_enough(url: str) -> None:
    """Also through a time in which it does not answer."""
    good = json.dumps(SAID).encode()
    Answers.queue = [(200, good), (503, b""), (200, good)]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    watch(Request(f"{url}/v1/kvtier/stats"), console, Impatient(4), interval_s=1.0)
    console.file.close()
    assert len(Answers.asked) == 4
    assert "toy" in console.export_text()


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b"", "--api-key"),
        (404, b"", "404"),
        (200, b"<html>", "no answer of a server"),
        (200, b"[]", "not one of kvtier-serve"),
        (200, b'{"tiers": 3}', "not one of kvtier-serve"),
    ],
)
def test_an_answer_that_is_none_is_one_line(url: str, status: int, body: bytes, why: str) -> None:
    Answers.queue = [(status, body)]
    with pytest.raises(TierUnavailableError, match=why):
        said(Request(f"{url}/v1/kvtier/stats"))


def test_a_server_that_is_not_there_ends_the_command() -> None:
    result = CliRunner().invoke(app, ["stat", "http://127.0.0.1:1", "--once"])
    assert isinstance(result.exception, TierUnavailableError)


@pytest.mark.parametrize("target", ["ftp://host/path", "/dev", "nowhere"])
def test_what_is_neither_server_nor_directory_is_refused(target: str) -> None:
    result = CliRunner().invoke(app, ["stat", target])
    assert isinstance(result.exception, ConfigError)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three chunks of one tenant and one of another."""
    disk = DiskConfig(str(tmp_path / "tier"), 8 * MIB)
    cache = Cache(CacheConfig(dram_bytes=MIB, slab_bytes=MIB, disk=disk))
    for salt, chunks in (("a", 3), ("b", 1)):
        engine = EngineDouble(cache, Namespace("w", LAYOUT, tenant_salt=salt), block_tokens=4)
        prompt = engine.sequence(range(16 * chunks))
        engine.match(prompt)
        assert engine.store(prompt)
        engine.close()
    cache.close()
    return tmp_path / "tier"


def test_a_directory_at_rest_is_told_by_namespace(root: Path) -> None:
    found = at_rest(str(root), LocalFiles())
    assert (found.indexed, found.chunks, found.nbytes) == (True, 4, 4 * CHUNK_BYTES)
    assert [(each.codec, each.chunks) for each in found.held] == [("raw", 3), ("raw", 1)]
    assert found.held[0].namespace != found.held[1].namespace
    assert 1.6e9 < found.held[0].used_first_s <= found.held[0].used_last_s
    result = CliRunner().invoke(app, ["stat", str(root), "--json"])
    report = json.loads(result.stdout)
    assert (report["chunks"], report["bytes"]) == (4, 4 * CHUNK_BYTES)
    assert [each["chunks"] for each in report["namespaces"]] == [3, 1]
    result = CliRunner().invoke(app, ["stat", str(root)], env={"COLUMNS": "300"})
    assert "4 chunks, 64 KiB" in result.stdout


def test_compressed_chunks_of_many_sizes_are_one_line(tmp_path: Path) -> None:
    shard = ShardId(0, 0, 0)
    kinds = [Kind(b"n" * 32, "raw", ((shard, nbytes),)) for nbytes in (4096, 8192)]
    rows = Rows.of(
        Row(ChunkKey(bytes([number]) * 32), None, 0, kinds[number % 2], number, 1000 * number)
        for number in (1, 2, 3)
    )
    journal = Journal(str(tmp_path), LocalFiles())
    (tmp_path / "index").mkdir()
    journal.start(rows)
    held = at_rest(str(tmp_path), LocalFiles()).held
    assert held == (HeldKind(b"n" * 32, "raw", 3, 20480, 1.0, 3.0),)


def test_what_is_in_quarantine_and_a_lost_index_are_told(root: Path) -> None:
    (root / "quarantine").mkdir(exist_ok=True)
    (root / "quarantine" / "bad.kvs").write_bytes(b"x" * 2048)
    (root / "index" / "snapshot").write_bytes(b"")
    found = at_rest(str(root), LocalFiles())
    assert (found.indexed, found.chunks, found.quarantined_files) == (False, 0, 1)
    text = shown(rest_view(found))
    assert "reads every header" in text
    assert "1 files, 2 KiB" in text


def test_a_directory_is_left_as_it_is(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    at_rest(str(root), LocalFiles())
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
