"""HTTP for operators: who shakes no hands takes few descriptors; a half-said request is no bug."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

from kvtier.constants import DAEMON_HANDSHAKES_MAX
from kvtier.testing.engine_double import wait_until
from tests.lib.certificates import make_authority
from tests.lib.daemon import Daemon, daemon
from tests.lib.process_figures import figures
from tests.lib.wire_client import WireClient


def port_of(running: Daemon) -> int:
    port = urlsplit(running.http).port
    assert port is not None
    return port


def test_whoever_shakes_no_hands_takes_few_descriptors(tmp_path: Path) -> None:
    made = make_authority(tmp_path / "authority")
    (tokens := tmp_path / "tokens").write_text("secret-of-all")
    options = [f"--tls-cert={made.server_cert}", f"--tls-key={made.server_key}"]
    options += [f"--admin-token-file={tokens}", "--http=0.0.0.0:0"]
    with (
        daemon(*options, listen=(f"unix:{tmp_path}/socket",)) as running,
        ExitStack() as open_now,
    ):
        before = figures(running.process.pid).descriptors
        for _ in range(2 * DAEMON_HANDSHAKES_MAX):
            open_now.enter_context(socket.create_connection(("127.0.0.1", port_of(running))))

        def taken() -> int:
            return figures(running.process.pid).descriptors - before

        wait_until(lambda: taken() >= DAEMON_HANDSHAKES_MAX, "it lets nobody in")
        for _ in range(3):  # Whoever else waits would be let in meanwhile.
            with closing(WireClient(running.urls[0]).hello()):
                pass
        assert taken() < DAEMON_HANDSHAKES_MAX + 16
        assert running.stop() == 0


def test_what_is_half_asked_as_it_stops_ends_without_a_traceback() -> None:
    head = b"POST /v1/evict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with (
        daemon() as running,
        socket.create_connection(("127.0.0.1", port_of(running)), timeout=20) as client,
    ):
        client.sendall(head + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(64).startswith(b"HTTP/1.1 100 "), "it waits for the body"
        assert running.stop() == 0
