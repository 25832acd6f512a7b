"""The control plane under whatever bytes come, from many at once: it ends them, and serves on.

Somebody asks for its health all the while. In the end memory and descriptors are what they were,
and nothing is held for those that left requests half said or answers unread.
"""

from __future__ import annotations

import http.client
import random
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from urllib.parse import urlsplit

import pytest

from kvtier.constants import CONTROL_REQUESTS_MAX, KIB, MIB
from kvtier.testing.engine_double import wait_until
from tests.lib.attack import attack
from tests.lib.daemon import Daemon, daemon
from tests.lib.http_fuzz import STREAMS, endless
from tests.lib.process_figures import Figures, figures
from tests.lib.soak_report import report

ATTACKERS = 8
#: Connections that one attacker leaves open behind it, half said or unread.
LEFT_OPEN = 5
SOAK_S_MAX = 180.0
#: What allocators keep, most of it in the first seconds.
GROWTH_BYTES_MAX = 48 * MIB
#: What a server that ends nothing would be sent of one request.
ENDLESS_BYTES_MAX = 64 * MIB
#: A line for each of these would fill a disk.
LINES_MAX = 100
PATIENCE_S = 0.05


class Attacker:
    """One client after another, each hostile in its own way."""

    def __init__(self, where: tuple[str, int], draws: random.Random) -> None:
        self._where = where
        self._draws = draws
        self._open: list[socket.socket] = []
        self.seen: Counter[str] = Counter()

    def run(self, over: threading.Event) -> Counter[str]:
        """Go on until it is over, then let go of everything."""
        while not over.is_set():
            self.seen["connections"] += 1
            # It hangs up as soon as it knows enough.
            with suppress(ConnectionError, TimeoutError):
                self._one()
        for each in self._open:
            each.close()
        return self.seen

    def _one(self) -> None:
        draws = self._draws
        client = socket.create_connection(self._where, timeout=20.0)
        with leaving(client, draws, self._open):
            if draws.random() < 0.1:
                self._send_without_end(client)
                return
            data = draws.choice(STREAMS)(draws)
            client.settimeout(PATIENCE_S)
            for start, end in _pieces(draws, len(data)):
                client.sendall(data[start:end])
            self._listen(client)

    def _send_without_end(self, client: socket.socket) -> None:
        sent = 0
        for piece in endless(self._draws):
            try:
                client.sendall(piece)
            except (ConnectionError, TimeoutError):
                self.seen["ended by the server"] += 1
                return
            sent += len(piece)
            assert sent < ENDLESS_BYTES_MAX, "it would be taken for ever"

    def _listen(self, client: socket.socket) -> None:
        if self._draws.random() < 0.2:
            return
        with suppress(TimeoutError):
            answer = client.recv(64 * KIB)
            self.seen[answer[:12].decode("ascii", "replace")] += 1
            while client.recv(64 * KIB):
                pass


@contextmanager
def leaving(
    client: socket.socket, draws: random.Random, left: list[socket.socket]
) -> Iterator[None]:
    """End a connection in order, with a reset, or not at all."""
    kind = draws.randrange(3)
    try:
        yield
    finally:
        if kind == 0:
            reset = struct.pack("ii", 1, 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        if kind != 1:
            client.close()
        else:
            left.append(client)
            if len(left) > LEFT_OPEN:
                left.pop(draws.randrange(LEFT_OPEN)).close()


def _pieces(draws: random.Random, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut bytes into a few pieces, or leave them whole."""
    cuts = sorted(draws.choices(range(nbytes + 1), k=4)) if draws.random() < 0.5 else []
    yield from zip([0, *cuts], [*cuts, nbytes], strict=True)


def be_good(where: tuple[str, int], over: threading.Event) -> Counter[str]:
    """Ask for its health, whatever others do; it says how it does, or that it has too much."""
    seen: Counter[str] = Counter()
    while not over.is_set():
        with closing(http.client.HTTPConnection(*where, timeout=20)) as client:
            client.request("GET", "/health")
            answer = client.getresponse()
            seen[f"{answer.status}"] += 1
            told = answer.read()
            assert answer.status in {200, 503}
            assert answer.status == 503 or told.startswith(b'{"status":"ok"')
    return seen


def attacked(
    where: tuple[str, int], rng: random.Random, seconds: float
) -> tuple[Counter[str], ...]:
    """Attack for so long; return what attackers and the good client have seen."""
    attackers = [Attacker(where, random.Random(rng.random())) for _ in range(ATTACKERS)]
    return attack([each.run for each in attackers], partial(be_good, where), seconds)


def settled(server: Daemon) -> Figures:
    """What the process holds once nobody is there."""
    last = [figures(server.process.pid)]

    def steady() -> bool:
        server.get("/health")
        last.append(figures(server.process.pid))
        return last[-1].descriptors == last[-2].descriptors

    wait_until(steady, "it does not settle")
    return last[-1]


def test_b99_any_bytes_to_the_control_plane(
    rng: random.Random, scale: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = 2.0 if scale == 1 else min(SOAK_S_MAX, 9.0 * scale)
    with daemon("--dram=64MiB") as server:
        parts = urlsplit(server.http)
        where = (str(parts.hostname), int(parts.port or 0))
        attacked(where, rng, seconds / 4)
        before = settled(server)
        seen, good = attacked(where, rng, seconds * 3 / 4)
        after = settled(server)
        grown = after.anonymous_bytes - before.anonymous_bytes
        with capsys.disabled():
            told = ", ".join(f"{count} {name}" for name, count in sorted(seen.items()))
            sys.stdout.write(f"\n{seconds:.0f} s: {told}\na good client: {dict(good)}\n")
            sys.stdout.write(f"memory grew by {grown // KIB} KiB; {before}, then {after}\n")
        assert server.get("/health")["status"] == "ok"
        assert server.stop() == 0
    report(
        "any bytes to a control plane",
        scale,
        seconds=seconds,
        connections=seen["connections"],
        ended=seen["ended by the server"],
        good_answers=good["200"],
        growth_bytes=grown,
    )
    assert ATTACKERS * (LEFT_OPEN + 1) < CONTROL_REQUESTS_MAX, "the good one has to come in"
    assert seen["ended by the server"] > 0
    assert seen["HTTP/1.1 400"] > 0
    assert good["200"] > 0
    assert len(server.log) < LINES_MAX, server.log[:LINES_MAX]
    assert grown < GROWTH_BYTES_MAX
    assert after.threads <= before.threads
    # The connection by which it was asked may be there still, at either look.
    assert after.descriptors <= before.descriptors + 1
