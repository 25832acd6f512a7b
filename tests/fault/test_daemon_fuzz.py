"""A cache server under whatever bytes come, from many at once: it ends them, and serves the others.

A good client asks all the while, and is told right bytes or a typed error. In the end memory,
threads and descriptors are what they were, nothing is held for anybody, and nothing was logged.
"""

from __future__ import annotations

import random
import socket
import struct
import sys
import threading
from collections import Counter
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest

from kvtier.constants import KIB, MIB
from kvtier.testing.connector_contract import payload_of
from kvtier.wire import FROM_SERVER, Data, Done, Hello, Read, Refused, Status, Write, encode
from kvtier.wire_parser import Parser
from tests.lib.attack import attack
from tests.lib.daemon import Daemon, daemon
from tests.lib.process_figures import Figures, figures
from tests.lib.soak_report import report
from tests.lib.wire_client import WireClient
from tests.lib.wire_corpus import CLIENT, CORPUS, mutated

ATTACKERS = 12
#: Connections that one attacker leaves open behind it, half said or unread.
LEFT_OPEN = 5
CONNECTIONS = 400
SOAK_S_MAX = 600.0
#: What allocators keep.
GROWTH_BYTES_MAX = 24 * MIB
#: The answers of one client that are looked at; behind that it goes away.
ANSWER_BYTES_MAX = 4 * MIB
#: A client that takes its time: between two pieces, and for an answer at the end.
PAUSE_S = 0.01
PATIENCE_S = 0.05
GOOD_BYTES = 200_000


class Attacker:
    """One client after another, each hostile in its own way."""

    def __init__(self, urls: list[str], draws: random.Random) -> None:
        self._urls = urls
        self._draws = draws
        self._open: list[socket.socket] = []
        self.seen: Counter[str] = Counter()

    def run(self, over: threading.Event) -> Counter[str]:
        """Go on until it is over, then let go of everything."""
        while not over.is_set():
            try:
                self._one()
            # It hangs up as soon as it knows enough; with many at once it may be full.
            except (ConnectionError, TimeoutError):
                self.seen["cut off"] += 1
        for each in self._open:
            each.close()
        return self.seen

    def _one(self) -> None:
        draws = self._draws
        with ExitStack() as opened:
            client = WireClient(draws.choice(self._urls), receive_bytes=draws.choice((None, 4096)))
            opened.callback(client.close)
            self.seen["streams"] += 1
            self._send(client.socket, self._stream())
            self._listen(client.socket)
            kind = draws.randrange(4)
            if kind == 0:  # As a process that is killed with bytes unread.
                reset = struct.pack("ii", 1, 0)
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            elif kind == 1:
                with suppress(OSError):
                    client.socket.shutdown(socket.SHUT_WR)
            elif kind == 2:  # As one that is gone without a word.
                opened.pop_all()
                self._open.append(client.socket)
                if len(self._open) > LEFT_OPEN:
                    self._open.pop(draws.randrange(LEFT_OPEN)).close()

    def _stream(self) -> bytes:
        draws = self._draws
        kind = draws.randrange(6)
        if kind == 0:
            return draws.randbytes(draws.choice((1, 19, 21, 300, 100_000)))
        if kind == 1:
            whole = draws.choice(list(CLIENT.values()))
            return whole[: draws.randrange(len(whole) + 1)]
        hello = encode(Hello(*draws.choice(((1, 1), (1, 2), (2, 2))), b""))
        if kind == 2:
            return hello + draws.choice(CORPUS)
        changed = mutated(draws, draws.choice(CORPUS))
        return changed if kind == 3 else hello + changed

    def _send(self, connection: socket.socket, data: bytes) -> None:
        """Send it in one piece or in several, some with a descriptor that nobody asked for."""
        draws = self._draws
        if draws.random() < 0.5:
            connection.sendall(data)
            return
        connection.settimeout(PAUSE_S)
        for cut in sorted(draws.choices(range(len(data) + 1), k=4)):
            piece, data = data[: len(data) - cut], data[len(data) - cut :]
            if piece and connection.family == socket.AF_UNIX and draws.random() < 0.3:
                sent = socket.send_fds(connection, [piece], [connection.fileno()])
                piece = piece[sent:]
            connection.sendall(piece)
            with suppress(TimeoutError):
                if not connection.recv(1, socket.MSG_PEEK):
                    return
        connection.sendall(data)

    def _listen(self, connection: socket.socket) -> None:
        """Whatever is answered is the wire's, up to the end of it."""
        if self._draws.random() < 0.3:
            return
        connection.settimeout(PATIENCE_S)
        parser, taken = Parser(FROM_SERVER), 0
        with suppress(TimeoutError):
            while taken < ANSWER_BYTES_MAX:
                space = parser.buffer()
                count = connection.recv_into(space)
                if not count:
                    return
                parser.received(count)
                taken += count
                while parser.payload_left == 0 and (frame := parser.next()) is not None:
                    self.seen[frame.message.kind.name] += 1
                    if isinstance(frame.message, Refused):
                        self.seen[f"refused, {frame.message.status.name}"] += 1
                    if frame.payload_bytes:
                        parser.place(None)


def be_good(url: str, over: threading.Event) -> Counter[str]:
    """Write and read, whatever others do; what is there is right, and each answer is its own."""
    seen: Counter[str] = Counter()
    with closing(WireClient(url).hello()) as client:
        number = 0
        while not over.is_set():
            number = (number + 2) % 2**31
            key = b"good %d" % (number % 50)
            data = payload_of(key, GOOD_BYTES)
            client.send(Write(number, key), data)
            done = client.answer()
            assert isinstance(done, Done)
            assert done.request == number
            seen[f"write {done.status.name}"] += 1
            client.send(Read(number + 1, key, 0, GOOD_BYTES))
            answer, found = client.read_answer()
            assert answer.request == number + 1
            seen[f"read {answer.status.name}"] += 1
            assert found == (data if answer.status is Status.OK else b"")
    return seen


def settled(server: Daemon) -> Figures:
    """What the process holds once nobody is there."""
    server.wait_until_nothing_is_held()
    return figures(server.process.pid)


def attacked(urls: list[str], rng: random.Random, seconds: float) -> tuple[Counter[str], ...]:
    """Attack for so long; return what attackers and the good client have seen."""
    attackers = [Attacker(urls, random.Random(rng.random())) for _ in range(ATTACKERS)]
    return attack([each.run for each in attackers], partial(be_good, urls[0]), seconds)


def test_b99_any_bytes_from_many_for_a_long_time(
    tmp_path: Path, rng: random.Random, scale: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = 4.0 if scale == 1 else min(SOAK_S_MAX, 30.0 * scale)
    listen = ("127.0.0.1:0", f"unix:{tmp_path}/socket")
    options = (f"--connections={CONNECTIONS}", "--dram=64MiB", "--log-level=debug")
    with daemon(*options, listen=listen) as server:
        attacked(server.urls, rng, seconds / 4)
        before = settled(server)
        seen, good = attacked(server.urls, rng, seconds * 3 / 4)
        after = settled(server)
        counted = server.connections()
        grown = after.anonymous_bytes - before.anonymous_bytes
        with capsys.disabled():
            told = ", ".join(f"{count} {name}" for name, count in sorted(seen.items()))
            sys.stdout.write(f"\n{seconds:.0f} s: {told}\na good client: {dict(good)}\n")
            sys.stdout.write(f"memory grew by {grown // KIB} KiB; {before}, then {after}\n")
        with closing(WireClient(server.urls[1]).hello(version=2)) as client:
            client.send(Write(1, b"afterwards"), b"sound")
            assert client.answer() == Done(1, Status.OK, "")
            client.send(Read(2, b"afterwards", 0, 5))
            assert client.read_answer() == (Data(2, Status.OK, ""), b"sound")
        assert server.stop() == 0
    report(
        "any bytes to a daemon",
        scale,
        seconds=seconds,
        streams=seen["streams"],
        malformed=counted["malformed"],
        good_reads=good["read OK"],
        growth_bytes=grown,
    )
    assert counted["malformed"] > 0
    assert seen["refused, CORRUPT"] > 0
    assert good["read OK"] > 0
    assert grown < GROWTH_BYTES_MAX
    assert after.threads == before.threads
    # The connection by which it was asked may be there still, at either look.
    assert after.descriptors <= before.descriptors + 1
