"""What does it spare an engine to unpack from the daemon's memory, without a copy of its own?

Chunks of Llama-3.1-8B's shape, half of its layers, lie in a ``kvtier daemon`` on this host, and are
loaded into a pool in the host's memory, in turns: read where they lie (``lent``), copied into a
staging area first (``copied``), both without a DRAM tier; copied into an engine's DRAM tier that
had nothing of them (``tier``); and from that tier, once they are there (``held``). Each load
verifies what it gets, but the last. Beside the speed stands what both processes take of a core for
each GB. The gate is that every byte comes back, and that nothing is copied where nothing is to be.

    python bench/tiers/without_dram.py [--smoke] [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib import cache_drive
from bench.lib.report import spread, write_row
from bench.tiers.daemon import spent_s, start_daemon
from kvtier.cache.cache import Cache
from kvtier.cache.sequence import Sequence
from kvtier.cache.worker import CacheWorker
from kvtier.config import CacheConfig, RemoteConfig
from kvtier.constants import GIB, MIB
from kvtier.testing.engine_double import wait_until
from kvtier.testing.pools import Arrangement, TorchPool
from kvtier.types import Blocks, GroupKind, KVGroup, KVLayout, Namespace, Part, Placement, Tier

BLOCK: Final = 16
CHUNK: Final = 256
LAYERS: Final = 16
TOKEN_BYTES: Final = LAYERS * 2 * 8 * 128 * 2
Figures = dict[str, float]


class Host:
    """An engine's cache over the daemon, with a worker of its own. The pools are the caller's."""

    def __init__(self, url: str, layout: KVLayout, tokens: int, dram_bytes: int) -> None:
        remote = RemoteConfig(url, deadline_s=60.0)
        self.cache = Cache(
            CacheConfig(dram_bytes, remotes=(remote,), slab_bytes=16 * MIB, load_deadline_s=60.0)
        )
        self.worker = CacheWorker(
            Placement(), self.cache.arena, codecs=self.cache.codecs, window=self.cache.window
        )
        self.tokens = tokens
        self._namespace = Namespace("weights", layout)
        self._blocks = Blocks(0, (tuple(range(tokens // BLOCK)),), BLOCK)
        wait_until(lambda: not self.cache.stats().degraded, "the remote")

    def _sequence(self) -> Sequence:
        sequence = self.cache.sequence(self._namespace)
        sequence.append(range(self.tokens))
        return sequence

    def store(self, pool: TorchPool) -> None:
        self.worker.register_pool(pool)
        chunks = range(self.tokens // CHUNK)
        cache_drive.store(self.cache, self.worker, self._sequence(), chunks, self._blocks)

    def load(self) -> None:
        came = cache_drive.load(self.cache, self.worker, self._sequence(), self._blocks)
        if came != self.tokens:
            raise SystemExit(f"gate: a short load of {came} tokens")

    def lent_share(self) -> float:
        tiers = self.cache.stats().tiers
        counters = next(tier.counters for tier in tiers if tier.tier is Tier.REMOTE)
        return counters.lent_bytes / counters.read_bytes

    def close(self) -> None:
        self.worker.close()
        self.cache.close()


def compared(pool: TorchPool, target: TorchPool, layers: int) -> None:
    for layer in range(layers):
        for part in Part:
            ours, theirs = (each.layer_view(0, layer, part) for each in (pool, target))
            if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
                raise SystemExit("gate: other bytes came back")


def filled(groups: list[KVGroup], tokens: int) -> TorchPool:
    """A pool of noise that is the same in every run."""
    pool = TorchPool(groups, block_count=tokens // BLOCK, arrangement=Arrangement.STACKED)
    draws = torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        for part in Part:
            view = pool.layer_view(0, layer, part)
            view.copy_(torch.randn(view.shape, generator=draws))
    return pool


def measured(host: Host, pools: tuple[TorchPool, TorchPool], way: str, other: int) -> Figures:
    """Load once in a way; return GB/s and the seconds of a core for each GB, of both sides."""
    pool, target = pools
    target.poison()
    host.worker.register_pool(target)
    if way == "copied":  # As a worker says whose pool is on a GPU.
        host.cache.window.open(0, reads=False)
    gigabytes = host.tokens * TOKEN_BYTES / 1e9
    before_s, began_s = time.process_time() + spent_s(other), time.perf_counter()
    host.load()
    seconds = time.perf_counter() - began_s
    spent = time.process_time() + spent_s(other) - before_s
    compared(pool, target, LAYERS)
    return {"gb_per_s": gigabytes / seconds, "core_s_per_gb": spent / gigabytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small and quick; writes no row")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds, chunks = (1, 2) if options.smoke else (options.rounds, 12)
    group = KVGroup(GroupKind.FULL, tuple(range(LAYERS)), 8, k_dim=128, v_dim=128, dtype="bfloat16")
    layout = KVLayout((group,), chunk_tokens=CHUNK)
    pools = filled([group], chunks * CHUNK), filled([group], chunks * CHUNK)
    figures: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        process_id, (_, url) = start_daemon(stack, folder)
        # More at once than a staging area takes.
        writer = Host(url, layout, chunks * CHUNK, GIB // 2)
        writer.store(pools[0])
        writer.close()
        bare = {way: Host(url, layout, chunks * CHUNK, 0) for way in ("lent", "copied")}
        for host in bare.values():
            stack.callback(host.close)
        for turn in range(rounds + 1):
            fresh = Host(url, layout, chunks * CHUNK, GIB // 2)
            # What a tier has got once it holds.
            for way, host in (*bare.items(), ("tier", fresh), ("held", fresh)):
                found = measured(host, pools, way, process_id)
                if turn:  # The first one warms the pages.
                    for name, value in found.items():
                        figures.setdefault(f"{way}_{name}", []).append(value)
            fresh.close()
        shares = {way: host.lent_share() for way, host in bare.items()}
        if shares != {"lent": 1.0, "copied": 0.0}:
            raise SystemExit(f"gate: of what was read there was lent {shares}")
    for name, values in figures.items():
        print(f"{name} {spread(values)['p50']:.3f}")
    if not options.smoke:
        write_row("without_dram", {name: spread(values) for name, values in figures.items()})


if __name__ == "__main__":
    main()
