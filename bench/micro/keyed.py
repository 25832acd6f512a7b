"""What a payload under a foreign key costs to put and to get, from DRAM, by its size.

Batches of equal payloads through ``KeyedCache``, waited for, against a bare copy of as many bytes
in the same run. The gate is that every byte comes back.

    python bench/micro/keyed.py [--smoke] [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier import Cache, CacheConfig, GroupKind, KeyedCache, KVGroup, KVLayout, Namespace, Tier
from kvtier.constants import KIB, MIB

NAMESPACE = Namespace("0" * 64, KVLayout((KVGroup(GroupKind.FULL, (0,), 1, 8, 8, "float32"),)))
BATCH_BYTES = 256 * MIB
BATCH_KEYS = 128
SIZES = (4 * KIB, 64 * KIB, MIB, 8 * MIB)


def timed_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(nbytes: int, count: int, rounds: int) -> dict[str, object]:
    """Put and get a batch of new keys in each round."""
    cache = Cache(CacheConfig(dram_bytes=2 * count * (nbytes + MIB) + 64 * MIB))
    keyed = KeyedCache(cache, NAMESPACE, "bench")
    sources = [np.random.default_rng(n).bytes(nbytes) for n in range(count)]
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
    figures: dict[str, object] = {"nbytes": nbytes, "keys": count}
    for name, seconds in spent.items():
        figures[f"{name}_us"] = spread([each / count * 1e6 for each in seconds])
        best = spread(seconds)["p50"] / count
        print(
            f"{nbytes:>9} bytes {name:>9}: {best * 1e6:8.1f} us a key, "
            f"{nbytes / best / 1e9:.2f} GB/s"
        )
    return figures


def _copy(sources: list[bytes], targets: list[bytearray]) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.smoke:
        measure(4 * KIB, 4, 2)
        return
    sizes = [
        measure(nbytes, min(BATCH_KEYS, BATCH_BYTES // nbytes), options.rounds) for nbytes in SIZES
    ]
    write_row("keyed", {"rounds": options.rounds, "sizes": sizes}, ["numpy"])


if __name__ == "__main__":
    main()
