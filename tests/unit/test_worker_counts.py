"""What workers do is counted by the cache that ordered it: once, and whatever becomes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvtier.cache.planner import chunk_shape
from kvtier.codecs.raw import RawCodec
from kvtier.obs.stats import CacheStats
from kvtier.types import MissReason, Tier
from tests.lib.cache_setup import (
    CHUNK,
    SPLIT,
    CacheSetup,
    cache_setup,
    fails,
    ranks,
    tier_stats,
)

SPLIT_BYTES = chunk_shape(SPLIT, RawCodec()).chunk_bytes


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def totals(stats: CacheStats) -> Mapping[str, float]:
    """Every number of a snapshot that must not fall."""
    found: dict[str, float] = {"saved": stats.saved_compute_s, "lost": stats.lost_compute_s}
    for tier in stats.tiers:
        of = tier.counters
        found |= {
            f"{tier.tier} {name}": float(getattr(of, name))
            for name in (
                "hit_tokens", "read_bytes", "written_bytes", "corrupt_shards", "evicted_chunks",
                "io_errors",
            )
        }  # fmt: skip
        found |= {f"{tier.tier} miss {why}": n for why, n in of.miss_tokens.items()}
        found |= {f"{tier.tier} refused {why}": n for why, n in of.refused_chunks.items()}
        found |= {f"{tier.tier} reads": of.read_latency.count}
        found |= {f"{tier.tier} writes": of.write_latency.count}
    for name, tenant in stats.tenants.items():
        found |= {f"{name} {tier}": n for tier, n in tenant.hit_tokens.items()}
        found |= {f"{name} {why}": n for why, n in tenant.miss_tokens.items()}
    return found


def test_b166_what_several_workers_store_is_counted_once_by_its_owner(setup: CacheSetup) -> None:
    engine = setup.open(SPLIT, placements=ranks(2), disk_chunks=None)
    engine.store(engine.sequence(range(CHUNK)))
    assert tier_stats(engine.cache, Tier.DRAM).counters.written_bytes == SPLIT_BYTES
    engine.load(engine.match(engine.sequence(range(CHUNK))))
    assert tier_stats(engine.cache, Tier.DRAM).counters.hit_tokens == CHUNK


def test_b166_a_worker_that_is_replaced_takes_no_count_with_it(setup: CacheSetup) -> None:
    engine = setup.open(SPLIT, placements=ranks(2), disk_chunks=None)
    engine.store(engine.sequence(range(2 * CHUNK)))
    engine.load(engine.match(engine.sequence(range(2 * CHUNK))))
    before = totals(engine.cache.stats())
    engine.replace_worker(1)
    engine.cache.lose_worker(1)
    assert totals(engine.cache.stats()) == before
    engine.load(engine.match(engine.sequence(range(2 * CHUNK))))
    assert tier_stats(engine.cache, Tier.DRAM).counters.hit_tokens == 4 * CHUNK


def test_no_count_falls_and_no_more_is_given_or_missed_than_was_wanted(
    setup: CacheSetup, rng: random.Random
) -> None:
    """Over stores, loads, failures, evictions and lost workers in any order."""
    engine = setup.open(SPLIT, dram_chunks=6, disk_chunks=12, placements=ranks(2))
    before: Mapping[str, float] = {}
    wanted = 0
    for _ in range(120):
        start = rng.randrange(6) * 1000
        sequence = engine.sequence(range(start, start + rng.randint(1, 4) * CHUNK))
        act = rng.choice(["store", "load", "cancel", "refuse", "lose"])
        if act == "store":
            engine.store(sequence)
        elif act == "refuse":
            plan = engine.begin_store(sequence, range(1))
            if plan is not None:
                engine.cache.finish([fails(plan, worker) for worker in (0, 1)])
        elif act == "lose":
            engine.replace_worker(0)
            engine.cache.lose_worker(0)
        else:
            match = engine.match(sequence)
            engine.cache.note_admission(match, 0, sequence.token_count)
            wanted += sequence.token_count
            loading = engine.begin_load(match)
            if loading is not None:
                if act == "cancel":
                    loading.load.cancel()
                engine.drive(loading)
        now = engine.cache.stats()
        found = totals(now)
        assert all(found[name] >= amount for name, amount in before.items())
        assert sum(tier.counters.hit_tokens for tier in now.tiers) <= wanted
        for tier in now.tiers:
            assert sum(tier.counters.miss_tokens.values()) <= wanted
        before = found
    counters = tier_stats(engine.cache, Tier.DRAM).counters
    assert counters.hit_tokens > 0
    assert counters.miss_tokens[MissReason.CANCELLED] > 0
    assert counters.refused_chunks[MissReason.WORKER] > 0
