"""How fast does the cache server carry shards, beside a bare socket between two processes?

Shards of 2, 8 and 32 MiB over TCP on loopback, over a Unix socket and through shared memory, warm
buffers on both sides, in turns: ``kvtier daemon`` with its connector (four shards under way at a
time), a peer that does nothing but ``sendall`` and ``recv_into``, and a copy within this process.
Beside the speed stands what both sides take of a core for each GB, which other programs on the
machine disturb less. A read of 4 KiB gives the latency, and one of 64 KiB that of the least that
is shared; where memory is shared, a lease with its release does it alone, and each of 16 loans
that are asked for in one go. Beside them stand the same bytes from the bare socket, and an echo
between two loops as ours are, which is as quick as a program in Python can be. The gate is that
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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier.constants import KIB, MIB
from kvtier.interfaces import Connector, Lending, Loan
from kvtier.loops import new_loop
from kvtier.registry import connect
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import Lease, Leased, Status
from kvtier_connectors.server.line import Line
from kvtier_connectors.server.settings import parse_url

SHARDS = 4
SMALL_READS = 1000
LOANS = 16
ECHO_BYTES = 60
Figures = dict[str, list[float]]


Work = Callable[[], Awaitable[None] | None]


async def timed(work: Work) -> float:
    """Within the loop: to enter it anew for each call would take longer than a small one."""
    began = time.perf_counter()
    if (waiting := work()) is not None:
        await waiting
    return time.perf_counter() - began


def spent_s(process_id: int) -> float:
    """Seconds that all threads of a process have had a core, to the nanosecond."""
    tasks = Path(f"/proc/{process_id}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@dataclass(frozen=True)
class Way:
    """Something that is measured, and the process at its other end, if there is one."""

    work: Work
    other: int | None

    async def measured(self, gigabytes: float) -> tuple[float, float]:
        """Return GB/s and the seconds of a core that both sides took for each GB."""
        before_s = self._spent_s()
        seconds = await timed(self.work)
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
    """The server's connector."""

    def __init__(self, connector: Connector, process_id: int) -> None:
        self.process_id = process_id
        self._connector = connector

    async def write(self, shards: list[memoryview]) -> None:
        await self.store({b"shard %d" % n: data for n, data in enumerate(shards)})

    async def store(self, objects: Mapping[bytes, memoryview]) -> None:
        items = [WriteItem(key, data) for key, data in objects.items()]
        outcomes = await self._connector.write(items)
        if any(outcomes):
            raise SystemExit(f"gate: a write failed: {outcomes}")

    async def lend(self, keys: Sequence[bytes]) -> list[Loan]:
        assert isinstance(self._connector, Lending)
        lent = await self._connector.lend(keys)
        loans = [loan for loan in lent if isinstance(loan, Loan)]
        if len(loans) != len(keys):
            raise SystemExit(f"gate: a loan failed: {lent}")
        return loans

    async def read(self, into: list[memoryview]) -> None:
        requests = [ReadRequest(b"shard %d" % n, 0, len(each)) for n, each in enumerate(into)]
        outcomes = await self._connector.read(requests, into)
        if outcomes != [len(each) for each in into]:
            raise SystemExit(f"gate: a read failed: {outcomes}")

    async def close(self) -> None:
        await self._connector.close()


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


async def measure(
    size: int, rounds: int, served: Served, bare: Bare, draws: random.Random
) -> Figures:
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
        measured = {name: await way.measured(size * SHARDS / 1e9) for name, way in ways.items()}
        await served.read(into)
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


async def latency_us(side: Served | Bare, nbytes: int) -> list[float]:
    small = [memoryview(bytearray(nbytes))]
    return [await timed(lambda: side.read(small)) * 1e6 for _ in range(SMALL_READS)]


async def leases_us(url: str, process_id: int) -> Figures:
    """How long a lease takes with its release, of the object that was read last.

    And what both sides take of a core for it.
    """
    line = Line(parse_url(url))
    await line.open()
    found = []
    ours_s, theirs_s = time.process_time(), spent_s(process_id)
    for _ in range(SMALL_READS):
        began = time.perf_counter()
        number = line.number()
        leased, _ = await line.ask(Lease(number, b"shard 0"), number)
        line.release(number)
        found.append((time.perf_counter() - began) * 1e6)
        if not isinstance(leased, Leased) or leased.status is not Status.OK:
            raise SystemExit(f"gate: a lease failed: {leased}")
    ours_s, theirs_s = time.process_time() - ours_s, spent_s(process_id) - theirs_s
    line.close()
    return {
        "lease_and_release_us": found,
        "lease_client_core_us": [ours_s / SMALL_READS * 1e6],
        "lease_server_core_us": [theirs_s / SMALL_READS * 1e6],
    }


async def loans_us(served: Served) -> list[float]:
    """How long a batch of loans takes with what it is given back by, for each of them."""
    keys = [b"small %d" % number for number in range(LOANS)]
    await served.store({key: memoryview(bytes(64 * KIB)) for key in keys})
    found = []
    for _ in range(SMALL_READS // LOANS):
        began = time.perf_counter()
        for loan in await served.lend(keys):
            loan.release()
        found.append((time.perf_counter() - began) / LOANS * 1e6)
    return found


class Echo(asyncio.Protocol):
    """Gives back what it gets; or waits for that, where somebody asks."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[None] | None = None
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # What another loop gives is no ``asyncio.Transport``, but does what that does.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.answer is not None:
            self.answer.set_result(None)
        else:
            self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(exc)


def start_echo(stack: ExitStack) -> socket.socket:
    """Return a socket with a loop in another process at its other end, which ends with it."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, __file__, "--echo", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    stack.callback(process.wait)
    stack.callback(ours.close)
    return ours


async def echoes_us(ours: socket.socket) -> list[float]:
    """How long an answer of a loop in another process takes by a Unix socket."""
    loop = asyncio.get_running_loop()
    transport, echo = await loop.create_connection(Echo, sock=ours)
    found = []
    for _ in range(SMALL_READS):
        began = time.perf_counter()
        echo.answer = loop.create_future()
        transport.write(bytes(ECHO_BYTES))
        await echo.answer
        found.append((time.perf_counter() - began) * 1e6)
    transport.close()
    await echo.closed
    return found


async def be_echo(number: int) -> None:
    """In the other process."""
    connection = socket.socket(fileno=number)
    _, echo = await asyncio.get_running_loop().create_connection(Echo, sock=connection)
    await echo.closed


async def run(stack: ExitStack, options: argparse.Namespace) -> dict[str, object]:
    draws = random.Random(1)
    rounds = 1 if options.smoke else options.rounds
    row: dict[str, object] = {}
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    process_id, (tcp, unix) = start_daemon(stack, folder)
    ways = {
        "tcp": (socket.AF_INET, tcp),
        "unix": (socket.AF_UNIX, f"{unix}?shared=no"),
        "shared": (socket.AF_UNIX, unix),
    }
    for name, (family, url) in ways.items():
        served = Served(connect(url), process_id)
        bare = Bare(stack, family, tempfile.mkdtemp(dir=folder))
        for size in (MIB,) if options.smoke else (2 * MIB, 8 * MIB, 32 * MIB):
            figures = await measure(size, rounds, served, bare, draws)
            for figure, values in figures.items():
                row[f"{name}_{size // MIB}_mib_{figure}"] = spread(values)
                print(f"{name} {size // MIB} MiB {figure} {spread(values)['p50']:.3f}")
        small = {
            f"{name}_{kib}_kib_{word}_us": await latency_us(side, kib * KIB)
            for kib in (4, 64)
            for word, side in (("read", served), ("bare_read", bare))
        }
        if name == "shared":
            small |= await leases_us(url, process_id)
            small["loan_of_16_us"] = await loans_us(served)
            small["echo_us"] = await echoes_us(start_echo(stack))
        for figure, micros in small.items():
            row[figure] = spread(micros)
            print(f"{figure} {spread(micros)['p50']:.0f}")
        await served.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small and quick; writes no row")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bare", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        be_bare(options.bare[0], unix=bool(options.bare[1]))
        return
    with ExitStack() as stack, asyncio.Runner(loop_factory=new_loop) as runner:
        if options.echo is not None:
            runner.run(be_echo(options.echo))
            return
        row = runner.run(run(stack, options))
    if not options.smoke:
        write_row("daemon", row)


if __name__ == "__main__":
    main()
