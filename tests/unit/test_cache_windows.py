"""Models with windows: what a shorter prefix needs, and chunks that have lost a part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.engine_double import EngineDouble, Loading
from kvtier.types import (
    ChunkKey,
    Miss,
    MissReason,
    Move,
    Plan,
    Tier,
)
from tests.lib.cache_setup import (
    CHUNK,
    WINDOWED,
    CacheSetup,
    cache_setup,
    settle,
    written,
)

FIVE = range(5 * CHUNK)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CacheSetup]:
    with cache_setup(tmp_path) as setup:
        yield setup


def moves_of(engine: EngineDouble, loading: Loading) -> list[Move]:
    """Drive a load; return all that it ordered."""
    plans: list[Plan] = []
    take = engine.execute

    def execute(plan: Plan) -> None:
        plans.append(plan)
        take(plan)

    engine.execute = execute  # type: ignore[method-assign]
    engine.drive(loading)
    engine.execute = take  # type: ignore[method-assign]
    return [move for plan in plans for move in plan.moves]


def test_only_the_chunks_in_a_window_are_loaded_for_its_group(setup: CacheSetup) -> None:
    engine = setup.open(WINDOWED)
    engine.store(engine.sequence(FIVE))
    loading = engine.begin_load(engine.match(engine.sequence(FIVE)))
    assert loading is not None
    moves = moves_of(engine, loading)
    engine.check(loading)
    # Tokens 28 .. 39 are in the window: a part of chunk 3, and chunk 4.
    ids = loading.blocks.block_ids
    assert {b for m in moves if m.shard.group == 0 for b in m.block_ids} == set(ids[0])
    assert {b for m in moves if m.shard.group == 1 for b in m.block_ids} == set(ids[1][7:])


@pytest.mark.parametrize("tokens", [range(24), range(8, 20), range(4, 36)], ids=str)
def test_a_window_ends_where_the_blocks_end(setup: CacheSetup, tokens: range) -> None:
    engine = setup.open(WINDOWED)
    engine.store(engine.sequence(FIVE))
    loading = engine.load(engine.match(engine.sequence(FIVE)), tokens)
    assert loading.outcome.end_token == tokens.stop


def test_a_windowed_load_that_ends_early_counts_nothing(setup: CacheSetup) -> None:
    """Chunks 2 and 3 would be in the window of a shorter prefix, and 2 was not brought."""
    engine = setup.open(WINDOWED, dram_chunks=16)
    sequence = engine.sequence(FIVE)
    engine.store(sequence, range(4))
    match = engine.match(sequence)
    assert match.tokens == 32
    written(engine)
    setup.close(engine)
    for path in setup.shard_files():
        if path.name.startswith(sequence.chunk_keys[3].hex()):
            path.write_bytes(bytes(path.stat().st_size))
    setup.lose_index()
    engine = setup.open(WINDOWED, dram_chunks=16)
    sequence = engine.sequence(FIVE)
    match = engine.match(sequence)
    assert match.tokens == 24
    keep = setup.shard_files()
    lost = [p for p in keep if p.name.startswith(sequence.chunk_keys[2].hex())]
    for path in lost:
        path.unlink()
    outcome = engine.load(match).outcome
    assert (outcome.start_token, outcome.end_token) == (0, 0)
    assert outcome.tokens_by_tier == {}
    assert outcome.misses == (Miss(Tier.DISK, MissReason.ABSENT, 24),)
    again = engine.load(engine.match(sequence)).outcome
    assert again.end_token == 16


@pytest.mark.parametrize(("asked", "end"), [(12, 8), (16, 0)])
def test_a_window_that_reaches_the_start_counts_what_came(
    setup: CacheSetup, asked: int, end: int
) -> None:
    """Of 12 tokens all are in the window, as of 8; of 16 the first four are not, and not filled."""
    engine = setup.open(WINDOWED)
    sequence = engine.sequence(range(2 * CHUNK))
    engine.store(sequence)
    written(engine)
    setup.close(engine)
    engine = setup.open(WINDOWED)
    match = engine.match(engine.sequence(range(2 * CHUNK)))
    for path in setup.shard_files():
        if path.name.startswith(sequence.chunk_keys[1].hex()):
            path.unlink()
    loading = engine.load(match, range(asked))
    engine.check(loading)
    outcome = loading.outcome
    assert (outcome.end_token, outcome.tokens_by_tier) == (end, {Tier.DISK: end} if end else {})


def shard_paths(setup: CacheSetup, key: ChunkKey, group: int) -> list[Path]:
    name = key.hex() + f"{group:04x}"
    return [path for path in setup.shard_files() if path.name.startswith(name)]


def test_a_chunk_that_lost_a_shard_never_counts_as_whole(setup: CacheSetup) -> None:
    """Its window group is not needed for five chunks, but for two it is."""
    engine = setup.open(WINDOWED)
    sequence = engine.sequence(FIVE)
    engine.store(sequence)
    written(engine)
    setup.close(engine)
    for path in shard_paths(setup, sequence.chunk_keys[1], group=1):
        path.unlink()
    setup.lose_index()

    engine = setup.open(WINDOWED)
    five, two = engine.sequence(FIVE), engine.sequence(range(2 * CHUNK))
    assert engine.match(five).tokens == 40
    assert engine.match(two).tokens == 8
    assert engine.load(engine.match(five)).outcome.end_token == 40
    settle(engine)
    assert {hit.tier for hit in engine.match(five).hits} == {Tier.DRAM}
    assert engine.match(two).tokens == 8, "in DRAM it is not whole either"

    assert engine.store(two), "the chunk is not held"
    assert engine.load(engine.match(two)).outcome.end_token == 16
    written(engine)
    setup.close(engine)
    engine = setup.open(WINDOWED)
    assert engine.load(engine.match(engine.sequence(range(2 * CHUNK)))).outcome.end_token == 16
