"""What the byte codec zstd brings on the way to a remote: bytes saved, and time at a link's rate.

The KV of SmolLM2-135M over English prose (float32, as the CPU engine has it, and rounded to
bfloat16) is stored by one cache and loaded by another one, which has the remote alone: a folder
behind a link of given rate, in turns without and with the codec. The gate is that the pool gets
every byte back, and that no load fell short.

    python bench/tiers/remote_codec.py [--smoke] [--rounds N] [--tokens N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib import cache_drive
from bench.lib.report import spread, write_row
from bench.micro.zstd import BLOCK, computed, made_up
from kvtier import Cache, CacheConfig, CacheWorker, RemoteConfig
from kvtier.constants import GIB, MIB
from kvtier.registry import connect
from kvtier.testing.engine_double import wait_until
from kvtier.testing.pools import Arrangement, TorchPool
from kvtier.types import Blocks, KVLayout, Namespace, Part, Placement, Tier
from kvtier_connectors.decorators.throttled import Throttled

CODECS = (None, "zstd")
RATES_MB_PER_S = (100, 1000)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One kind of KV in a pool, and a pool of the same form to load into."""

    layout: KVLayout
    tokens: int
    pool: TorchPool
    target: TorchPool

    @property
    def views(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        layers = self.layout.groups[0].layers
        places = [(layer, part) for layer in range(len(layers)) for part in Part]
        return [(self.pool.layer_view(0, *p), self.target.layer_view(0, *p)) for p in places]


def cases(tokens: int, *, smoke: bool) -> dict[str, Case]:
    pool, layout = made_up() if smoke else computed(tokens)
    found = {}
    for dtype in DTYPES:
        group = replace(layout.groups[0], dtype=dtype)
        pools = [
            TorchPool([group], block_count=tokens // BLOCK, arrangement=Arrangement.STACKED)
            for _ in range(2)
        ]
        for layer in range(len(group.layers)):
            for part in Part:
                pools[0].layer_view(0, layer, part).copy_(pool.layer_view(0, layer, part))
        found[dtype] = Case(replace(layout, groups=(group,)), tokens, *pools)
    return found


class Host:
    """A cache over DRAM and one remote, and its worker."""

    def __init__(self, case: Case, folder: str, byte_codec: str | None, mb_per_s: int) -> None:
        remote = RemoteConfig(f"file://{folder}", byte_codec=byte_codec, deadline_s=60.0)
        config = CacheConfig(GIB // 2, None, (remote,), slab_bytes=16 * MIB, load_deadline_s=60.0)
        self.cache = Cache(
            config, connect=lambda url: Throttled(connect(url), bytes_per_s=mb_per_s * 1e6)
        )
        self.worker = CacheWorker(Placement(), self.cache.arena)
        self.sequence = self.cache.sequence(Namespace("weights", case.layout))
        self.sequence.append(range(case.tokens))
        self.blocks = Blocks(0, (tuple(range(case.tokens // BLOCK)),), BLOCK)
        wait_until(lambda: not self.cache.stats().degraded, "the remote")

    def store(self, case: Case) -> None:
        self.worker.register_pool(case.pool)
        chunks = range(case.tokens // case.layout.chunk_tokens)
        cache_drive.store(self.cache, self.worker, self.sequence, chunks, self.blocks)

    def load(self, case: Case) -> None:
        self.worker.register_pool(case.target)
        came = cache_drive.load(self.cache, self.worker, self.sequence, self.blocks)
        assert came == case.tokens, f"short: {came}"

    def remote_bytes(self) -> tuple[int, int]:
        """Bytes written to the remote and read from there."""
        tiers = self.cache.stats().tiers
        counters = next(tier.counters for tier in tiers if tier.tier is Tier.REMOTE)
        return counters.written_bytes, counters.read_bytes

    def close(self) -> None:
        self.worker.close()
        self.cache.close()


def turn(case: Case, byte_codec: str | None, mb_per_s: int) -> dict[str, float]:
    """Store, load, compare."""
    with tempfile.TemporaryDirectory() as folder:
        writer = Host(case, folder, byte_codec, mb_per_s)
        began = time.perf_counter()
        writer.store(case)
        store_s = time.perf_counter() - began
        written_bytes, _ = writer.remote_bytes()
        writer.close()
        case.target.poison()
        reader = Host(case, folder, byte_codec, mb_per_s)
        began = time.perf_counter()
        reader.load(case)
        load_s = time.perf_counter() - began
        # What has arrived is counted after it was loaded.
        wait_until(lambda: reader.remote_bytes()[1] >= written_bytes, "the count")
        _, read_bytes = reader.remote_bytes()
        reader.close()
    assert read_bytes == written_bytes, "not what was written"
    assert all(torch.equal(ours, theirs) for ours, theirs in case.views), "other bytes came back"
    return {"bytes": written_bytes, "store_s": store_s, "load_s": load_s}


def measure(found: dict[str, Case], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, case in found.items():
        for rate in RATES_MB_PER_S:
            turns = [{codec: turn(case, codec, rate) for codec in CODECS} for _ in range(rounds)]
            row: dict[str, Any] = {"dtype": name, "mb_per_s": rate}
            for codec in CODECS:
                of_codec = [each[codec] for each in turns]
                figures = {key: spread([each[key] for each in of_codec]) for key in of_codec[0]}
                row[codec or "as it is"] = {**figures, "bytes": of_codec[0]["bytes"]}
            rows.append(row)
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        plain, encoded = row["as it is"], row["zstd"]
        ratio = plain["bytes"] / encoded["bytes"]
        print(f"{row['dtype']} at {row['mb_per_s']} MB/s: {plain['bytes']} bytes, {ratio:.3f} : 1")
        for key in ("store_s", "load_s"):
            told = " ".join(f"{p} {plain[key][p]:.3f}/{encoded[key][p]:.3f}" for p in plain[key])
            print(f"  {key:<8} as it is / zstd: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case (5)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of KV (1024)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = 32 if options.smoke else options.tokens
    rows = measure(cases(tokens, smoke=options.smoke), 1 if options.smoke else options.rounds)
    report(rows)
    if not options.smoke:
        head = {"model": "SmolLM2-135M-Instruct", "tokens": tokens, "rounds": options.rounds}
        write_row("remote_codec", {**head, "cases": rows}, ["kvtier", "torch", "zstandard"])


if __name__ == "__main__":
    main()
