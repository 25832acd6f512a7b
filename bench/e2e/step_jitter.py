"""Step times of the bundled engine while loads run beside it, against those without.

    python bench/e2e/step_jitter.py [--smoke] [--threads 1] [--rounds 6]

Requests generate while others have their prefixes loaded from disk; the loaded ones generate one
token each. Steps in which a prompt's last token is computed are left out on both sides, for it is
the loads' work beside the steps that is asked about: reading, verifying, copying into the pool,
and the scheduler's own. Rounds with and without loads take turns. Nothing is timed before what
was loaded has given the tokens that computing gives.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.engine_rig import Asked, Rig
from bench.lib.report import spread, write_row
from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, DiskConfig
from kvtier.constants import GIB, MIB
from kvtier_engine.weights.load import DEFAULT_MODEL, LoadedModel, load_model

RUNNING = 2


@dataclass(frozen=True)
class Sizes:
    """Loads in a round, one after the other, and the tokens that are generated meanwhile."""

    prefix_tokens: int = 512
    loads: int = 6
    steps: int = 48


SMOKE = Sizes(256, 2, 8)


def prompts_of(model: LoadedModel, count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts that differ from their first token on."""
    vocabulary = model.config.vocab_size - 10
    return [
        [(31 * i * i + 7 * i + 1009 * (k + seed)) % vocabulary for i in range(length)]
        for k in range(count)
    ]


def gate(rig: Rig, prefixes: Sequence[Sequence[int]]) -> None:
    """Store the prefixes; stop unless one loads to the tokens that computing gives."""
    for prefix in prefixes:
        rig.answer("load", prefix)
    while rig.cache.stats().writes_queued:
        time.sleep(0.01)
    computed = rig.answer("compute", prefixes[0], 4)
    loaded = rig.answer("load", prefixes[0], 4)
    if loaded.tokens != computed.tokens:
        raise SystemExit(f"loaded: {loaded.tokens}, computed: {computed.tokens}")


def measure(
    rig: Rig, prefixes: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], steps: int
) -> list[float]:
    """Return the times of steps that generate while prefixes, or none, are loaded beside them."""
    core = rig.cores["load"]
    core.forget_prefixes()
    running = [rig.submit("load", row, steps) for row in rows]
    while not all(each.tokens for each in running):
        core.step()
    waiting = list(prefixes)
    loading: list[Asked] = []
    times: list[float] = []
    while not all(each.done for each in running):
        if waiting and all(each.done for each in loading):
            loading.append(rig.submit("load", waiting.pop(), 1))
        answered = sum(each.done for each in loading)
        began = time.perf_counter()
        core.step()
        seconds = time.perf_counter() - began
        if sum(each.done for each in loading) == answered:
            times.append(seconds)
    rig.run("load")
    return times


def run(model: LoadedModel, folder: str, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Measure in turns; return the figures of a row."""
    config = CacheConfig(dram_bytes=96 * MIB, slab_bytes=16 * MIB, disk=DiskConfig(folder, 4 * GIB))
    cache = Cache(config)
    rig = Rig(model, cache, tokens=4 * sizes.prefix_tokens, rows=RUNNING + 2)
    try:
        prefixes = prompts_of(model, sizes.loads, sizes.prefix_tokens + 1, 0)
        rows = prompts_of(model, RUNNING, 32, sizes.loads)
        gate(rig, prefixes)
        times: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(rounds):
            times["without"] += measure(rig, [], rows, sizes.steps)
            times["with"] += measure(rig, prefixes, rows, sizes.steps)
        stats = rig.cache.stats()
    finally:
        rig.close()
        cache.close()
    figures = {name: _figures(values) for name, values in times.items()}
    ratio = figures["with"]["p99_s"] / figures["without"]["p99_s"]
    hit_tokens = {tier.tier.value: tier.counters.hit_tokens for tier in stats.tiers}
    return {**figures, "p99_ratio": ratio, "hit_tokens": hit_tokens}


def _figures(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {**spread(times), "p99_s": p99, "steps": len(times)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line; only a full run is recorded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--smoke", action="store_true", help="one round, no row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--directory", default=None, help="where the disk tier lies (a temporary)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = load_model(DEFAULT_MODEL)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        sizes, rounds = (SMOKE, 1) if options.smoke else (Sizes(), options.rounds)
        figures = run(model, str(Path(folder) / "kv"), sizes, rounds)
    for name in ("without", "with"):
        row = figures[name]
        print(
            f"{name:>8} loads: p50 {row['p50'] * 1e3:.1f} ms  p80 {row['p80'] * 1e3:.1f}  "
            f"p99 {row['p99_s'] * 1e3:.1f}  of {row['steps']} steps"
        )
    print(f"p99 with loads is {figures['p99_ratio']:.2f} times that without")
    if not options.smoke:
        row = {"model": DEFAULT_MODEL, "threads": options.threads, "rounds": options.rounds}
        write_row("step_jitter", row | figures, packages=("torch",))


if __name__ == "__main__":
    main()
