"""Mooncake Store over TCP on this host: its batch calls with registered buffers, in lockstep.

Runs in Mooncake's environment, beside a master whose address is the job's folder. The objects lie
in a process of their own, as in KVTier's server, so that every byte crosses a socket.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
from lockstep import Job, serve
from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20
SEGMENT = 1024 * MIB


def client(address: str, segment: int, buffer: int) -> MooncakeDistributedStore:
    """A client that brings this much memory to the store."""
    store = MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", segment, buffer, "tcp", "", address):
        raise SystemExit("Mooncake did not start")
    return store


def hold(address: str) -> None:
    """In the other process: bring memory until standard input ends."""
    store = client(address, SEGMENT, 16 * MIB)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


def tcp(job: Job):  # noqa: ANN201
    """Batches of whole chunks from one buffer, and into another."""
    holder = subprocess.Popen(
        [sys.executable, __file__, "--hold", job.folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if not any(line.startswith("ready") for line in holder.stdout):
        raise SystemExit("Mooncake's other process ended")
    store = client(job.folder, 0, 512 * MIB)
    total = job.payload * job.chunks
    source = np.random.default_rng(7).integers(0, 256, total, dtype=np.uint8)
    target = np.zeros_like(source)
    for buffer in (source, target):
        if store.register_buffer(buffer.ctypes.data, total):
            raise SystemExit("Mooncake did not take a buffer")
    sizes = [job.payload] * job.chunks

    def places(buffer: np.ndarray) -> list[int]:
        return [buffer.ctypes.data + nth * job.payload for nth in range(job.chunks)]

    def run(number: int) -> dict[str, float]:
        keys = [f"{number}-{nth}" for nth in range(job.chunks)]
        target.fill(0)
        start = time.perf_counter()
        stored = store.batch_put_from(keys, places(source), sizes)
        between = time.perf_counter()
        read = store.batch_get_into(keys, places(target), sizes)
        end = time.perf_counter()
        if any(stored) or read != sizes or not np.array_equal(source, target):
            raise SystemExit("gate: a chunk came back different")
        store.remove_all()  # What was just read stays for its lease; the segment has room for it.
        return {
            "store": total / (between - start) / 1e9,
            "retrieve": total / (end - between) / 1e9,
        }

    return run


if __name__ == "__main__":
    if sys.argv[1] == "--hold":
        hold(sys.argv[2])
    else:
        serve(tcp)
