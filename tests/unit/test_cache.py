"""What an engine gets from a cache that is well: every layout, every tier, every cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import LayoutError
from kvtier.testing.engine_double import EngineDouble
from kvtier.types import (
    Blocks,
    GroupKind,
    KVGroup,
    KVLayout,
    Miss,
    MissReason,
    Namespace,
    Part,
    Placement,
    Result,
    Tier,
)
from tests.lib.cache_setup import (
    CHUNK,
    CHUNK_BYTES,
    LATENT,
    LAYOUT,
    SPLIT,
    STAGED,
    WINDOWED,
    CacheSetup,
    cache_setup,
    ranks,
    settle,
    tier_stats,
    written,
)

FIVE = range(5 * CHUNK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


LAYOUTS = {
    "full": (LAYOUT, ranks(1)),
    "windowed": (WINDOWED, ranks(1)),
    "latent": (LATENT, ranks(2)),
    "split": (SPLIT, ranks(2)),
    "staged": (STAGED, ranks(1, stages=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_stored_comes_back_byte_by_byte(setup: CacheSetup, name: str) -> None:
    layout, placements = LAYOUTS[name]
    engine = setup.open(layout, placements=placements)
    sequence = engine.sequence(FIVE)
    assert engine.match(sequence).tokens == 0
    assert engine.store(sequence)
    match = engine.match(sequence)
    assert {hit.tier for hit in match.hits} == {Tier.DRAM}
    assert engine.load(match).outcome.tokens_by_tier == {Tier.DRAM: 40}
    assert not engine.store(sequence), "everything is held already"
    written(engine)
    setup.close(engine)

    engine = setup.open(layout, placements=placements)
    sequence = engine.sequence(range(5 * CHUNK + 3))
    match = engine.match(sequence)
    assert {hit.tier for hit in match.hits} == {Tier.DISK}
    assert engine.load(match).outcome.tokens_by_tier == {Tier.DISK: 40}
    settle(engine)
    assert {hit.tier for hit in engine.match(sequence).hits} == {Tier.DRAM}
    assert engine.load(engine.match(sequence)).outcome.end_token == 40


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.DISK])
@pytest.mark.parametrize(
    "tokens",
    [range(4, 8), range(4, 40), range(36), range(12, 20), range(36, 40), range(4, 12)],
    ids=str,
)
def test_b06_only_the_blocks_named_are_touched(
    setup: CacheSetup, tier: Tier, tokens: range
) -> None:
    engine = setup.open()
    engine.store(engine.sequence(FIVE))
    if tier is Tier.DISK:
        written(engine)
        setup.close(engine)
        engine = setup.open()
    outcome = engine.load(engine.match(engine.sequence(FIVE)), tokens).outcome
    assert (outcome.start_token, outcome.end_token) == (tokens.start, tokens.stop)
    assert outcome.tokens_by_tier == {tier: len(tokens)}
    assert not outcome.misses


def test_blocks_that_go_on_after_the_match_are_filled_up_to_it(setup: CacheSetup) -> None:
    engine = setup.open()
    engine.store(engine.sequence(range(2 * CHUNK)))
    loading = engine.load(engine.match(engine.sequence(FIVE)), range(4, 40))
    assert (loading.outcome.start_token, loading.outcome.end_token) == (4, 16)
    filled = set(loading.blocks.block_ids[0][:3])
    for rank in engine.ranks:
        rest = Blocks(4, (tuple(filled),), engine.block_tokens)
        rank.check_untouched(rest)


@pytest.mark.parametrize("tokens", [range(40, 48), range(80, 84), range(0)], ids=str)
def test_blocks_outside_the_match_load_nothing(setup: CacheSetup, tokens: range) -> None:
    engine = setup.open()
    engine.store(engine.sequence(FIVE))
    match = engine.match(engine.sequence(range(6 * CHUNK)))
    assert engine.begin_load(match, tokens) is None


def test_a_sequence_that_grew_after_its_match_loads_what_was_matched(setup: CacheSetup) -> None:
    engine = setup.open()
    engine.store(engine.sequence(FIVE))
    sequence = engine.sequence(range(20))
    match = engine.match(sequence)
    sequence.append(range(20, 40))
    assert engine.load(match).outcome.end_token == 16


# Ranks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_degree_that_divides_the_heads_reads(setup: CacheSetup, size: int) -> None:
    engine = setup.open(SPLIT, placements=ranks(2))
    engine.store(engine.sequence(FIVE))
    written(engine)
    setup.close(engine)
    engine = setup.open(SPLIT, placements=ranks(size))
    match = engine.match(engine.sequence(FIVE))
    assert engine.load(match, range(4, 36)).outcome.tokens_by_tier == {Tier.DISK: 32}
    assert engine.load(match).outcome.end_token == 40


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_a_cache_of_its_own_reads_its_heads(setup: CacheSetup, rank: int) -> None:
    """The other rank's shards have no reader here; the load must not wait for one."""
    engine = setup.open(SPLIT, placements=ranks(2))
    engine.store(engine.sequence(FIVE))
    written(engine)
    setup.close(engine)
    engine = setup.open(SPLIT, placements=ranks(2)[rank : rank + 1])
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == 40


@pytest.mark.parametrize("placements", [ranks(4), ranks(2)[:1]], ids=["four", "one of two"])
def test_ranks_without_whole_shards_cannot_store(
    setup: CacheSetup, placements: tuple[Placement, ...]
) -> None:
    engine = setup.open(SPLIT, placements=placements)
    sequence = engine.sequence(FIVE)
    with pytest.raises(LayoutError, match="no worker holds all of shard"):
        engine.store(sequence)
    settle(engine)
    assert tier_stats(engine.cache, Tier.DRAM).used_bytes == 0, "nothing is left of the attempt"


def test_more_ranks_than_heads_store_one_replica(setup: CacheSetup) -> None:
    group = KVGroup(GroupKind.FULL, (0,), kv_heads=2, k_dim=8, v_dim=8, dtype="float32")
    layout = KVLayout((group,), chunk_tokens=CHUNK, head_groups=4)
    engine = setup.open(layout, placements=ranks(4))
    engine.store(engine.sequence(FIVE))
    assert engine.load(engine.match(engine.sequence(FIVE))).outcome.end_token == 40
    written(engine)
    assert len(setup.shard_files()) == 5 * 2


# Slots of several sizes in a small arena


def test_chunks_with_shards_of_several_sizes_take_turns_in_dram(setup: CacheSetup) -> None:
    """Room for one chunk: making room for a second shard must not touch the first one's slot."""
    wide = KVGroup(GroupKind.FULL, (0,), kv_heads=4, k_dim=32, v_dim=32, dtype="float32")
    thin = KVGroup(GroupKind.FULL, (1,), kv_heads=1, k_dim=8, v_dim=8, dtype="float32")
    both = KVLayout((thin, wide), chunk_tokens=CHUNK)
    engine = setup.open(both, dram_chunks=2, disk_chunks=None, slab_bytes=8 * 4096)
    for start in range(6):
        sequence = engine.sequence(range(start, start + CHUNK))
        engine.store(sequence)
        match = engine.match(sequence)
        if match.hits:
            engine.load(match)
        engine.cache.check_integrity()


def test_layouts_of_several_sizes_share_one_arena(setup: CacheSetup) -> None:
    engine = setup.open(LAYOUT, dram_chunks=4, disk_chunks=None, slab_bytes=2 * CHUNK_BYTES)
    wide = KVGroup(GroupKind.FULL, (0,), kv_heads=4, k_dim=32, v_dim=32, dtype="float32")
    layout = KVLayout((wide,), chunk_tokens=CHUNK)
    other = EngineDouble(engine.cache, Namespace("other weights", layout))
    for start in range(0, 80, 10):
        for each in (engine, other, engine):
            sequence = each.sequence(range(start, start + 2 * CHUNK))
            each.store(sequence)
            each.load(each.match(sequence))
            engine.cache.check_integrity()
    other.close()


# Errors and refusals


def test_blocks_for_another_number_of_groups_are_refused(setup: CacheSetup) -> None:
    engine = setup.open()
    sequence = engine.sequence(FIVE)
    engine.store(sequence)
    match = engine.match(sequence)
    two = Blocks(0, ((0, 1), (0, 1)), 4)
    with pytest.raises(LayoutError, match="blocks for 2 KV groups; the layout has 1"):
        engine.cache.begin_load(match, two)
    with pytest.raises(LayoutError, match="blocks for 2 KV groups; the layout has 1"):
        engine.cache.begin_store(sequence, range(1), two)


def test_a_misaligned_start_is_refused(setup: CacheSetup) -> None:
    engine = setup.open()
    sequence = engine.sequence(FIVE)
    engine.store(sequence)
    with pytest.raises(LayoutError, match="start_token is 2"):
        engine.cache.begin_load(engine.match(sequence), Blocks(2, ((0,),), 4))
    with pytest.raises(LayoutError, match="start_token is 2"):
        engine.cache.begin_store(sequence, range(1), Blocks(2, ((0,),), 4))


def test_a_chunk_that_is_no_number_of_blocks_is_refused(setup: CacheSetup) -> None:
    engine = setup.open()
    sequence = engine.sequence(FIVE)
    engine.store(sequence)
    with pytest.raises(LayoutError, match="chunk_tokens is 8 and block_tokens is 3"):
        engine.cache.begin_load(engine.match(sequence), Blocks(0, ((0,),), 3))


def test_a_store_whose_blocks_end_early_is_refused(setup: CacheSetup) -> None:
    """Else the end of the chunk would be whatever the slot held before."""
    engine = setup.open()
    sequence = engine.sequence(FIVE)
    with pytest.raises(LayoutError, match="cover 4 tokens of chunk 1"):
        engine.cache.begin_store(sequence, range(2), Blocks(0, ((0, 1, 2),), 4))
    with pytest.raises(LayoutError, match="the sequence has 5 complete chunks"):
        engine.cache.begin_store(sequence, range(6), Blocks(0, (tuple(range(12)),), 4))
    settle(engine)
    assert tier_stats(engine.cache, Tier.DRAM).used_bytes == 0


def test_a_pool_of_another_shape_fails_the_store(setup: CacheSetup) -> None:
    engine = setup.open()
    other = EngineDouble(engine.cache, engine.namespace, block_tokens=2)
    sequence = engine.sequence(FIVE)
    plan = engine.begin_store(sequence, range(5))
    assert plan is not None
    other.run(plan)
    other.close()
    assert engine.match(sequence).tokens == 0
    counters = tier_stats(engine.cache, Tier.DRAM).counters
    assert counters.refused_chunks == {MissReason.WORKER: 5}


# Tenants


def test_b102_tenants_share_nothing(setup: CacheSetup) -> None:
    engine = setup.open(salt="a")
    engine.store(engine.sequence(FIVE))
    assert engine.match(engine.sequence(FIVE)).tokens == 40
    written(engine)
    setup.close(engine)
    for salt, tokens in {"b": 0, "": 0, "a": 40}.items():
        engine = setup.open(salt=salt)
        assert engine.match(engine.sequence(FIVE)).tokens == tokens
        setup.close(engine)


# Closing


def test_a_closed_cache_answers_and_does_nothing(setup: CacheSetup) -> None:
    engine = setup.open()
    sequence = engine.sequence(FIVE)
    engine.store(sequence, range(3))
    match = engine.match(sequence)
    loading = engine.begin_load(match)
    assert loading is not None
    plan = engine.begin_store(sequence, range(3, 5))
    assert plan is not None
    setup.engines.remove(engine)
    engine.close()
    engine.cache.close()
    engine.cache.close()
    assert loading.load.poll() == []
    assert loading.outcome.misses == (Miss(Tier.DRAM, MissReason.CANCELLED, 24),)
    engine.cache.finish([Result(plan.plan_id, 0, ok=True)])
    assert engine.cache.store_done(plan.plan_id)
    assert engine.match(sequence).tokens == 0
    assert engine.begin_load(match) is None
    assert engine.begin_store(sequence, range(5)) is None
    engine.cache.stats()


def test_a_store_that_is_out_at_close_is_not_written_half(setup: CacheSetup) -> None:
    engine = setup.open()
    sequence = engine.sequence(FIVE)
    assert engine.begin_store(sequence, range(5)) is not None
    setup.engines.remove(engine)
    engine.close()
    engine.cache.close()
    engine = setup.open()
    assert engine.match(engine.sequence(FIVE)).tokens == 0


def test_stats_say_what_is_held(setup: CacheSetup) -> None:
    engine = setup.open()
    engine.store(engine.sequence(FIVE))
    written(engine)
    for tier in (Tier.DRAM, Tier.DISK):
        stats = tier_stats(engine.cache, tier)
        assert (stats.state, stats.chunks, stats.used_bytes) == ("ok", 5, 5 * CHUNK_BYTES)
        assert stats.counters.written_bytes == 5 * CHUNK_BYTES
    assert not engine.cache.stats().degraded
    assert engine.ranks[0].pool.layer_view(0, 0, Part.K).shape[0] == 96
