"""How fast does the cache server carry shards, beside a bare socket between two processes?

Shards of 2, 8 and 32 MiB over TCP on loopback and over a Unix socket, warm buffers on both sides,
in turns: ``kvtier daemon`` with its connector (four shards under way at a time) and a peer that
does nothing but ``sendall`` and ``recv_into``. A read of 4 KiB gives the latency. The gate is that
every byte comes back.

    python bench/tiers/daemon.py [--smoke] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier.constants import MIB
from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.types import ReadRequest, WriteItem

SHARDS = 4
SMALL_READS = 200
Figures = dict[str, list[float]]


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Bare:
    """A process at the other end of a socket: takes so many bytes, then gives as many back."""

    def __init__(self, stack: ExitStack, family: socket.AddressFamily, folder: str) -> None:
        listener = stack.enter_context(socket.socket(family))
        unix = family == socket.AF_UNIX
        listener.bind(f"{folder}/bare" if unix else ("127.0.0.1", 0))
        listener.listen(1)
        command = [sys.executable, __file__, "--bare", str(listener.fileno()), str(int(unix))]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
        stack.callback(process.wait)  # It ends when our socket is closed, which is before.
        self.socket = stack.enter_context(socket.socket(family))
        self.socket.connect(listener.getsockname())

    def write(self, shards: list[memoryview]) -> None:
        for data in shards:
            self.socket.sendall(b"w" + len(data).to_bytes(8, "little"))
            self.socket.sendall(data)
            if self.socket.recv(1) != b"k":
                raise SystemExit("gate: the bare peer has gone")

    def read(self, into: list[memoryview]) -> None:
        for each in into:
            self.socket.sendall(b"r" + len(each).to_bytes(8, "little"))
            receive(self.socket, each)


def receive(connection: socket.socket, into: memoryview) -> None:
    while len(into):
        count = connection.recv_into(into)
        if not count:
            raise SystemExit("gate: the bare peer has gone")
        into = into[count:]


def be_bare(number: int, *, unix: bool) -> None:
    """In the other process."""
    family = socket.AF_UNIX if unix else socket.AF_INET
    with socket.socket(family, fileno=number) as listener, listener.accept()[0] as connection:
        buffer = memoryview(bytearray(32 * MIB))
        while order := connection.recv(9, socket.MSG_WAITALL):
            part = buffer[: int.from_bytes(order[1:], "little")]
            if order[:1] == b"w":
                receive(connection, part)
                connection.sendall(b"k")
            else:
                connection.sendall(part)


class Served:
    """The server's connector, in a loop of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connector: Connector) -> None:
        self._loop = loop
        self._connector = connector

    def write(self, shards: list[memoryview]) -> None:
        items = [WriteItem(b"shard %d" % n, data) for n, data in enumerate(shards)]
        outcomes = self._loop.run_until_complete(self._connector.write(items))
        if any(outcomes):
            raise SystemExit(f"gate: a write failed: {outcomes}")

    def read(self, into: list[memoryview]) -> None:
        requests = [ReadRequest(b"shard %d" % n, 0, len(each)) for n, each in enumerate(into)]
        outcomes = self._loop.run_until_complete(self._connector.read(requests, into))
        if outcomes != [len(each) for each in into]:
            raise SystemExit(f"gate: a read failed: {outcomes}")

    def close(self) -> None:
        self._loop.run_until_complete(self._connector.close())


def start_daemon(stack: ExitStack, folder: str) -> list[str]:
    command = [str(Path(sys.executable).with_name("kvtier")), "daemon", "--dram=512MiB"]
    command += ["--listen=127.0.0.1:0", f"--listen=unix:{folder}/daemon"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    urls: list[str] = []
    assert process.stderr is not None
    while len(urls) < 2 and (line := process.stderr.readline()):
        urls += [line.split()[1]] if line.startswith("  serves") else []
    return urls


def measure(size: int, rounds: int, served: Served, bare: Bare, draws: random.Random) -> Figures:
    shards = [memoryview(bytearray(draws.randbytes(size))) for _ in range(SHARDS)]
    into = [memoryview(bytearray(size)) for _ in range(SHARDS)]
    gigabytes = size * SHARDS / 1e9
    figures: Figures = {}
    for turn in range(rounds + 1):
        seconds = {
            "write": timed(lambda: served.write(shards)),
            "read": timed(lambda: served.read(into)),
            "bare_write": timed(lambda: bare.write(shards)),
            "bare_read": timed(lambda: bare.read(into)),
        }
        served.read(into)
        if into != shards:
            raise SystemExit("gate: other bytes came back")
        if turn:  # The first one warms the buffers.
            for name, each in seconds.items():
                figures.setdefault(name, []).append(gigabytes / each)
    return figures


def latency_us(served: Served) -> list[float]:
    small = [memoryview(bytearray(4096))]
    return [timed(lambda: served.read(small)) * 1e6 for _ in range(SMALL_READS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small and quick; writes no row")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bare", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        be_bare(options.bare[0], unix=bool(options.bare[1]))
        return
    draws = random.Random(1)
    rounds = 1 if options.smoke else options.rounds
    row: dict[str, object] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        urls = start_daemon(stack, folder)
        families = {"tcp": socket.AF_INET, "unix": socket.AF_UNIX}
        for (name, family), url in zip(families.items(), urls, strict=True):
            served, bare = Served(loop, connect(url)), Bare(stack, family, folder)
            for size in (MIB,) if options.smoke else (2 * MIB, 8 * MIB, 32 * MIB):
                figures = measure(size, rounds, served, bare, draws)
                for way, values in figures.items():
                    row[f"{name}_{size // MIB}_mib_{way}_gb_per_s"] = spread(values)
                    print(f"{name} {size // MIB} MiB {way} {spread(values)['p50']:.2f} GB/s")
            micros = latency_us(served)
            row[f"{name}_4_kib_read_us"] = spread(micros)
            print(f"{name} 4 KiB read {spread(micros)['p50']:.0f} us")
            served.close()
    if not options.smoke:
        write_row("daemon", row)


if __name__ == "__main__":
    main()
