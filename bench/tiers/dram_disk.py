"""DRAM and disk tiers against the physical limit and against peers, in the same run.

DRAM: chunks stored and loaded through ``Cache`` and ``CacheWorker``, without a disk, against
memcpy of as many bytes right before; the engine's pool in one allocation (``stacked``), in one per
layer (``per_layer``), and with blocks in no order (``scattered``). Disk: chunks written and read
through the cache, against bare O_DIRECT loops over files of the same size with as many threads;
the durable modes against the same loop with fdatasync. Peers run in environments of their own
(``peers/venvs.py``), a round of theirs after each of ours. The gate is that every byte comes back.

    python bench/tiers/dram_disk.py [--smoke] [--path DIR] [--rounds N] [--peers]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# torch asks at its first allocation: pools in huge pages, like the tiers and the engine's own.
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from bench.tiers.limits import Limits, timed
from bench.tiers.peers import venvs
from bench.tiers.peers.lockstep import Job, Peer
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
from kvtier.constants import IO_THREADS_DEFAULT, MIB
from kvtier.testing.pools import Arrangement, TorchPool
from kvtier.types import Part

CHUNK = 256
BLOCK = 16
POLL_S = 0.0002


@dataclass(frozen=True)
class Shape:
    """The KV of a model, and how many chunks of it a round moves."""

    name: str
    layers: int
    heads: int
    dim: int
    chunks: int

    @property
    def payload(self) -> int:
        return self.layers * 2 * CHUNK * self.heads * self.dim * 2

    @property
    def nbytes(self) -> int:
        return self.payload * self.chunks


SHAPES = (Shape("32 MiB (8B)", 32, 8, 128, 24), Shape("6 MiB (135M)", 30, 3, 64, 96))
SMOKE = (Shape("tiny", 2, 2, 64, 2),)

# Of each variant: the pool's layout and whether its blocks are used in order.
VARIANTS = {
    "stacked": (Arrangement.STACKED, True),
    "per_layer": (Arrangement.HEAD_MAJOR, True),
    "scattered": (Arrangement.STACKED, False),
}

# A peer's path and which of our speeds its store and retrieval compare with.
PEERS = {
    "lmcache local_cpu": ("dram_store stacked", "dram_load stacked"),
    "lmcache local_disk": ("disk_write", "disk_read"),
    "lmcache fs_native": ("disk_write", "disk_read"),
    "vllm cpu": ("dram_store stacked", "dram_load stacked"),
    "vllm fs": ("disk_write", "disk_read"),
}


class Traffic:
    """Two pools of an engine and what stores from the one and loads into the other."""

    def __init__(self, shape: Shape, arrangement: Arrangement, *, in_order: bool) -> None:
        self.shape = shape
        layers = tuple(range(shape.layers))
        group = KVGroup(GroupKind.FULL, layers, shape.heads, shape.dim, shape.dim, "bfloat16")
        self.namespace = Namespace("0" * 64, KVLayout((group,)))
        count = shape.chunks * CHUNK // BLOCK
        ids = list(range(count))
        if not in_order:
            random.Random(7).shuffle(ids)
        self.blocks = Blocks(0, (tuple(ids),), BLOCK)
        self.source, self.target = (
            TorchPool([group], block_count=count, arrangement=arrangement) for _ in range(2)
        )
        self.source.fill_values(7)

    def store(self, cache: Cache, worker: CacheWorker, round_: int) -> float:
        worker.register_pool(self.source)
        sequence = cache.sequence(self.namespace)
        sequence.append([round_] * CHUNK * self.shape.chunks)
        start = time.perf_counter()
        plan = cache.begin_store(sequence, range(self.shape.chunks), self.blocks)
        assert plan is not None, "refused"
        worker.execute(plan)
        while not cache.store_done(plan.plan_id):
            cache.finish(worker.poll())
            time.sleep(POLL_S)
        return time.perf_counter() - start

    def load(self, cache: Cache, worker: CacheWorker, round_: int, tier: Tier) -> float:
        self.target.poison()
        worker.register_pool(self.target)
        sequence = cache.sequence(self.namespace)
        sequence.append([round_] * CHUNK * self.shape.chunks)
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
            time.sleep(POLL_S)
        seconds = time.perf_counter() - start
        expected = self.shape.chunks * CHUNK
        assert load.outcome.tokens_by_tier == {tier: expected}, load.outcome
        self.check()
        return seconds

    def check(self) -> None:
        for layer in range(self.shape.layers):
            for part in Part:
                ours, theirs = (p.layer_view(0, layer, part) for p in (self.source, self.target))
                if not torch.equal(ours.view(torch.int16), theirs.view(torch.int16)):
                    raise SystemExit(f"gate: layer {layer} came back different")


class Bench:
    """One shape: every path of ours once in a round, each beside its limit."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.path = folder / "tier"
        self.limits = Limits(shape.payload, shape.chunks, folder / "raw")
        self.traffic = {
            name: Traffic(shape, arrangement, in_order=in_order)
            for name, (arrangement, in_order) in VARIANTS.items()
        }
        # One cache for all rounds: an arena's first writes are slower, and it is long-lived.
        self.dram = self._open(None)

    def dram_round(self, round_: int) -> dict[str, float]:
        """Seconds by path, and under ``limit PATH`` those of its limit."""
        seconds: dict[str, float] = {}
        cache, worker = self.dram
        for number, (name, traffic) in enumerate(self.traffic.items()):
            key = round_ * len(VARIANTS) + number
            seconds[f"limit dram_store {name}"] = self.limits.memcpy()
            seconds[f"dram_store {name}"] = traffic.store(cache, worker, key)
            seconds[f"limit dram_load {name}"] = self.limits.memcpy()
            seconds[f"dram_load {name}"] = traffic.load(cache, worker, key, Tier.DRAM)
        return seconds

    def close(self) -> None:
        cache, worker = self.dram
        worker.close()
        cache.close()

    def disk_round(self, round_: int, durability: Durability) -> dict[str, float]:
        """As ``dram_round``, of the disk."""
        seconds: dict[str, float] = {}
        traffic = self.traffic["stacked"]
        cache, worker = self._open(durability)
        sync = durability is not Durability.NONE
        # One thread writes to a directory, as the cache's does.
        seconds["limit disk_write"] = self.limits.write(threads=1, sync=sync)
        traffic.store(cache, worker, round_)
        seconds["disk_write"] = timed(lambda: drain(cache))
        worker.close()
        cache.close()
        seconds["limit disk_read"] = self.limits.read(threads=IO_THREADS_DEFAULT)
        cache, worker = self._open(durability)
        seconds["disk_read"] = traffic.load(cache, worker, round_, Tier.DISK)
        worker.close()
        cache.close()
        shutil.rmtree(self.path)
        shutil.rmtree(self.limits.folder)
        return seconds

    def speeds(self, seconds: dict[str, float]) -> dict[str, float]:
        return {name: self.shape.nbytes / value / 1e9 for name, value in seconds.items()}

    def _open(self, durability: Durability | None) -> tuple[Cache, CacheWorker]:
        rounds = len(VARIANTS) if durability is None else 1
        disk = None
        if durability is not None:
            disk = DiskConfig(str(self.path), self.shape.nbytes * 2 + 64 * MIB, durability)
        dram_bytes = self.shape.nbytes * rounds + 256 * MIB
        cache = Cache(CacheConfig(dram_bytes=dram_bytes, disk=disk, load_deadline_s=60))
        while cache.stats().degraded:
            time.sleep(0.001)
        return cache, CacheWorker(Placement(), cache.arena)


def drain(cache: Cache) -> None:
    while cache.stats().writes_queued:
        time.sleep(0.0005)


def start_peers(shape: Shape, folder: Path) -> dict[str, Peer]:
    peers: dict[str, Peer] = {}
    for name in PEERS:
        package, section = name.split()
        place = folder / name.replace(" ", "_")
        place.mkdir()
        job = Job(section, shape.layers, shape.heads, shape.dim, CHUNK, shape.chunks, str(place))
        log = venvs.FOLDER / f"{package}.log"
        peers[name] = Peer(venvs.python(package), f"{package}_paths.py", job, log)
    return peers


def report(title: str, rounds: list[dict[str, float]]) -> dict[str, object]:
    """Print each path beside what it is compared with, and return the figures."""
    print(f"\n{title}, load {os.getloadavg()[0]:.1f}")
    figures: dict[str, object] = {}
    pairs = [(name, f"limit {name}") for name in rounds[0] if f"limit {name}" in rounds[0]]
    for peer, ours in PEERS.items():
        theirs = (f"{peer} store", f"{peer} retrieve")
        pairs += [pair for pair in zip(ours, theirs, strict=True) if pair[1] in rounds[0]]
    for name, other in pairs:
        ratio = spread([speeds[name] / speeds[other] for speeds in rounds])
        ours_, theirs_ = (spread([speeds[n] for speeds in rounds]) for n in (name, other))
        label = "limit" if other.startswith("limit") else other
        figures[f"{name} / {label}"] = {"ratio": ratio, "gb_per_s": ours_, "other": theirs_}
        print(
            f"  {name:<20} {ours_['p50']:5.2f} GB/s, {label:<27} {theirs_['p50']:5.2f}: ratio "
            f"p20 {ratio['p20']:.2f}  p50 {ratio['p50']:.2f}  p80 {ratio['p80']:.2f}"
        )
    return figures


def measure(shape: Shape, folder: Path, options: argparse.Namespace, count: int) -> None:
    bench = Bench(shape, folder)
    peers = start_peers(shape, folder) if options.peers else {}
    for durability in Durability:
        first = durability is Durability.NONE
        rounds: list[dict[str, float]] = []
        # Until all of the arena has been written once.
        warm_up = 0 if options.smoke else 2
        for number in range(count + warm_up):
            seconds = bench.dram_round(number) if first else {}
            speeds = bench.speeds(seconds | bench.disk_round(number, durability))
            for name, peer in peers.items() if first else ():
                answer = peer.round(number)
                speeds |= {f"{name} {path}": value for path, value in answer.items()}
            rounds.append(speeds)
        rounds = rounds[-count:]
        title = f"{shape.name} x {shape.chunks}, durability {durability}"
        figures = report(title, rounds)
        if not options.smoke:
            head = {"shape": shape.name, "chunk_bytes": shape.payload, "durability": durability}
            write_row("dram_disk", {**head, **figures}, ["kvtier", "torch"])
    bench.close()
    for peer in peers.values():
        peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--path", default=None, help="directory on the disk to measure (/tmp)")
    parser.add_argument("--rounds", type=int, default=9, help="of each shape and durability (9)")
    parser.add_argument("--peers", action="store_true", help="LMCache and vLLM beside ours")
    options = parser.parse_args()
    for shape in SMOKE if options.smoke else SHAPES:
        with tempfile.TemporaryDirectory(dir=options.path) as folder:
            measure(shape, Path(folder), options, 1 if options.smoke else options.rounds)


if __name__ == "__main__":
    main()
