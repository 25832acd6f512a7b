"""Which shards a chunk has and what each of them holds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvtier.constants import CHUNK_TOKENS_MAX, SECTIONS_MAX
from kvtier.errors import LayoutError
from kvtier.layout import (
    DIM_MAX,
    INDEX_MAX,
    check_block_tokens,
    head_group_owner,
    head_range,
    shard_ids,
    shard_layout,
    stage_layer_start,
    validate_layout,
    validate_shard_layout,
)
from kvtier.types import GroupKind, KVGroup, KVLayout, ShardId, ShardLayout

FULL = KVGroup(GroupKind.FULL, tuple(range(30)), kv_heads=8, k_dim=64, v_dim=64, dtype="float32")
LATENT = KVGroup(GroupKind.LATENT, (0, 1, 2), kv_heads=1, k_dim=576, v_dim=0, dtype="bfloat16")
WINDOW = KVGroup(GroupKind.WINDOW, (30, 31), 2, 32, 16, "float16", window_tokens=512)
PLAIN = KVLayout((FULL,))
SHARD = ShardLayout(layers=3, kv_heads=2, k_dim=8, v_dim=8, dtype="uint8", tokens=4)


def test_one_group_on_one_rank_is_one_shard() -> None:
    assert shard_ids(PLAIN) == (ShardId(0, 0, 0),)
    shard = shard_layout(PLAIN, ShardId(0, 0, 0))
    assert shard == ShardLayout(30, 8, 64, 64, "float32", 256, 4)
    assert shard.sections == 8


def test_groups_stages_and_head_groups_are_cut_apart() -> None:
    layout = KVLayout((FULL, WINDOW), head_groups=4, stage_starts=(0, 10, 30), section_layers=3)
    validate_layout(layout)
    assert shard_ids(layout) == (
        *(ShardId(0, stage, head_group) for stage in (0, 1) for head_group in range(4)),
        # Stages 0 and 1 hold no window layer, stage 2 no full one; two heads have two owners.
        ShardId(1, 2, 0),
        ShardId(1, 2, 2),
    )
    assert shard_layout(layout, ShardId(0, 1, 3)) == ShardLayout(20, 2, 64, 64, "float32", 256, 3)
    assert shard_layout(layout, ShardId(1, 2, 2)) == ShardLayout(2, 1, 32, 16, "float16", 256, 3)
    assert [stage_layer_start(layout, 0, stage) for stage in range(3)] == [0, 10, 30]
    assert [stage_layer_start(layout, 1, stage) for stage in range(3)] == [0, 0, 0]


def test_interleaved_groups_count_their_own_layers() -> None:
    odd, even = (replace(FULL, layers=tuple(range(first, 10, 2))) for first in (1, 0))
    layout = KVLayout((even, odd), stage_starts=(0, 5))
    validate_layout(layout)
    assert [shard_layout(layout, shard).layers for shard in shard_ids(layout)] == [3, 2, 2, 3]
    assert [stage_layer_start(layout, group, 1) for group in (0, 1)] == [3, 2]


def test_a_latent_group_is_stored_once() -> None:
    layout = KVLayout((LATENT,), head_groups=8)
    validate_layout(layout)
    assert shard_ids(layout) == (ShardId(0, 0, 0),)
    assert shard_layout(layout, ShardId(0, 0, 0)) == ShardLayout(3, 1, 576, 0, "bfloat16", 256, 4)


@pytest.mark.parametrize(
    ("kv_heads", "size", "expected"),
    [
        (8, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (2, 4, [(0,), (0,), (1,), (1,)]),
        (1, 3, [(0,), (0,), (0,)]),
        (3, 1, [(0, 1, 2)]),
        (3, 2, [(0,), (1, 2)]),
    ],
)
def test_heads_of_a_part(kv_heads: int, size: int, expected: list[tuple[int, ...]]) -> None:
    assert [tuple(head_range(kv_heads, rank, size)) for rank in range(size)] == expected


@pytest.mark.parametrize("kv_heads", range(1, 13))
@pytest.mark.parametrize("size", range(1, 25))
def test_every_head_has_one_owner_the_lowest_replica(kv_heads: int, size: int) -> None:
    ranges = [head_range(kv_heads, rank, size) for rank in range(size)]
    assert {head for heads in ranges for head in heads} == set(range(kv_heads))
    if kv_heads % size and size % kv_heads:
        with pytest.raises(LayoutError, match="one must divide the other"):
            validate_layout(KVLayout((replace(FULL, kv_heads=kv_heads),), head_groups=size))
        return
    for rank, heads in enumerate(ranges):
        assert head_group_owner(kv_heads, rank, size) == ranges.index(heads)
    layout = KVLayout((replace(FULL, kv_heads=kv_heads),), head_groups=size)
    stored = [shard.head_group for shard in shard_ids(layout)]
    assert [head for rank in stored for head in ranges[rank]] == list(range(kv_heads))


def test_only_shards_that_are_listed_have_a_layout() -> None:
    layout = KVLayout((FULL, WINDOW), head_groups=4, stage_starts=(0, 30))
    listed = shard_ids(layout)
    for group in range(3):
        for stage in range(3):
            for head_group in range(-1, 5):
                shard = ShardId(group, stage, head_group)
                if shard in listed:
                    validate_shard_layout(shard_layout(layout, shard))
                else:
                    with pytest.raises(LayoutError):
                        shard_layout(layout, shard)


def test_a_replica_is_sent_to_its_owner() -> None:
    layout = KVLayout((WINDOW,), head_groups=4)
    with pytest.raises(LayoutError, match="head_group 2 stores its heads"):
        shard_layout(layout, ShardId(0, 0, 3))
    with pytest.raises(LayoutError, match="stage 1 holds no layer"):
        shard_layout(KVLayout((WINDOW,), stage_starts=(0, 40)), ShardId(0, 1, 0))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (replace(PLAIN, groups=()), "number of groups is 0"),
        (replace(PLAIN, chunk_tokens=0), "chunk_tokens is 0"),
        (replace(PLAIN, chunk_tokens=CHUNK_TOKENS_MAX + 1), "chunk_tokens is 65537"),
        (replace(PLAIN, chunk_tokens=256.0), "chunk_tokens is 256.0"),  # type: ignore[arg-type]
        (replace(PLAIN, head_groups=0), "head_groups is 0"),
        (replace(PLAIN, head_groups=3), "head_groups is 3 and groups.0..kv_heads is 8"),
        (replace(PLAIN, section_layers=0), "section_layers is 0"),
        (replace(PLAIN, section_layers=True), "section_layers is True"),
        (replace(PLAIN, stage_starts=()), "length of stage_starts is 0"),
        (replace(PLAIN, stage_starts=(1,)), "stage_starts begins with 1"),
        (replace(PLAIN, stage_starts=(0, 8, 8)), r"stage_starts\[2\] is 8; .* from 9"),
        (
            replace(PLAIN, groups=(FULL, FULL)),
            r"groups\[1\].layers holds layer 0, which groups\[0\]",
        ),
        (KVLayout((replace(FULL, kind="ful"),)), "kind is 'ful'; allowed are full, window, latent"),  # type: ignore[arg-type]
        (KVLayout((replace(FULL, layers=()),)), "length of groups.0..layers is 0"),
        (KVLayout((replace(FULL, layers=(3, 2)),)), r"layers\[1\] is 2"),
        (KVLayout((replace(FULL, layers=(-1,)),)), r"layers\[0\] is -1"),
        (KVLayout((replace(FULL, layers=(INDEX_MAX + 1,)),)), r"layers\[0\] is 65536"),
        (KVLayout((replace(FULL, kv_heads=0),)), "kv_heads is 0"),
        (KVLayout((replace(FULL, kv_heads=INDEX_MAX + 1),)), "kv_heads is 65536"),
        (KVLayout((replace(FULL, k_dim=0),)), "k_dim is 0"),
        (KVLayout((replace(FULL, k_dim=DIM_MAX + 1),)), "k_dim is 4294967296"),
        (KVLayout((replace(FULL, v_dim=0),)), "v_dim is 0"),
        (KVLayout((replace(FULL, dtype="float8"),)), "dtype is 'float8'"),
        (KVLayout((replace(FULL, dtype=8),)), "dtype is 8"),  # type: ignore[arg-type]
        (KVLayout((replace(FULL, window_tokens=4),)), "window_tokens is 4"),
        (KVLayout((replace(WINDOW, window_tokens=0),)), "window_tokens is 0"),
        (KVLayout((replace(LATENT, kv_heads=2),)), "kv_heads is 2"),
        (KVLayout((replace(LATENT, v_dim=8),)), "v_dim is 8"),
    ],
)
def test_a_layout_that_cannot_be_cut_is_refused(layout: KVLayout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        validate_layout(layout)


def test_a_shard_has_a_bounded_number_of_sections() -> None:
    most = replace(FULL, layers=tuple(range(SECTIONS_MAX * 2)))
    layout = KVLayout((most,), section_layers=2)
    validate_layout(layout)
    assert shard_layout(layout, ShardId(0, 0, 0)).sections == SECTIONS_MAX
    more = replace(FULL, layers=tuple(range(SECTIONS_MAX * 2 + 1)))
    with pytest.raises(LayoutError, match="more than 512 sections"):
        validate_layout(KVLayout((more,), section_layers=2))
    validate_layout(KVLayout((more,), section_layers=2, stage_starts=(0, 1)))


def test_b132_a_chunk_is_a_whole_number_of_blocks() -> None:
    for block_tokens in (1, 16, 256):
        check_block_tokens(PLAIN, block_tokens)
    for block_tokens in (48, 512):
        with pytest.raises(
            LayoutError, match=f"chunk_tokens is 256 and block_tokens is {block_tokens}"
        ):
            check_block_tokens(PLAIN, block_tokens)
    with pytest.raises(LayoutError, match="block_tokens is 0"):
        check_block_tokens(PLAIN, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"kv_heads": INDEX_MAX + 1}, "kv_heads is 65536"),
        ({"k_dim": 0}, "k_dim is 0"),
        ({"v_dim": -1}, "v_dim is -1"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"tokens": CHUNK_TOKENS_MAX + 1}, "tokens is 65537"),
        ({"section_layers": 0}, "section_layers is 0"),
        ({"layers": SECTIONS_MAX + 1, "section_layers": 1}, "number of sections is 513"),
    ],
)
def test_a_shard_layout_out_of_bounds_is_refused(change: dict[str, object], message: str) -> None:
    validate_shard_layout(SHARD)
    with pytest.raises(LayoutError, match=message):
        validate_shard_layout(replace(SHARD, **change))  # type: ignore[arg-type]


def test_b16_every_layer_and_head_lies_in_one_shard(rng: random.Random) -> None:
    for _ in range(200):
        layers = rng.sample(range(60), rng.randint(2, 40))
        split = rng.randint(1, len(layers) - 1)
        groups = tuple(
            replace(FULL, layers=tuple(sorted(part)), kv_heads=2 ** rng.randint(0, 3))
            for part in (layers[:split], layers[split:])
        )
        starts = (0, *sorted(rng.sample(range(1, 60), rng.randint(0, 3))))
        layout = KVLayout(groups, head_groups=2 ** rng.randint(0, 4), stage_starts=starts)
        validate_layout(layout)
        held: list[tuple[int, int]] = []
        for shard in shard_ids(layout):
            shape = shard_layout(layout, shard)
            group = groups[shard.group]
            first = stage_layer_start(layout, shard.group, shard.stage)
            heads = head_range(group.kv_heads, shard.head_group, layout.head_groups)
            assert len(heads) == shape.kv_heads
            for layer in group.layers[first : first + shape.layers]:
                assert starts[shard.stage] <= layer
                held.extend((layer, head) for head in heads)
        expected = [(layer, h) for g in groups for layer in g.layers for h in range(g.kv_heads)]
        assert sorted(held) == sorted(expected)
