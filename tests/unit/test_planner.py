"""The planner by example; its properties stand in ``tests/property``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.cache.planner import (
    check_blocks,
    check_store,
    chunk_shape,
    chunk_tokens_covered,
    load_moves,
    needed_groups,
    present_groups,
    shard_writers,
    store_moves,
    usable_chunks,
)
from kvtier.codecs.raw import RawCodec
from kvtier.errors import LayoutError
from kvtier.types import (
    Blocks,
    GroupKind,
    HeadSlice,
    KVGroup,
    KVLayout,
    Placement,
    ShardId,
    Slot,
)

FULL = KVGroup(GroupKind.FULL, (0, 2), kv_heads=4, k_dim=8, v_dim=8, dtype="float32")
WINDOW = KVGroup(
    GroupKind.WINDOW, (1, 3), kv_heads=4, k_dim=8, v_dim=8, dtype="float32", window_tokens=12
)
LATENT = KVGroup(GroupKind.LATENT, (0, 1), kv_heads=1, k_dim=24, v_dim=0, dtype="bfloat16")
ONE = KVLayout((FULL,), chunk_tokens=8)
TWO = KVLayout((FULL, WINDOW), chunk_tokens=8)
BOTH, LONE, NONE = frozenset({0, 1}), frozenset({0}), frozenset[int]()


def tp(size: int) -> tuple[Placement, ...]:
    return tuple(Placement(rank, rank, size) for rank in range(size))


def slot(_: ShardId) -> Slot:
    return Slot(0, 65_536)


def test_a_chunk_is_as_large_as_header_and_sections() -> None:
    shape = chunk_shape(KVLayout((FULL,), chunk_tokens=8, section_layers=1), RawCodec())
    # Two sections of 8 tokens x 4 heads x (8 + 8) float32 = 2 KiB, each padded to a page.
    assert shape.sizes == {ShardId(0, 0, 0): 3 * 4096}
    assert shape.chunk_bytes == 3 * 4096


def test_latent_groups_have_one_shard_however_many_head_groups() -> None:
    shape = chunk_shape(KVLayout((LATENT,), chunk_tokens=8, head_groups=4), RawCodec())
    assert set(shape.layouts) == {ShardId(0, 0, 0)}


@pytest.mark.parametrize(
    ("chunk", "end_token", "groups"),
    [
        (0, 8, BOTH),
        (0, 19, BOTH),  # The window begins at token 7, the last of chunk 0.
        (0, 20, LONE),  # It begins at token 8.
        (1, 24, BOTH),
        (1, 28, LONE),
        (2, 24, BOTH),
    ],
)
def test_a_window_group_needs_what_overlaps_the_window(
    chunk: int, end_token: int, groups: frozenset[int]
) -> None:
    assert needed_groups(TWO, chunk, end_token) == groups


@pytest.mark.parametrize(
    ("present", "usable"),
    [
        ([], 0),
        ([BOTH, BOTH, BOTH], 3),
        ([LONE, BOTH, BOTH], 3),
        ([BOTH, LONE, BOTH], 1),
        ([LONE, LONE, BOTH], 0),
        ([BOTH, BOTH, LONE], 2),
        ([BOTH, NONE, BOTH], 1),
        ([NONE, BOTH, BOTH], 0),
        ([BOTH, LONE, LONE, BOTH, BOTH], 5),
    ],
)
def test_the_longest_usable_prefix_has_all_full_chunks_and_its_last_window(
    present: list[frozenset[int]], usable: int
) -> None:
    assert usable_chunks(TWO, present) == usable


def test_a_group_is_present_with_all_of_its_shards() -> None:
    layout = KVLayout((FULL, WINDOW), chunk_tokens=8, head_groups=2)
    shards = [ShardId(0, 0, 0), ShardId(0, 0, 1), ShardId(1, 0, 0)]
    assert present_groups(layout, shards) == {0}


@pytest.mark.parametrize(
    ("start_token", "count", "covered"),
    [
        (0, 6, [range(8), range(8), range(8)]),
        (4, 3, [range(4, 8), range(8), range(0)]),
        (12, 2, [range(0), range(4, 8), range(4)]),
        (24, 2, [range(0), range(0), range(0)]),
        (0, 0, [range(0), range(0), range(0)]),
    ],
)
def test_blocks_cover_chunks_in_part(start_token: int, count: int, covered: list[range]) -> None:
    blocks = Blocks(start_token, (tuple(range(count)),), 4)
    found = [chunk_tokens_covered(ONE, chunk, blocks) for chunk in range(3)]
    assert [list(tokens) for tokens in found] == [list(tokens) for tokens in covered]


def test_b06_a_move_names_only_the_blocks_of_its_tokens() -> None:
    shape = chunk_shape(ONE, RawCodec())
    blocks = Blocks(4, ((70, 71, 72, 73),), 4)
    moves = [
        move
        for chunk in range(3)
        for move in load_moves(
            ONE,
            shape,
            tp(1),
            chunk=chunk,
            groups=LONE,
            end_token=20,
            blocks=blocks,
            slots=slot,
            sections=lambda _: range(1),
        )
    ]
    assert [(m.token_start, m.token_count, m.block_ids) for m in moves] == [
        (4, 4, (70,)),
        (0, 8, (71, 72)),
        (0, 4, (73,)),
    ]


@pytest.mark.parametrize(
    ("window", "end", "parts"),
    [
        (6, 20, {1: (4, 4, (12,)), 2: (0, 4, (13,))}),
        (8, 20, {1: (4, 4, (12,)), 2: (0, 4, (13,))}),
        (9, 20, {1: (0, 8, (11, 12)), 2: (0, 4, (13,))}),
        (4, 20, {2: (0, 4, (13,))}),
        (99, 20, {0: (4, 4, (10,)), 1: (0, 8, (11, 12)), 2: (0, 4, (13,))}),
    ],
)
def test_of_a_window_only_the_blocks_in_it_are_loaded(
    window: int, end: int, parts: dict[int, tuple[int, int, tuple[int, ...]]]
) -> None:
    """An engine has none for what lies before: id 0 stands for them, or for nothing."""
    layout = KVLayout((FULL, replace(WINDOW, window_tokens=window)), chunk_tokens=8)
    blocks = Blocks(4, ((20, 21, 22, 23), (10, 11, 12, 13)), 4)
    moves = [
        move
        for chunk in range(3)
        for move in load_moves(
            layout,
            chunk_shape(layout, RawCodec()),
            tp(1),
            chunk=chunk,
            groups=needed_groups(layout, chunk, end),
            end_token=end,
            blocks=blocks,
            slots=slot,
            sections=lambda _: range(1),
        )
    ]
    found = {
        move.position_start // 8: (move.token_start, move.token_count, move.block_ids)
        for move in moves
        if move.shard.group == 1
    }
    assert found == parts
    assert sum(move.token_count for move in moves if move.shard.group == 0) == 16


@pytest.mark.parametrize(
    ("readers", "slices"),
    [
        (1, {(0, 0): HeadSlice(0, 0, 2), (0, 1): HeadSlice(0, 2, 2)}),
        (2, {(0, 0): HeadSlice(0, 0, 2), (1, 1): HeadSlice(0, 0, 2)}),
        (
            4,
            {
                (0, 0): HeadSlice(0, 0, 1),
                (1, 0): HeadSlice(1, 0, 1),
                (2, 1): HeadSlice(0, 0, 1),
                (3, 1): HeadSlice(1, 0, 1),
            },
        ),
    ],
)
def test_every_degree_reads_its_heads(
    readers: int, slices: dict[tuple[int, int], HeadSlice]
) -> None:
    layout = KVLayout((FULL,), chunk_tokens=8, head_groups=2)
    moves = load_moves(
        layout,
        chunk_shape(layout, RawCodec()),
        tp(readers),
        chunk=0,
        groups=LONE,
        end_token=8,
        blocks=Blocks(0, ((5, 6),), 4),
        slots=slot,
        sections=lambda _: range(1),
    )
    assert {(m.worker, m.shard.head_group): m.heads for m in moves} == slices


def test_sections_that_are_not_ready_are_not_ordered() -> None:
    layout = KVLayout((FULL,), chunk_tokens=8, head_groups=2, section_layers=1)
    ready = {ShardId(0, 0, 0): range(1, 2), ShardId(0, 0, 1): range(0)}
    moves = load_moves(
        layout,
        chunk_shape(layout, RawCodec()),
        tp(2),
        chunk=0,
        groups=LONE,
        end_token=8,
        blocks=Blocks(0, ((5, 6),), 4),
        slots=slot,
        sections=ready.__getitem__,
    )
    assert [(m.worker, m.first_section, m.section_count) for m in moves] == [(0, 1, 1)]


def test_the_lowest_replica_writes() -> None:
    layout = KVLayout((LATENT,), chunk_tokens=8, head_groups=4)
    writers = shard_writers(layout, chunk_shape(layout, RawCodec()), tp(4))
    assert {shard: place.worker for shard, place in writers.items()} == {ShardId(0, 0, 0): 0}


def test_pipeline_stages_write_their_own_layers() -> None:
    layout = KVLayout((FULL,), chunk_tokens=8, stage_starts=(0, 1))
    places = (Placement(7, stage=0), Placement(9, stage=1))
    shape = chunk_shape(layout, RawCodec())
    moves = store_moves(
        layout,
        shape,
        shard_writers(layout, shape, places),
        chunk=0,
        blocks=Blocks(0, ((1, 2),), 4),
        slots=slot,
    )
    assert [(m.worker, m.shard.stage, m.layout.layers) for m in moves] == [(7, 0, 1), (9, 1, 1)]


def test_ranks_that_hold_half_of_a_shard_cannot_store_it() -> None:
    layout = KVLayout((FULL,), chunk_tokens=8, head_groups=2)
    with pytest.raises(LayoutError, match=r"head_groups \(2\) must be .* degree \(4\)"):
        shard_writers(layout, chunk_shape(layout, RawCodec()), tp(4))


def test_a_rank_alone_cannot_store_for_the_others() -> None:
    layout = KVLayout((FULL,), chunk_tokens=8, head_groups=2)
    with pytest.raises(LayoutError, match=r"no worker holds all of shard \(0, 0, 1\)"):
        shard_writers(layout, chunk_shape(layout, RawCodec()), tp(2)[:1])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (Blocks(0, ((0,), (0,)), 4), "blocks for 2 KV groups; the layout has 1"),
        (Blocks(6, ((0,),), 4), "start_token is 6; .* multiple of 4"),
        (Blocks(-4, ((0,),), 4), "start_token is -4"),
        (Blocks(0, ((0,),), 3), "chunk_tokens is 8 and block_tokens is 3"),
        (Blocks(0, ((0,),), 16), "chunk_tokens is 8 and block_tokens is 16"),
        (Blocks(0, ((0,),), 0), "block_tokens is 0"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_by_name(blocks: Blocks, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_blocks(ONE, blocks)


@pytest.mark.parametrize(
    ("chunks", "blocks", "message"),
    [
        (range(1), Blocks(0, ((0,),), 4), "cover 4 tokens of chunk 0; a store takes all 8"),
        (range(1), Blocks(4, ((0, 1),), 4), "cover 4 tokens of chunk 0"),
        (range(2), Blocks(0, ((0, 1, 2),), 4), "cover 4 tokens of chunk 1"),
        (range(4), Blocks(0, ((0, 1),), 4), r"range\(0, 4\); the sequence has 3 complete"),
        (range(-1, 1), Blocks(0, ((0, 1),), 4), r"range\(-1, 1\)"),
    ],
)
def test_a_store_of_less_than_its_chunks_is_refused(
    chunks: range, blocks: Blocks, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        check_store(ONE, chunks, 3, blocks)


def test_a_store_of_no_chunks_fits() -> None:
    check_store(ONE, range(3, 3), 3, Blocks(24, ((),), 4))
