"""What a payload under a foreign key costs to put and to get, from DRAM and from disk, by its size.

Batches of equal payloads through ``KeyedCache``, waited for. Beside DRAM, in the same round: a bare
copy of as many bytes. Beside the disk: bare O_DIRECT reads of the same kind of files by as many
threads, into huge pages; DRAM is too small for what is read in turn. The gate is that every byte
comes back, and from that tier.

    python bench/micro/keyed.py [--smoke] [--rounds N] [--path DIR]
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from bench.tiers.limits import huge_buffer
from kvtier import Cache, CacheConfig, DiskConfig, KeyedCache, Namespace, Tier
from kvtier.codecs.opaque import opaque_layout
from kvtier.constants import IO_THREADS_DEFAULT, KIB, MIB
from kvtier.testing.engine_double import wait_until

NAMESPACE = Namespace("0" * 64, opaque_layout(1))
BATCH_BYTES = 256 * MIB
BATCH_KEYS = 128
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB)
DISK_SIZES = (256 * KIB, MIB, 4 * MIB)
#: Batches on disk, of which DRAM holds not even two.
DISK_BATCHES = 3
DISK_BATCH_BYTES = 96 * MIB


def timed_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def payloads(nbytes: int, count: int) -> list[bytes]:
    return [np.random.default_rng(n).bytes(nbytes) for n in range(count)]


def from_dram(nbytes: int, count: int, rounds: int) -> dict[str, object]:
    """Put and get a batch of new keys in each round."""
    cache = Cache(CacheConfig(dram_bytes=2 * count * (nbytes + MIB) + 64 * MIB))
    keyed = KeyedCache(cache, NAMESPACE, "bench")
    sources = payloads(nbytes, count)
    into = [bytearray(nbytes) for _ in sources]
    spent: dict[str, list[float]] = {"put": [], "get": [], "contains": [], "copy": []}
    for number in range(rounds):
        keys = [b"%d %d" % (number, n) for n in range(count)]
        items = list(zip(keys, sources, strict=True))
        spent["put"].append(timed_s(lambda items=items: keyed.put(items).wait()))  # type: ignore[misc]
        spent["get"].append(timed_s(lambda keys=keys: keyed.get(keys, into).wait()))  # type: ignore[misc]
        spent["contains"].append(timed_s(lambda keys=keys: keyed.contains(keys)))  # type: ignore[misc]
        if into != sources or keyed.get(keys, into).wait() != [Tier.DRAM] * count:
            raise SystemExit("gate: not every byte comes back")
        spent["copy"].append(timed_s(lambda: _copy(sources, into)))
        keyed.delete(keys)
    keyed.close()
    cache.close()
    return told("DRAM", nbytes, count, spent)


def from_disk(nbytes: int, count: int, rounds: int, folder: Path) -> dict[str, object]:
    """Get batches in turn, each long gone from DRAM."""
    dram_bytes = count * (nbytes + 8 * KIB) * 3 // 2
    cache = Cache(CacheConfig(dram_bytes, DiskConfig(str(folder)), slab_bytes=4 * KIB))
    keyed = KeyedCache(cache, NAMESPACE, "bench")
    sources = payloads(nbytes, count)
    into = [bytearray(nbytes) for _ in sources]
    batches = [[b"%d %d" % (b, n) for n in range(count)] for b in range(DISK_BATCHES)]
    for keys in batches:
        wait_until(lambda: cache.stats().writes_queued == 0, "writes do not end")
        keyed.put(list(zip(keys, sources, strict=True))).wait()
    wait_until(lambda: cache.stats().writes_queued == 0, "writes do not end")
    files = sorted(map(str, folder.rglob("*.kvs")))
    room = huge_buffer(count * Path(files[0]).stat().st_size)
    spent: dict[str, list[float]] = {"get": [], "read": []}
    turns = itertools.cycle(range(DISK_BATCHES))
    for turn in itertools.islice(turns, rounds):
        start = time.perf_counter()
        outcomes = keyed.get(batches[turn], into).wait()
        spent["get"].append(time.perf_counter() - start)
        if into != sources or outcomes != [Tier.DISK] * count:
            raise SystemExit("gate: not every byte comes back from disk")
        some = files[turn * count : (turn + 1) * count]
        spent["read"].append(timed_s(lambda some=some: _read(some, room)))  # type: ignore[misc]
    keyed.close()
    cache.close()
    return told("disk", nbytes, count, spent)


def told(tier: str, nbytes: int, count: int, spent: dict[str, list[float]]) -> dict[str, object]:
    """Print and return microseconds a key, and how far a get is from what bounds it."""
    figures: dict[str, object] = {"tier": tier, "nbytes": nbytes, "keys": count}
    for name, seconds in spent.items():
        figures[f"{name}_us"] = spread([each / count * 1e6 for each in seconds])
        best = spread(seconds)["p50"] / count
        print(
            f"{tier} {nbytes:>9} bytes {name:>9}: {best * 1e6:8.1f} us a key, "
            f"{nbytes / best / 1e9:.2f} GB/s"
        )
    bound = spent.get("copy") or spent["read"]
    figures["share_of_bound"] = spread([b / g for b, g in zip(bound, spent["get"], strict=True)])
    return figures


def _copy(sources: list[bytes], targets: list[bytearray]) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _read(paths: list[str], room: memoryview) -> None:
    nbytes = len(room) // len(paths)

    def read(index: int) -> None:
        descriptor = os.open(paths[index], os.O_RDONLY | os.O_DIRECT)
        os.preadv(descriptor, [room[index * nbytes : (index + 1) * nbytes]], 0)
        os.close(descriptor)

    with ThreadPoolExecutor(IO_THREADS_DEFAULT) as pool:
        list(pool.map(read, range(len(paths))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--path", type=Path, help="where the disk is; a temporary folder")
    options = parser.parse_args()
    sizes = (4 * KIB,) if options.smoke else SIZES
    disk_sizes = (64 * KIB,) if options.smoke else DISK_SIZES
    rounds = 3 if options.smoke else options.rounds
    rows = []
    for nbytes in sizes:
        count = 4 if options.smoke else min(BATCH_KEYS, BATCH_BYTES // nbytes)
        rows.append(from_dram(nbytes, count, rounds))
    for nbytes in disk_sizes:
        folder = Path(tempfile.mkdtemp(dir=options.path))
        count = 4 if options.smoke else min(BATCH_KEYS, DISK_BATCH_BYTES // nbytes)
        try:
            rows.append(from_disk(nbytes, count, rounds, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if not options.smoke:
        write_row("keyed", {"rounds": rounds, "sizes": rows}, ["numpy"])


if __name__ == "__main__":
    main()
