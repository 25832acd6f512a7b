"""Does O_DIRECT into a shared arena of 4 KiB pages gain by a detour over huge pages?

Writes and reads a 32 MiB file from and into anonymous huge pages, a memfd, and a memfd through
``BouncedFiles``, in turns. The gate is that every byte comes back.

    python bench/tiers/bounce.py [--smoke] [--path DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier.constants import MIB
from kvtier.tiers.disk.bounce import BouncedFiles
from kvtier.tiers.disk.files import FileSystem, LocalFiles
from kvtier.tiers.memory import Memory


def one_round(files: FileSystem, memory: memoryview, path: str, data: bytes) -> tuple[float, float]:
    """Return GB/s of a write and a read."""
    memory[:] = data
    start = time.perf_counter()
    files.create(path, memory)
    written = time.perf_counter()
    memory[:] = bytes(len(memory))
    begun = time.perf_counter()
    files.read(path, 0, memory)
    done = time.perf_counter()
    if memory != data:
        raise SystemExit("gate: other bytes came back")
    files.remove(path)
    return len(data) / (written - start) / 1e9, len(data) / (done - begun) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--path", default=None, help="directory on the disk to measure (/tmp)")
    parser.add_argument("--rounds", type=int, default=15, help="of each way (15)")
    options = parser.parse_args()
    nbytes, rounds = (2 * MIB, 1) if options.smoke else (32 * MIB, options.rounds)
    data = random.Random(7).randbytes(nbytes)
    local = LocalFiles()
    bounced = BouncedFiles(local, count=1)
    huge, shared = Memory(nbytes), Memory(nbytes, shared=True)
    ways: dict[str, tuple[FileSystem, Memory]] = {
        "huge": (local, huge),
        "memfd": (local, shared),
        "memfd_bounced": (bounced, shared),
    }
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        for number in range(rounds):
            for name, (files, memory) in ways.items():
                path = f"{folder}/{name}{number}"
                speeds[name].append(one_round(files, memory.view, path, data))
    figures: dict[str, object] = {"nbytes": nbytes, "huge": [huge.huge, shared.huge]}
    for name, pairs in speeds.items():
        write, read = (spread([pair[i] for pair in pairs]) for i in range(2))
        figures[name] = {"write_gb_per_s": write, "read_gb_per_s": read}
        print(f"{name:<14} write {write['p50']:5.2f} GB/s   read {read['p50']:5.2f} GB/s")
    if not options.smoke:
        write_row("bounce", figures, ["kvtier", "numpy"])
    bounced.close()
    huge.close()
    shared.close()


if __name__ == "__main__":
    main()
