"""What a lookup costs per chunk with 1,000 to 1,000,000 chunks held, and what hashing costs.

Lookup: ``Cache.match`` of sequences nobody has looked up before, of which every chunk is held, in
random order, against a bare dict lookup of as many keys in the same run. Hashing: the keys of a
prompt, against a bare digest of as many bytes. The gate is that every chunk is found.

    python bench/micro/lookup.py [--smoke] [--chunks N ...] [--rounds N]

In DRAM, chunks are stored through the cache as an engine would, only that nothing is copied: the
arena's memory is reserved and never touched. On disk, they are in the index that a cache opens; the
files are not there, because a lookup reads none.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.lib.report import spread, write_row
from kvtier import (
    Blocks,
    Cache,
    CacheConfig,
    DiskConfig,
    GroupKind,
    KVGroup,
    KVLayout,
    Namespace,
    Ready,
    Tier,
)
from kvtier.cache.planner import chunk_shape
from kvtier.cache.sequence import Sequence
from kvtier.constants import MIB
from kvtier.keys import namespace_digest
from kvtier.registry import codecs
from kvtier.tiers.disk.files import LocalFiles
from kvtier.tiers.disk.journal import Journal
from kvtier.tiers.disk.rows import Kind, Row, Rows
from kvtier.types import ChunkKey, Result

#: Chunks of a prompt: 25,600 tokens at 256 a chunk.
PROMPT_CHUNKS = 100
#: Lookups, or prompts hashed, of one round.
SAMPLE = 200
GOAL_US = 3.0

#: The smallest chunk there is: a lookup does not see what a chunk holds.
LAYOUT = KVLayout((KVGroup(GroupKind.FULL, (0,), 1, 1, 1, "uint8"),), chunk_tokens=1)
NAMESPACE = Namespace("0" * 64, LAYOUT)
#: For hashing: chunks of the usual size.
PROMPTS = Namespace("0" * 64, KVLayout(LAYOUT.groups))


def tokens_of(prompt: int) -> list[int]:
    """Return a prompt that shares no chunk with another."""
    return [prompt, *range(PROMPT_CHUNKS - 1)]


def dram_cache(chunks: int, folder: str) -> Cache:
    """Return a cache that holds the first ``chunks / PROMPT_CHUNKS`` prompts in DRAM."""
    del folder
    needed = chunks * chunk_shape(LAYOUT, codecs.load("raw")()).chunk_bytes
    with mock.patch("kvtier.tiers.memory.populate"):
        cache = Cache(CacheConfig(dram_bytes=needed + 64 * MIB))
    for prompt in range(chunks // PROMPT_CHUNKS):
        sequence = cache.sequence(NAMESPACE)
        sequence.append(tokens_of(prompt))
        blocks = Blocks(0, (tuple(range(PROMPT_CHUNKS)),), 1)
        plan = cache.begin_store(sequence, range(PROMPT_CHUNKS), blocks)
        assert plan is not None, "refused"
        cache.finish([Result(plan.plan_id, 0, ok=True)])
    return cache


def disk_cache(chunks: int, folder: str) -> Cache:
    """Return a cache that has just found as many on disk."""
    shape = chunk_shape(LAYOUT, codecs.load("raw")())
    root = namespace_digest(NAMESPACE)
    kind = Kind(root, "raw", tuple(shape.sizes.items()))
    rows: list[Row] = []
    for prompt in range(chunks // PROMPT_CHUNKS):
        sequence = Sequence(NAMESPACE, root)
        sequence.append(tokens_of(prompt))
        rows += [
            Row(key, sequence.entry_parent(i), i, kind, len(rows) + i + 1, prompt + 1)
            for i, key in enumerate(sequence.chunk_keys)
        ]
    journal = Journal(folder, LocalFiles())
    journal.start(Rows.of(rows))
    journal.sync()
    disk = DiskConfig(folder, capacity_bytes=2 * chunks * shape.chunk_bytes)
    cache = Cache(CacheConfig(dram_bytes=64 * MIB, disk=disk))
    while cache.stats().degraded:
        time.sleep(0.01)
    return cache


def fresh(cache: Cache, prompts: Iterable[int]) -> list[Sequence]:
    """Return sequences whose keys no dict has seen: their hashes are not cached."""
    sequences = []
    for prompt in prompts:
        sequence = cache.sequence(NAMESPACE)
        sequence.append(tokens_of(prompt))
        sequences.append(sequence)
    return sequences


def timed_us(work: Callable[[], object], per: int) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / per * 1e6


def match_us(cache: Cache, sequence: Sequence) -> float:
    start = time.perf_counter()
    answer = cache.match(sequence)
    seconds = time.perf_counter() - start
    if not isinstance(answer, Ready) or len(answer.hits) != PROMPT_CHUNKS:
        raise SystemExit("gate: a chunk that is held was not found")
    return seconds / PROMPT_CHUNKS * 1e6


def dict_us(table: dict[ChunkKey, ChunkKey], keys: list[ChunkKey]) -> float:
    get = table.get
    return timed_us(lambda: [get(key) for key in keys], PROMPT_CHUNKS)


def measure_lookup(
    tier: Tier, make: Callable[[int, str], Cache], chunks: int, rounds: int
) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        cache = make(chunks, folder)
        try:
            return measure_cache(tier, cache, chunks, rounds)
        finally:
            cache.close()


def measure_cache(tier: Tier, cache: Cache, chunks: int, rounds: int) -> dict[str, object]:
    found = {each.tier: each.chunks for each in cache.stats().tiers}
    if found[tier] != chunks:
        raise SystemExit(f"gate: {found[tier]} of {chunks} chunks are held")
    held = chunks // PROMPT_CHUNKS
    table = {key: key for each in fresh(cache, range(held)) for key in each.chunk_keys}
    draw = random.Random(chunks)
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(rounds):
        sample = [draw.randrange(held) for _ in range(SAMPLE)]
        ours += [match_us(cache, sequence) for sequence in fresh(cache, sample)]
        bare += [dict_us(table, sequence.chunk_keys) for sequence in fresh(cache, sample)]
    one = cache.sequence(NAMESPACE)
    one.append(tokens_of(0)[:1])
    first = [timed_us(lambda: cache.match(one), 1) for _ in range(SAMPLE)]
    figures = {
        "tier": tier,
        "chunks": chunks,
        "match_us": spread(ours),
        "dict_us": spread(bare),
        "one_chunk_match_us": spread(first),
    }
    print(
        f"{tier}, {chunks} chunks: match {told(ours)} us per chunk, a bare dict {told(bare)}; "
        f"a match of one chunk {told(first)} us"
    )
    return figures


def keys_of(tokens: list[int] | memoryview) -> list[ChunkKey]:
    sequence = Sequence(PROMPTS, bytes(32))
    sequence.append(tokens)
    return sequence.chunk_keys


def measure_hashing(rounds: int) -> dict[str, object]:
    """Return what 256 tokens cost: as a list, as int32 in memory, and the bare digest."""
    chunk_tokens = PROMPTS.layout.chunk_tokens
    draw = random.Random(1)
    tokens = [draw.randrange(150_000) for _ in range(PROMPT_CHUNKS * chunk_tokens)]
    packed = memoryview(array("i", tokens))
    data = bytes(packed)
    size = 4 * chunk_tokens
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    work: dict[str, Callable[[], object]] = {
        "hash_list_us": lambda: keys_of(tokens),
        "hash_int32_us": lambda: keys_of(packed),
        "sha256_us": lambda: [hashlib.sha256(piece).digest() for piece in pieces],
        "blake2b_us": lambda: [hashlib.blake2b(piece).digest() for piece in pieces],
    }
    if keys_of(tokens) != keys_of(packed):
        raise SystemExit("gate: a list and its int32 have different keys")
    spent: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds * SAMPLE // 10):
        for name, each in work.items():
            spent[name].append(timed_us(each, PROMPT_CHUNKS))
    for name, values in spent.items():
        print(f"{name[:-3]:>12}: {told(values)} us per {chunk_tokens} tokens")
    return {name: spread(values) for name, values in spent.items()}


def told(values: list[float]) -> str:
    figures = spread(values)
    return f"{figures['p50']:.2f} (p20 {figures['p20']:.2f}, p80 {figures['p80']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes, rounds = ([1000], 1) if options.smoke else (options.chunks, options.rounds)
    hashing = measure_hashing(rounds)
    makers = {Tier.DRAM: dram_cache, Tier.DISK: disk_cache}
    lookups = [
        measure_lookup(tier, make, chunks, rounds)
        for tier, make in makers.items()
        for chunks in sizes
    ]
    if not options.smoke:
        figures = {"goal_us": GOAL_US, "prompt_chunks": PROMPT_CHUNKS, "rounds": rounds}
        write_row("lookup", {**figures, "hashing": hashing, "lookups": lookups}, ["kvtier"])


if __name__ == "__main__":
    main()
