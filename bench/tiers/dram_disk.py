"""DRAM and disk tiers against the physical limit, in the same run.

DRAM: chunks stored and loaded through ``Cache`` and ``CacheWorker``, against memcpy of as many
bytes. Disk: chunks written and read through the cache, against a bare O_DIRECT loop over files of
the same size from and into huge pages; the durable modes against the same loop with fdatasync.
The gate is that every byte comes back.

    python bench/tiers/dram_disk.py [--smoke] [--path DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# torch asks at its first allocation: pools in huge pages, like the tiers and the engine's own.
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier import (
    Blocks,
    Cache,
    CacheConfig,
    CacheWorker,
    DiskConfig,
    Durability,
    GroupKind,
    KVGroup,
    KVLayout,
    Namespace,
    Pending,
    Placement,
    Ready,
    Tier,
)
from kvtier.constants import MIB
from kvtier.testing.pools import Arrangement, TorchPool
from kvtier.types import Part

CHUNK = 256
BLOCK = 16


class Bench:
    """A pool, a layout and the loops that drive them."""

    def __init__(self, layers: int, chunks: int, path: str) -> None:
        self.group = KVGroup(GroupKind.FULL, tuple(range(layers)), 8, 128, 128, "bfloat16")
        self.namespace = Namespace("0" * 64, KVLayout((self.group,)))
        self.chunks = chunks
        blocks = chunks * CHUNK // BLOCK
        self.source = TorchPool([self.group], block_count=blocks, arrangement=Arrangement.STACKED)
        self.target = TorchPool([self.group], block_count=blocks, arrangement=Arrangement.STACKED)
        generator = torch.Generator().manual_seed(7)
        for layer in range(layers):
            for part in Part:
                view = self.source.layer_view(0, layer, part)
                view.copy_(torch.randn(view.shape, generator=generator))
        self.blocks = Blocks(0, (tuple(range(blocks)),), BLOCK)
        self.payload = layers * 2 * CHUNK * 8 * 128 * 2
        self.path = path

    @property
    def nbytes(self) -> int:
        return self.chunks * self.payload

    def open(self, durability: Durability) -> tuple[Cache, CacheWorker]:
        disk = DiskConfig(self.path, self.nbytes * 2 + 64 * MIB, durability)
        config = CacheConfig(dram_bytes=self.nbytes + 128 * MIB, disk=disk, load_deadline_s=60)
        cache = Cache(config)
        return cache, CacheWorker(Placement(), cache.arena)

    def store(self, cache: Cache, worker: CacheWorker, round_: int) -> float:
        worker.register_pool(self.source)
        sequence = cache.sequence(self.namespace)
        sequence.append([round_] * CHUNK * self.chunks)
        start = time.perf_counter()
        plan = cache.begin_store(sequence, range(self.chunks), self.blocks)
        assert plan is not None, "refused"
        worker.execute(plan)
        while not cache.store_done(plan.plan_id):
            cache.finish(worker.poll())
            time.sleep(0.0002)
        return time.perf_counter() - start

    def load(self, cache: Cache, worker: CacheWorker, round_: int, tier: Tier) -> float:
        worker.register_pool(self.target)
        sequence = cache.sequence(self.namespace)
        sequence.append([round_] * CHUNK * self.chunks)
        while isinstance(match := cache.match(sequence), Pending):
            time.sleep(0.001)
        assert isinstance(match, Ready)
        start = time.perf_counter()
        load = cache.begin_load(match, self.blocks)
        assert load is not None, "nothing to load"
        while load.outcome is None:
            for plan in load.poll():
                worker.execute(plan)
            cache.finish(worker.poll())
            time.sleep(0.0002)
        seconds = time.perf_counter() - start
        expected = self.chunks * CHUNK
        assert load.outcome.tokens_by_tier == {tier: expected}, load.outcome
        self.check()
        return seconds

    def check(self) -> None:
        for layer in range(len(self.group.layers)):
            for part in Part:
                ours, theirs = (p.layer_view(0, layer, part) for p in (self.source, self.target))
                if not torch.equal(ours.view(torch.int16), theirs.view(torch.int16)):
                    raise SystemExit(f"gate: layer {layer} came back different")
        self.target.poison()


def huge_buffer(nbytes: int) -> memoryview:
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapping)
    torch.frombuffer(view, dtype=torch.uint8).random_(0, 255)
    return view


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def memcpy_seconds(nbytes: int, step: int) -> float:
    """Copy as many bytes as the tier moves, from memory and to memory that no cache holds."""
    source, target = (torch.frombuffer(huge_buffer(nbytes), dtype=torch.uint8) for _ in range(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target.copy_(source)

    def work() -> None:
        for start in range(0, nbytes, step):
            target[start : start + step].copy_(source[start : start + step])

    seconds = timed(work)
    torch.set_num_threads(threads)
    return seconds


def raw_write(folder: Path, count: int, buffer: memoryview, *, sync: bool) -> float:
    folder.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        for i in range(count):
            flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
            descriptor = os.open(folder / f"{i}", flags)
            os.pwrite(descriptor, buffer, 0)
            if sync:
                os.fdatasync(descriptor)
            os.close(descriptor)

    return timed(work)


def raw_read(folder: Path, count: int, buffer: memoryview) -> float:
    def work() -> None:
        for i in range(count):
            descriptor = os.open(folder / f"{i}", os.O_RDONLY | os.O_DIRECT)
            os.preadv(descriptor, [buffer], 0)
            os.close(descriptor)

    return timed(work)


def drain(cache: Cache) -> None:
    while cache.stats().writes_queued:
        time.sleep(0.0005)


def run_round(bench: Bench, round_: int, durability: Durability) -> dict[str, float]:
    """Return speeds in GB/s of one round, every path once, limits beside them."""
    seconds: dict[str, float] = {}
    raw = Path(bench.path).parent / "raw"
    buffer = huge_buffer(bench.payload)
    sync = durability is not Durability.NONE
    cache, worker = bench.open(durability)
    while cache.stats().degraded:
        time.sleep(0.001)
    seconds["raw_write"] = raw_write(raw, bench.chunks, buffer, sync=sync)
    seconds["dram_store"] = bench.store(cache, worker, round_)
    seconds["disk_write"] = timed(lambda: drain(cache))
    seconds["memcpy"] = memcpy_seconds(bench.nbytes, bench.payload)
    seconds["dram_load"] = bench.load(cache, worker, round_, Tier.DRAM)
    worker.close()
    cache.close()
    seconds["raw_read"] = raw_read(raw, bench.chunks, buffer)
    cache, worker = bench.open(durability)
    seconds["disk_read"] = bench.load(cache, worker, round_, Tier.DISK)
    worker.close()
    cache.close()
    shutil.rmtree(bench.path)
    shutil.rmtree(raw)
    return {name: bench.nbytes / value / 1e9 for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--path", default=None, help="directory on the disk to measure (/tmp)")
    parser.add_argument("--rounds", type=int, default=9, help="of each durability (9)")
    options = parser.parse_args()
    layers, chunks, rounds = (2, 2, 1) if options.smoke else (32, 8, options.rounds)
    limits = {
        "dram_store": "memcpy",
        "dram_load": "memcpy",
        "disk_write": "raw_write",
        "disk_read": "raw_read",
    }
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        bench = Bench(layers, chunks, f"{folder}/tier")
        for durability in Durability:
            if not options.smoke:
                run_round(bench, 0, durability)
            speeds = [run_round(bench, i, durability) for i in range(rounds)]
            print(f"\ndurability {durability}: {chunks} chunks of {bench.payload / 1e6:.1f} MB")
            figures: dict[str, object] = {"durability": durability, "chunk_bytes": bench.payload}
            for name, limit in limits.items():
                ratio = spread([speed[name] / speed[limit] for speed in speeds])
                ours, theirs = (spread([speed[n] for speed in speeds]) for n in (name, limit))
                figures[name] = {"ratio": ratio, "gb_per_s": ours, limit: theirs}
                print(
                    f"  {name:<10} {ours['p50']:5.2f} GB/s, {limit} {theirs['p50']:5.2f}: ratio "
                    f"p20 {ratio['p20']:.2f}  p50 {ratio['p50']:.2f}  p80 {ratio['p80']:.2f}"
                )
            if not options.smoke:
                write_row("dram_disk", figures, ["kvtier", "torch"])


if __name__ == "__main__":
    main()
