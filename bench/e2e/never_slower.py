"""Time to first token through the cache against the better of loading and recomputing.

    python bench/e2e/never_slower.py [--smoke] [--threads 1] [--longest 4096] [--directory DIR]
        [--only BYTES_PER_S,...]

The disk's file system is throttled to one rate after the other, slow and fast in turns. At each,
the first request after the change is timed, then eight small ones pass, then every prefix length
is timed three ways in turns, of which another one goes first each time: through the cache by what
it costs, loading whatever is held, and recomputing. A load that would take more than four times as
long as recomputing is not timed; its bytes over the rate stand for it. DRAM holds a few chunks
only, so prefixes lie on disk. Nothing is timed before all three ways have generated the same
tokens.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# As in kvtier-serve: threads without work sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.engine_rig import Rig
from bench.lib.report import spread, write_row
from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, DiskConfig
from kvtier.constants import GIB
from kvtier.testing.throttled_files import ThrottledFiles
from kvtier_engine.weights.load import DEFAULT_MODEL, LoadedModel, load_model

CHUNK_TOKENS = 256
#: Chunks of DRAM: what a load has on its way, and one more.
DRAM_CHUNKS = 6
WARM_REQUESTS = 8
WAYS = ("cost", "compute", "load")
#: Loads that would take more than so many times recomputing are worked out, not timed.
TIMED_MAX = 4.0


@dataclass(frozen=True)
class Sizes:
    """How much work a run does: rates in bytes a second, and rounds by prefix length."""

    rates: tuple[float, ...]
    rounds: dict[int, int]
    new_tokens: int = 8


# Slow and fast in turns: every change is abrupt, in both directions.
FULL = Sizes((1e6, 256e6, 8e6, math.inf, 24e6), {256: 3, 1024: 3, 2048: 3, 4096: 1})
SMOKE = Sizes((1e6, math.inf), {256: 1}, new_tokens=2)


class Prompts:
    """Several prompts of each length, so that each is out of DRAM when it comes again."""

    def __init__(self, model: LoadedModel, lengths: Sequence[int]) -> None:
        vocabulary = model.config.vocab_size
        self._cycles = {}
        for length in lengths:
            # One for each way, so that nobody meets in DRAM what another one has just loaded.
            count = max(len(WAYS), 2 * DRAM_CHUNKS * CHUNK_TOKENS // length + 2)
            made = [
                [
                    (31 * i * i + 7 * i + 1009 * k + length) % (vocabulary - 10)
                    for i in range(length + 1)
                ]
                for k in range(count)
            ]
            self._cycles[length] = (made, itertools.cycle(made))

    def all(self, length: int) -> list[list[int]]:
        """Every prompt of a length."""
        return self._cycles[length][0]

    def next(self, length: int) -> list[int]:
        """The one that was not asked for the longest time."""
        return next(self._cycles[length][1])


def gate(rig: Rig, prompts: Prompts, sizes: Sizes) -> None:
    """Store every prompt; stop unless all three ways generate the same tokens."""
    for length in sizes.rounds:
        for prompt in prompts.all(length):
            rig.answer("load", prompt)
        _wait_until_written(rig.cache)
        prompt = prompts.next(length)
        computed = rig.answer("compute", prompt, sizes.new_tokens)
        for way in ("load", "cost"):
            got = rig.answer(way, prompt, sizes.new_tokens)
            if got.tokens != computed.tokens:
                raise SystemExit(f"{way}: {got.tokens}, computed: {computed.tokens}")


def measure(
    rig: Rig, files: ThrottledFiles, prompts: Prompts, sizes: Sizes
) -> list[dict[str, Any]]:
    """Return a row for each rate."""
    rows = []
    chunk_bytes = rig.pool.bytes_per_block * CHUNK_TOKENS // rig.pool.block_tokens
    for rate in sizes.rates:
        files.rate = rate
        _wait_until_idle(rig.cache)
        first = min(sizes.rounds)
        changed = _round(rig, prompts, first, chunk_bytes, rate)
        for _ in range(WARM_REQUESTS):
            rig.answer("cost", prompts.next(first))
        row: dict[str, Any] = {"bytes_per_s": rate if math.isfinite(rate) else None}
        row["first_after_change"] = _ratio([changed])
        for length, rounds in sizes.rounds.items():
            timed = [
                _round(rig, prompts, length, chunk_bytes, rate, turn) for turn in range(rounds)
            ]
            row[str(length)] = _ratio(timed)
        rows.append(row)
        show(row)
    return rows


def _round(
    rig: Rig, prompts: Prompts, length: int, chunk_bytes: int, rate: float, turn: int = 0
) -> dict[str, Any]:
    """Time one prompt of a length each way. Who goes first changes with ``turn``."""
    bytes_s = length // CHUNK_TOKENS * chunk_bytes / rate
    slowest_s = TIMED_MAX * (rig.cache.costs.recompute_s(0, length) or 0.0)
    seconds = {"load": bytes_s}
    reasons: Counter[str] = Counter()
    for place in range(len(WAYS)):
        way = WAYS[(place + turn) % len(WAYS)]
        if way == "load" and bytes_s > slowest_s:
            continue
        if way == "load":
            _wait_until_idle(rig.cache, slowest_s)
        asked = rig.answer(way, prompts.next(length))
        seconds[way] = asked.first_s
        if way == "cost" and asked.usage is not None:
            reasons = Counter(why.reason for why in asked.usage.why)
    return {**seconds, "why": reasons}


def _ratio(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the medians: a round's own values differ by more than the decision does."""
    middle = {
        way: spread([each[way] for each in rounds])["p50"] for way in ("cost", "compute", "load")
    }
    reasons: Counter[str] = sum((each["why"] for each in rounds), Counter())
    return {
        "through_s": spread([each["cost"] for each in rounds]),
        "compute_s": middle["compute"],
        "load_s": middle["load"],
        "ratio": middle["cost"] / min(middle["compute"], middle["load"]),
        "why": dict(reasons),
    }


def show(row: dict[str, Any]) -> None:
    """Print one line per length."""
    rate = row["bytes_per_s"]
    label = "memory speed" if rate is None else f"{rate / 1e6:g} MB/s"
    for name, figure in row.items():
        if name == "bytes_per_s":
            continue
        print(
            f"{label:>12}  {name:>18}  through {figure['through_s']['p50']:7.3f} s  "
            f"compute {figure['compute_s']:7.3f}  load {figure['load_s']:8.3f}  "
            f"ratio {figure['ratio']:5.2f}  {figure['why']}",
            flush=True,
        )


def _wait_until_written(cache: Cache) -> None:
    while cache.stats().writes_queued:
        time.sleep(0.01)


def _wait_until_idle(cache: Cache, longest_s: float = math.inf) -> None:
    """Wait until no read is under way, whoever has given up on it, for so long at most."""
    end = time.monotonic() + longest_s
    while time.monotonic() < end and _busy(cache):
        time.sleep(0.01)


def _busy(cache: Cache) -> bool:
    stats = cache.stats()
    return bool(stats.late_jobs) or any(tier.pinned_chunks for tier in stats.tiers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line; only a full run is recorded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--smoke", action="store_true", help="two rates, one length, no row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--longest", type=int, default=4096, help="leaves out longer prefixes")
    parser.add_argument("--only", default=None, help="these rates, no row; inf: as it is")
    parser.add_argument("--directory", default=None, help="where the disk tier lies (a temporary)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = load_model(DEFAULT_MODEL)
    sizes = SMOKE if options.smoke else FULL
    rounds = {length: count for length, count in sizes.rounds.items() if length <= options.longest}
    rates = tuple(map(float, options.only.split(","))) if options.only else sizes.rates
    sizes = replace(sizes, rounds=rounds, rates=rates)
    files = ThrottledFiles()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        chunk_bytes = 2 * 4 * CHUNK_TOKENS * model.config.layer_count * model.config.kv_heads
        slab = -(-(chunk_bytes * model.config.head_dim + 65536) // 4096) * 4096
        disk = DiskConfig(str(Path(folder) / "kv"), 8 * GIB)
        config = CacheConfig(
            dram_bytes=DRAM_CHUNKS * slab, slab_bytes=slab, disk=disk, load_deadline_s=600.0
        )
        cache = Cache(config, files=files)
        rig = Rig(model, cache, tokens=max(sizes.rounds) + 512)
        try:
            prompts = Prompts(model, list(sizes.rounds))
            gate(rig, prompts, sizes)
            rows = measure(rig, files, prompts, sizes)
        finally:
            files.rate = math.inf
            rig.close()
            cache.close()
    if not options.smoke and not options.only:
        row = {"model": DEFAULT_MODEL, "threads": options.threads, "rates": rows}
        write_row("never_slower", row, packages=("torch",))


if __name__ == "__main__":
    main()
