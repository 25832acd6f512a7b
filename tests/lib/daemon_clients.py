"""Clients of a cache server, each a process, of which some are killed at any moment and replaced.

``python -m tests.lib.daemon_clients`` is told a ``Load`` as JSON, forks a client for each slot of
the ledger, kills a tenth of them a second, and ends when the time is over: with 0 if every client
that was not killed ended well. What clients did is in the ledger, which outlives them.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import mmap
import os
import random
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import ConnectorError, ConnectorTimeoutError
from kvtier.interfaces import Connector
from kvtier.registry import connect
from kvtier.testing.connector_contract import payload_of
from kvtier.types import ReadRequest, WriteItem
from kvtier.wire import Done, Lease, Leased, Release, Status, Write
from tests.lib.wire_client import WireClient

#: More than the server's DRAM and disk hold together, of which some is hot.
SIZES: Final = (100, 5_000, 300_000, 1_000_000)
KEYS: Final = [b"object %d" % number for number in range(320)]
#: Of all clients, those that are killed in each second.
DEATHS_PER_S: Final = 0.1
#: What one client has under way at once.
WORKERS: Final = 2
#: Leases that one client holds beside that, most of the time.
LINGERS: Final = 3
_LINGER_S: Final = 0.05

COUNTS: Final = (
    "reads_begun",
    "read",
    "absent",
    "read_bytes",
    "writes_begun",
    "written",
    "unwritten",
    "written_bytes",
    "lookups_begun",
    "looked_up",
    "wrong",
    "late",
    "faults",
    "killed",
)
KINDS: Final = ("read", "write")
_BUCKETS: Final = 256
_BUCKETS_PER_DOUBLING: Final = 10
_SLOT: Final = len(COUNTS) + len(KINDS) * _BUCKETS
_PR_SET_PDEATHSIG: Final = 1


class Ledger:
    """Counts of each slot, in a file that a killed writer leaves as it is. One writer a slot."""

    def __init__(self, path: Path, slots: int) -> None:
        """Open it; an empty file becomes one of zeros."""
        nbytes = 8 * _SLOT * slots
        with path.open("r+b") as file:
            file.truncate(nbytes)
            self._counts = memoryview(mmap.mmap(file.fileno(), nbytes)).cast("Q")
        self.slots = slots

    def add(self, slot: int, name: str, count: int = 1) -> None:
        self._counts[slot * _SLOT + COUNTS.index(name)] += count

    def took(self, slot: int, kind: str, seconds: float) -> None:
        """Count a call of a kind by how long it took, in buckets of 7 %."""
        bucket = int(_BUCKETS_PER_DOUBLING * math.log2(max(1.0, 1e6 * seconds)))
        self._counts[self._bucket(slot, kind) + min(bucket, _BUCKETS - 1)] += 1

    def total(self, name: str) -> int:
        """A count of all slots together."""
        return sum(self._counts[COUNTS.index(name) :: _SLOT])

    def quantile_s(self, kind: str, share: float, *, first: int = 0, step: int = 1) -> float:
        """How long so large a share of the calls took at most, of every ``step``-th slot."""
        starts = [self._bucket(slot, kind) for slot in range(first, self.slots, step)]
        counts = [sum(self._counts[start + n] for start in starts) for n in range(_BUCKETS)]
        left = share * sum(counts)
        for bucket, count in enumerate(counts):
            left -= count
            if left <= 0:
                return float(2 ** ((bucket + 1) / _BUCKETS_PER_DOUBLING) / 1e6)
        raise AssertionError("a share of more than all")

    @staticmethod
    def _bucket(slot: int, kind: str) -> int:
        return slot * _SLOT + len(COUNTS) + KINDS.index(kind) * _BUCKETS


@dataclass(frozen=True)
class Load:
    """How many clients ask for how long. Slot n asks the n-th of the URLs, in turn."""

    urls: tuple[str, ...]
    ledger: str
    clients: int
    seconds: float
    seed: int

    def text(self) -> str:
        """Return the argument for the program."""
        return json.dumps(asdict(self))


class Client:
    """One client: reads, writes, looks up and deletes at random, and knows what is right."""

    def __init__(
        self, url: str, slot: int, ledger: Ledger, objects: dict[bytes, bytes], seed: int
    ) -> None:
        self._connector: Connector = connect(url)
        self._slot, self._ledger, self._objects = slot, ledger, objects
        self._draws = random.Random(seed)
        self._lingerer = Lingerer(url, slot, ledger)

    async def run(self, until_s: float) -> None:
        """Go on until then. However busy the machine is, something large is written once."""
        await self._write(KEYS[len(SIZES) * self._slot + len(SIZES) - 1])
        workers = (self._work(until_s) for _ in range(WORKERS))
        lingering = asyncio.to_thread(self._lingerer.run, until_s)
        await asyncio.gather(*workers, lingering)
        await self._connector.close()

    async def _work(self, until_s: float) -> None:
        buffer = memoryview(bytearray(max(SIZES)))
        while time.monotonic() < until_s:
            # Some are asked for much more often than others.
            key = KEYS[int(len(KEYS) * self._draws.random() ** 2)]
            draw = self._draws.random()
            if draw < 0.65:
                await self._read(key, buffer)
            elif draw < 0.9:
                await self._write(key)
            elif draw < 0.99:
                self._count("lookups_begun", 8)
                await self._connector.contains(self._draws.sample(KEYS, 8))
                self._count("looked_up", 8)
            else:
                await self._connector.delete([key])

    async def _read(self, key: bytes, buffer: memoryview) -> None:
        data = self._objects[key]
        into = buffer[: len(data)]
        self._count("reads_begun")
        begun_s = time.monotonic()
        (outcome,) = await self._connector.read([ReadRequest(key, 0, len(data))], [into])
        self._ledger.took(self._slot, "read", time.monotonic() - begun_s)
        if isinstance(outcome, ConnectorError):
            self._fault("read", outcome)
        elif outcome is None:
            self._count("absent")
        else:
            self._count("read")
            self._count("read_bytes", outcome)
            self._count("wrong", int(outcome != len(data) or into != data))

    async def _write(self, key: bytes) -> None:
        data = self._objects[key]
        self._count("writes_begun")
        begun_s = time.monotonic()
        (outcome,) = await self._connector.write([WriteItem(key, memoryview(data))])
        self._ledger.took(self._slot, "write", time.monotonic() - begun_s)
        if outcome is None:
            self._count("written")
            self._count("written_bytes", len(data))
        elif "no room" in str(outcome):
            self._count("unwritten")
        else:
            self._fault("write", outcome)

    def _fault(self, what: str, outcome: ConnectorError) -> None:
        """Count what the server could not do in time, and tell of what it should never answer."""
        if isinstance(outcome, ConnectorTimeoutError):
            self._count("late")
            return
        self._count("faults")
        sys.stderr.write(f"a {what} of slot {self._slot}: {outcome!r}\n")

    def _count(self, name: str, count: int = 1) -> None:
        self._ledger.add(self._slot, name, count)


class Lingerer:
    """Nearly always in the middle of an upload, with leases where it may have some.

    Whoever is killed so leaves as much behind as there can be. Nobody else asks for its objects.
    """

    def __init__(self, url: str, slot: int, ledger: Ledger) -> None:
        self._url, self._slot, self._ledger = url, slot, ledger
        self._shares = url.startswith("kvtier+unix") and "shared=no" not in url
        self._pause = threading.Event()

    def run(self, until_s: float) -> None:
        client = WireClient(self._url).hello(version=2 if self._shares else 1)
        kept, torn = b"kept %d" % self._slot, b"torn %d" % self._slot
        data = payload_of(kept, SIZES[-2])
        half = len(data) // 2
        while True:  # However busy the machine is, once.
            self._ask(client, Write(LINGERS, kept), data)
            self._took_in(client, len(data))
            held = [n for n in range(LINGERS) if self._shares and self._leased(client, n, kept)]
            self._ask(client, Write(LINGERS, torn), data[:half], announced=len(data))
            self._pause.wait(_LINGER_S)
            client.socket.sendall(data[half:])
            self._took_in(client, len(data))
            if held:
                client.send(Release(tuple(held)))
            if time.monotonic() >= until_s:
                break
        client.close()

    def _ask(self, client: WireClient, message: Write, data: bytes, **how: int) -> None:
        self._ledger.add(self._slot, "writes_begun")
        client.send(message, data, **how)

    def _took_in(self, client: WireClient, nbytes: int) -> None:
        answer = client.answer()
        assert isinstance(answer, Done)
        if answer.status is Status.OK:
            self._ledger.add(self._slot, "written")
            self._ledger.add(self._slot, "written_bytes", nbytes)
        else:
            self._ledger.add(self._slot, "late" if answer.status is Status.LATE else "unwritten")

    def _leased(self, client: WireClient, number: int, key: bytes) -> bool:
        self._ledger.add(self._slot, "reads_begun")
        client.send(Lease(number, key))
        answer = client.answer()
        assert isinstance(answer, Leased)
        if answer.status is Status.OK:
            self._ledger.add(self._slot, "read")
            self._ledger.add(self._slot, "read_bytes", answer.nbytes)
        elif answer.status is Status.ABSENT:
            self._ledger.add(self._slot, "absent")
        return answer.status is Status.OK


class Clients:
    """The processes, one a slot."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._ledger = Ledger(Path(load.ledger), load.clients)
        self._draws = random.Random(load.seed)
        self._objects = {
            key: payload_of(key, SIZES[number % len(SIZES)]) for number, key in enumerate(KEYS)
        }
        self._until_s = time.monotonic() + load.seconds
        self._pids = [self._fork(slot) for slot in range(load.clients)]

    def run(self) -> int:
        """Kill and replace until the time is over; return how many ended badly by themselves."""
        rate = DEATHS_PER_S * len(self._pids)
        self._replace(0)  # However busy the machine is, one dies.
        while (left_s := self._until_s - time.monotonic()) > 0:
            pause_s = min(left_s, self._draws.expovariate(rate))
            if signal.sigtimedwait({signal.SIGCHLD}, pause_s) is not None:
                break  # Nobody ends before the time by itself; if it is over, they all do.
            if pause_s < left_s:
                self._replace(self._draws.randrange(len(self._pids)))
        statuses = [os.waitpid(pid, 0)[1] for pid in self._pids]
        return sum(status != 0 for status in statuses)

    def _replace(self, slot: int) -> None:
        os.kill(self._pids[slot], signal.SIGKILL)
        _, status = os.waitpid(self._pids[slot], 0)
        signal.sigtimedwait({signal.SIGCHLD}, 0)  # That was it.
        self._ledger.add(slot, "killed", int(os.WIFSIGNALED(status)))
        self._pids[slot] = self._fork(slot)

    def _fork(self, slot: int) -> int:
        seed = self._draws.getrandbits(32)
        if pid := os.fork():
            return pid
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        url = self._load.urls[slot % len(self._load.urls)]
        asyncio.run(Client(url, slot, self._ledger, self._objects, seed).run(self._until_s))
        os._exit(0)


def main() -> None:
    """Be the parent of clients, as told."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    values = json.loads(sys.argv[1])
    sys.exit(Clients(Load(**values | {"urls": tuple(values["urls"])})).run())


if __name__ == "__main__":
    main()
