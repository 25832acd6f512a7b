"""The calls that an engine makes: store a prompt's KV, restart, load it from disk.

A pool of made-up KV stands for an engine's. Everything else is what an engine would do, step by
step, and needs neither a model nor a GPU.

    .venv/bin/python examples/store_and_load.py
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator

from kvtier import (
    Blocks,
    Cache,
    CacheConfig,
    CacheWorker,
    DiskConfig,
    GroupKind,
    KVGroup,
    KVLayout,
    Namespace,
    Pending,
    Placement,
)
from kvtier.clock import SystemClock
from kvtier.constants import GIB, MIB
from kvtier.testing.pools import TorchPool
from kvtier.types import Part

BLOCK_TOKENS = 16
PROMPT = list(range(512))
POLL_S = 0.001

# What one layer keeps, and everything that makes KV incompatible with other KV.
GROUP = KVGroup(GroupKind.FULL, layers=(0, 1), kv_heads=2, k_dim=64, v_dim=64, dtype="float32")
NAMESPACE = Namespace("made-up weights", KVLayout((GROUP,)))

# The engine's block table of the prompt: 32 blocks that it took from its pool, in any order.
BLOCKS = Blocks(0, (tuple(range(63, 31, -1)),), BLOCK_TOKENS)

clock = SystemClock()


@contextlib.contextmanager
def cache_and_worker(path: str, pool: TorchPool) -> Iterator[tuple[Cache, CacheWorker]]:
    """The deciding half and the moving half. Workers end first, then the cache."""
    config = CacheConfig(dram_bytes=64 * MIB, disk=DiskConfig(path, capacity_bytes=GIB))
    cache = Cache(config)
    worker = CacheWorker(Placement(), cache.arena)
    worker.register_pool(pool)
    try:
        yield cache, worker
    finally:
        worker.close()
        cache.close()


def store(cache: Cache, worker: CacheWorker) -> int:
    """Offer the prompt's chunks; give how many were. The blocks stay as they are meanwhile."""
    sequence = cache.sequence(NAMESPACE)
    sequence.append(PROMPT)
    chunks = range(len(sequence.chunk_keys))
    plan = cache.begin_store(sequence, chunks, BLOCKS)
    if plan is None:  # Refused, or held already: nothing waits, nothing is wrong.
        return 0
    worker.execute(plan)
    while not cache.store_done(plan.plan_id):  # An engine computes its next step here.
        cache.finish(worker.poll())
        clock.sleep(POLL_S)
    return len(chunks)


def load(cache: Cache, worker: CacheWorker) -> dict[str, int]:
    """Bring the longest prefix that a tier holds into the blocks; give its tokens by tier."""
    sequence = cache.sequence(NAMESPACE)
    sequence.append(PROMPT)
    while isinstance(match := cache.match(sequence), Pending):  # The disk is being opened.
        clock.sleep(POLL_S)
    under_way = cache.begin_load(match, BLOCKS)
    if under_way is None:
        return {}
    while under_way.outcome is None:
        for plan in under_way.poll():
            worker.execute(plan)
        cache.finish(worker.poll())
        clock.sleep(POLL_S)
    return {tier.value: tokens for tier, tokens in under_way.outcome.tokens_by_tier.items()}


def contents(pool: TorchPool) -> list[bytes]:
    """The bytes of the prompt's blocks, layer by layer."""
    ids = BLOCKS.block_ids[0]
    return [
        pool.rows(0, layer, part, ids).numpy().tobytes() for layer in GROUP.layers for part in Part
    ]


def main() -> int:
    """Store, restart, load; return 1 when a byte differs."""
    pool = TorchPool([GROUP], block_count=64, block_tokens=BLOCK_TOKENS)
    pool.fill_values(seed=1)
    computed = contents(pool)
    with tempfile.TemporaryDirectory() as path:
        with cache_and_worker(path, pool) as (cache, worker):
            print("before:       ", load(cache, worker))
            print("chunks stored:", store(cache, worker))
            print("from memory:  ", load(cache, worker))
        pool.poison()
        with cache_and_worker(path, pool) as (cache, worker):
            print("after restart:", load(cache, worker))
    same = contents(pool) == computed
    print("same bytes:   ", same)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
