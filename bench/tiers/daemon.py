"""How fast does the cache server carry shards, beside a bare socket between two processes?

Shards of 2, 8 and 32 MiB over TCP on loopback, over a Unix socket and through shared memory, warm
buffers on both sides, in turns: ``kvtier daemon`` with its connector (four shards under way at a
time), a peer that does nothing but ``sendall`` and ``recv_into``, and a copy within this process.
Beside the speed stands what both sides take of a core for each GB, which other programs on the
machine disturb less. A read of 4 KiB gives the latency, and one of 64 KiB that of the least that
is shared. The gate is that every byte comes back.

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
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier.constants import KIB, MIB
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


def spent_s(process_id: int) -> float:
    """Seconds that all threads of a process have had a core, to the nanosecond."""
    tasks = Path(f"/proc/{process_id}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@dataclass(frozen=True)
class Way:
    """Something that is measured, and the process at its other end, if there is one."""

    work: Callable[[], None]
    other: int | None

    def measured(self, gigabytes: float) -> tuple[float, float]:
        """Return GB/s and the seconds of a core that both sides took for each GB."""
        before_s = self._spent_s()
        seconds = timed(self.work)
        return gigabytes / seconds, (self._spent_s() - before_s) / gigabytes

    def _spent_s(self) -> float:
        return time.process_time() + (spent_s(self.other) if self.other is not None else 0.0)


class Bare:
    """A process at the other end of a socket: takes so many bytes, then gives as many back."""

    def __init__(self, stack: ExitStack, family: socket.AddressFamily, folder: str) -> None:
        listener = stack.enter_context(socket.socket(family))
        unix = family == socket.AF_UNIX
        listener.bind(f"{folder}/bare" if unix else ("127.0.0.1", 0))
        listener.listen(1)
        command = [sys.executable, __file__, "--bare", str(listener.fileno()), str(int(unix))]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
        self.process_id = process.pid
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

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connector: Connector, process_id: int
    ) -> None:
        self.process_id = process_id
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


def start_daemon(stack: ExitStack, folder: str) -> tuple[int, list[str]]:
    command = [str(Path(sys.executable).with_name("kvtier")), "daemon", "--dram=512MiB"]
    command += ["--listen=127.0.0.1:0", f"--listen=unix:{folder}/daemon"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    urls: list[str] = []
    assert process.stderr is not None
    while len(urls) < 2 and (line := process.stderr.readline()):
        urls += [line.split()[1]] if line.startswith("  serves") else []
    return process.pid, urls


def measure(size: int, rounds: int, served: Served, bare: Bare, draws: random.Random) -> Figures:
    shards = [memoryview(bytearray(draws.randbytes(size))) for _ in range(SHARDS)]
    into = [memoryview(bytearray(size)) for _ in range(SHARDS)]
    ways = {
        "write": Way(lambda: served.write(shards), served.process_id),
        "read": Way(lambda: served.read(into), served.process_id),
        "bare_write": Way(lambda: bare.write(shards), bare.process_id),
        "bare_read": Way(lambda: bare.read(into), bare.process_id),
        "copy": Way(lambda: copy(shards, into), None),
    }
    figures: Figures = {}
    for turn in range(rounds + 1):
        measured = {name: way.measured(size * SHARDS / 1e9) for name, way in ways.items()}
        served.read(into)
        if into != shards:
            raise SystemExit("gate: other bytes came back")
        if turn:  # The first one warms the buffers.
            for name, (speed, cost) in measured.items():
                figures.setdefault(f"{name}_gb_per_s", []).append(speed)
                figures.setdefault(f"{name}_core_s_per_gb", []).append(cost)
    return figures


def copy(shards: list[memoryview], into: list[memoryview]) -> None:
    for source, target in zip(shards, into, strict=True):
        target[:] = source


def latency_us(served: Served, nbytes: int) -> list[float]:
    small = [memoryview(bytearray(nbytes))]
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
        process_id, (tcp, unix) = start_daemon(stack, folder)
        ways = {
            "tcp": (socket.AF_INET, tcp),
            "unix": (socket.AF_UNIX, f"{unix}?shared=no"),
            "shared": (socket.AF_UNIX, unix),
        }
        for name, (family, url) in ways.items():
            served = Served(loop, connect(url), process_id)
            bare = Bare(stack, family, tempfile.mkdtemp(dir=folder))
            for size in (MIB,) if options.smoke else (2 * MIB, 8 * MIB, 32 * MIB):
                figures = measure(size, rounds, served, bare, draws)
                for figure, values in figures.items():
                    row[f"{name}_{size // MIB}_mib_{figure}"] = spread(values)
                    print(f"{name} {size // MIB} MiB {figure} {spread(values)['p50']:.3f}")
            for kib in (4, 64):
                micros = latency_us(served, kib * KIB)
                row[f"{name}_{kib}_kib_read_us"] = spread(micros)
                print(f"{name} {kib} KiB read {spread(micros)['p50']:.0f} us")
            served.close()
    if not options.smoke:
        write_row("daemon", row)


if __name__ == "__main__":
    main()
