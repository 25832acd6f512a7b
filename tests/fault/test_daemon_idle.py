"""Thousands of connections that want nothing: what they cost, and that they hold up nobody."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.testing.engine_double import wait_until
from kvtier.wire import Data, Read, Refused, Status, Write
from tests.lib.daemon import Daemon, daemon
from tests.lib.process_figures import figures
from tests.lib.soak_report import report
from tests.lib.wire_client import WireClient

#: In CI; ten thousand from a scale of ten on.
COUNT = 400
COUNT_MAX = 10_000
READS = 300
DATA = b"what the active one asks for" * 100
#: A session, its transport and a buffer of 4 KiB; by TCP and by Unix sockets.
IDLE_BYTES_MAX = 20 * 1024
#: Of a whole read, beside none and beside all of them.
SLOWER_MAX = 4.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as made:
        yield made
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def guest(stack: ExitStack, url: str) -> WireClient:
    client = WireClient(url)
    stack.callback(client.close)
    return client


def read_s(client: WireClient) -> float:
    """How long the active client waits for an answer where nobody else has the cores.

    Of many reads the quick ones, since other programs come in between.
    """
    took = []
    for number in range(READS):
        begun_s = time.perf_counter()
        client.send(Read(number, b"key", 0, len(DATA)))
        answer, payload = client.read_answer()
        took.append(time.perf_counter() - begun_s)
        assert answer == Data(number, Status.OK, "")
        assert payload == DATA
    return sorted(took)[READS // 10]


def open_now(server: Daemon) -> int:
    return server.connections()["open"]


@pytest.mark.timeout(600)
def test_b95_thousands_of_idle_connections_cost_little_and_end(
    tmp_path: Path, scale: int, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    count = min(COUNT_MAX, COUNT * scale)
    settings = tmp_path / "daemon.toml"
    settings.write_text(f"connections = {count + 1}\nidle_seconds = 3600\n")
    listen = ("127.0.0.1:0", f"unix:{tmp_path}/socket")
    server = stack.enter_context(daemon(f"--config={settings}", listen=listen))
    active = guest(stack, server.urls[0]).hello()
    active.send(Write(1, b"key"), DATA)
    active.answer()
    alone_s = read_s(active)
    before = figures(server.process.pid)
    idle = [guest(stack, server.urls[number % 2]).hello() for number in range(count)]
    after = figures(server.process.pid)
    assert open_now(server) == count + 1
    each_bytes = (after.anonymous_bytes - before.anonymous_bytes) / count
    beside_s = read_s(active)
    for url in server.urls:
        refused = guest(stack, url).answer()
        assert isinstance(refused, Refused)
        assert refused.status is Status.UNAVAILABLE
        assert refused.text == f"{count + 1} connections are open, which is the limit"
    with capsys.disabled():
        told = f"{each_bytes / 1024:.1f} KiB each; a read {1e6 * alone_s:.0f} us"
        sys.stdout.write(f"\n{count} idle connections, {told}, beside them {1e6 * beside_s:.0f}\n")
    report(
        "idle connections of a daemon",
        scale,
        connections=count,
        bytes_each=each_bytes,
        read_alone_s=alone_s,
        read_beside_s=beside_s,
    )
    assert each_bytes <= IDLE_BYTES_MAX
    assert beside_s <= SLOWER_MAX * alone_s
    assert after.threads == before.threads

    settings.write_text(f"connections = {count + 1}\nidle_seconds = 1\n")
    assert server.ask("POST", "/v1/config") == (200, {"changed": ["idle_seconds"]})
    wait_until(lambda: open_now(server) == 0, "idle connections are not closed")
    told_why = idle[0].answer()
    assert isinstance(told_why, Refused)
    assert told_why.text == "nothing was asked for a long time"
    # Whoever wants something again is let in.
    again = guest(stack, server.urls[0]).hello()
    read_s(again)
