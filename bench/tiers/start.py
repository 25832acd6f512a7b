"""What a disk tier's index costs at a start: seconds and memory per chunk.

A journal of N rows (namespaces, chains of 1 to 64 chunks, a log of changes behind the snapshot) is
loaded by a fresh process and made into a cold table. Beside it, in the same process, stands the
physical limit: the snapshot's bytes read by numpy. The gate is that every row comes back.

    python bench/tiers/start.py [--smoke] [--chunks N] [--path DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier.tiers.disk.cold import ColdTable
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.journal import Changes, Journal
from kvtier.tiers.disk.rows import NO_PARENT, ROW_DTYPE, Kind, Rows
from kvtier.types import ChunkKey, ShardId

NAMESPACES = 16
CHAIN_MAX = 64
#: Share of the rows that the log has used since the snapshot.
USED_SHARE = 0.1
BATCH = 512


def make_rows(count: int) -> Rows:
    """Return chains of random length, each used from its end to its start."""
    generator = np.random.default_rng(7)
    kinds = [
        Kind(bytes([i]) * 32, "raw", tuple((ShardId(g, 0, 0), 16 << 20) for g in range(2)))
        for i in range(NAMESPACES)
    ]
    array = np.zeros(count, ROW_DTYPE)
    array["key"] = np.frombuffer(generator.bytes(32 * count), "V32")
    lengths = generator.integers(1, CHAIN_MAX + 1, count)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    starts = starts[starts < count]
    ends = np.append(starts[1:], count)
    array["parent"][:-1] = array["key"][1:]
    array["parent"][ends - 1] = np.frombuffer(NO_PARENT, "V32")[0]
    chain = np.repeat(np.arange(len(starts)), ends - starts)
    array["position"] = ends[chain] - 1 - np.arange(count)
    array["kind"] = chain % NAMESPACES
    array["generation"] = np.arange(count) * 2
    array["used_ms"] = 1_700_000_000_000 + chain
    array["nbytes"] = kinds[0].nbytes
    return Rows(array, kinds)


def make_journal(root: str, rows: Rows) -> None:
    journal = Journal(root, LocalFiles())
    journal.start(rows)
    used = random.Random(7).sample(range(len(rows)), int(len(rows) * USED_SHARE))
    for first in range(0, len(used), BATCH):
        keys = tuple(ChunkKey(rows.array["key"][row].item()) for row in used[first : first + BATCH])
        journal.append(Changes(used=keys, used_ms=1_800_000_000_000 + first))
    journal.sync()


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


class Ticker:
    """How long another thread had to wait for the interpreter at most."""

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self.longest_s = 0.0
        self._thread = threading.Thread(target=self._tick)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _tick(self) -> None:
        times = [time.perf_counter()]
        while not self._stop.wait(0.001):
            times.append(time.perf_counter())
        self.longest_s = max((b - a for a, b in pairwise(times)), default=0.0)


def read_seconds(path: Path) -> float:
    """Read a file that no cache holds."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        np.fromfile(file, np.uint8)
        return time.perf_counter() - start


def measure(root: str) -> None:
    """Load in this fresh process and print the figures."""
    before = resident_bytes()
    with Ticker() as ticker:
        start, cpu = time.perf_counter(), time.thread_time()
        rows = Journal(root, LocalFiles()).load()
        loaded = time.perf_counter()
        assert rows is not None, "gate: the index does not come back"
        table = ColdTable([(0, rows)], lambda _: False)
        done, cpu = time.perf_counter(), time.thread_time() - cpu
    held = resident_bytes() - before
    asked = [ChunkKey(rows.array["key"][row].item()) for row in range(0, len(rows), 97)]
    asking = time.perf_counter()
    for key in asked:
        if table.kind(key) is None:
            raise SystemExit("gate: a row is not found")
    answered = time.perf_counter()
    popped = min(len(table), 10_000)
    for _ in range(popped):
        table.pop_coldest()
    left = time.perf_counter()
    limit = read_seconds(Path(root, "index", "snapshot"))
    digest = int(rows.array["generation"].sum()) + len(rows)
    figures = {
        "load_s": loaded - start,
        "table_s": done - loaded,
        "cpu_s": cpu,
        "limit_s": limit,
        "ratio": limit / (done - start),
        "bytes_per_chunk": held / len(rows),
        "longest_stall_s": ticker.longest_s,
        "find_us": (answered - asking) / len(asked) * 1e6,
        "pop_us": (left - answered) / popped * 1e6,
        "digest": digest,
    }
    print(json.dumps(figures))


def run(count: int, rounds: int, path: str | None) -> dict[str, dict[str, float]]:
    rows = make_rows(count)
    expected = int(rows.array["generation"].sum()) + count
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=path) as root:
        make_journal(root, rows)
        command = [sys.executable, __file__, "--measure", root]
        for _ in range(rounds):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            figures = json.loads(done.stdout)
            if figures.pop("digest") != expected:
                raise SystemExit("gate: other rows came back")
            found.append(figures)
    return {name: spread([figures[name] for figures in found]) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--chunks", type=int, default=0, help="one size (1e4, 1e5 and 1e6)")
    parser.add_argument("--path", default=None, help="directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5, help="of each size (5)")
    parser.add_argument("--measure", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    sizes = [options.chunks] if options.chunks else [10_000, 100_000, 1_000_000]
    for count in [1000] if options.smoke else sizes:
        spreads = run(count, 1 if options.smoke else options.rounds, options.path)
        mid = {name: values["p50"] for name, values in spreads.items()}
        print(
            f"{count:>9} chunks: load {mid['load_s']:.3f} s + table {mid['table_s']:.3f} s "
            f"({mid['cpu_s']:.3f} s of one core), "
            f"reading alone {mid['limit_s']:.3f} s (ratio {mid['ratio']:.2f}); "
            f"{mid['bytes_per_chunk']:.0f} bytes per chunk, stall {mid['longest_stall_s']:.3f} s, "
            f"find {mid['find_us']:.2f} us, pop {mid['pop_us']:.2f} us"
        )
        if not options.smoke:
            write_row("start", {"chunks": count, **spreads}, ["kvtier", "numpy"])


if __name__ == "__main__":
    main()
