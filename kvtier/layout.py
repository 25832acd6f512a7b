"""Arithmetic on KV layouts: which shards a chunk has and what each of them holds.

Pure functions of a ``KVLayout``. Invalid layouts are refused by ``validate_layout``; every other
function here expects a layout that it has accepted.

Heads and head groups. A group with H kv heads is stored in ``head_groups`` = n parts::

    H = 8, n = 4     0 1 | 2 3 | 4 5 | 6 7        four shards of two heads
    H = 2, n = 4     0 | 0 | 1 | 1                head groups 0 and 1 hold the same head
                     ^       ^                    only the lowest replica is stored: 0 and 2

A latent group has one row per token, so the same rule stores it as head group 0 alone.
"""

from __future__ import annotations

from bisect import bisect_left

from kvtier.constants import CHUNK_TOKENS_MAX, SECTIONS_MAX
from kvtier.errors import LayoutError, nearest
from kvtier.types import (
    DTYPE_BYTES,
    GroupKind,
    KVGroup,
    KVLayout,
    ShardId,
    ShardLayout,
)

#: Group, stage and head group are uint16 in a shard key; layer and head counts keep to it too.
INDEX_MAX = 0xFFFF
#: Head dimensions and windows are uint32 in a namespace's encoding.
DIM_MAX = 0xFFFF_FFFF


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """Return ``value`` if it is an ``int`` in ``low .. high``, else raise ``LayoutError``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise LayoutError(f"{name} is {value!r}; allowed are integers from {low} to {high}")
    return value


def check_dtype(name: str, value: object) -> None:
    """Raise ``LayoutError`` unless ``value`` names a dtype that KVTier carries."""
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        hint = nearest(value, DTYPE_BYTES) if isinstance(value, str) else ""
        raise LayoutError(f"{name} is {value!r}{hint}; allowed are {', '.join(DTYPE_BYTES)}")


def validate_layout(layout: KVLayout) -> None:
    """Refuse a layout that cannot be cut into shards.

    Raises ``LayoutError`` that names the field, its value and what is allowed.
    """
    check_integer("chunk_tokens", layout.chunk_tokens, 1, CHUNK_TOKENS_MAX)
    check_integer("head_groups", layout.head_groups, 1, INDEX_MAX)
    check_integer("section_layers", layout.section_layers, 1, INDEX_MAX)
    check_integer("the number of groups", len(layout.groups), 1, INDEX_MAX)
    _check_ascending("stage_starts", layout.stage_starts)
    if layout.stage_starts[0] != 0:
        raise LayoutError(f"stage_starts begins with {layout.stage_starts[0]}; it must be 0")
    group_of_layer: dict[int, int] = {}
    for index, group in enumerate(layout.groups):
        _validate_group(f"groups[{index}]", group, layout.head_groups)
        for layer in group.layers:
            if layer in group_of_layer:
                raise LayoutError(
                    f"groups[{index}].layers holds layer {layer}, which groups"
                    f"[{group_of_layer[layer]}] holds too; a layer belongs to one group"
                )
            group_of_layer[layer] = index
        _check_sections(layout, index)


def shard_layout(layout: KVLayout, shard: ShardId) -> ShardLayout:
    """Return the shape of one shard.

    Raises ``LayoutError`` for a shard that ``shard_ids`` does not list: an index out of range, a
    stage without layers of the group, or a replica that another head group stores.
    """
    check_integer("group", shard.group, 0, len(layout.groups) - 1)
    check_integer("stage", shard.stage, 0, len(layout.stage_starts) - 1)
    check_integer("head_group", shard.head_group, 0, layout.head_groups - 1)
    group = layout.groups[shard.group]
    owner = head_group_owner(group.kv_heads, shard.head_group, layout.head_groups)
    if owner != shard.head_group:
        raise LayoutError(
            f"head_group {shard.head_group} of groups[{shard.group}] is a replica; "
            f"head_group {owner} stores its heads"
        )
    layers = _stage_layers(layout, shard.group, shard.stage)
    if layers == 0:
        raise LayoutError(f"stage {shard.stage} holds no layer of groups[{shard.group}]")
    return ShardLayout(
        layers=layers,
        kv_heads=len(head_range(group.kv_heads, shard.head_group, layout.head_groups)),
        k_dim=group.k_dim,
        v_dim=group.v_dim,
        dtype=group.dtype,
        tokens=layout.chunk_tokens,
        section_layers=layout.section_layers,
    )


def shard_ids(layout: KVLayout) -> tuple[ShardId, ...]:
    """Return every shard of one chunk, ordered by group, stage, head group."""
    return tuple(
        ShardId(index, stage, head_group)
        for index, group in enumerate(layout.groups)
        for stage in range(len(layout.stage_starts))
        if _stage_layers(layout, index, stage)
        for head_group in range(layout.head_groups)
        if head_group_owner(group.kv_heads, head_group, layout.head_groups) == head_group
    )


def stage_layer_start(layout: KVLayout, group: int, stage: int) -> int:
    """Return the index, within the group, of its first layer in that pipeline stage.

    For a stage that holds none of the group's layers it is where they would begin.
    """
    return bisect_left(layout.groups[group].layers, layout.stage_starts[stage])


def head_range(kv_heads: int, rank: int, size: int) -> range:
    """Return the kv heads that part ``rank`` of ``size`` holds.

    Up to ``kv_heads`` parts split the heads between them. With more, parts are replicas: each
    holds one head, and neighbours hold the same one.
    """
    start = kv_heads * rank // size
    return range(start, max(start + 1, kv_heads * (rank + 1) // size))


def head_group_owner(kv_heads: int, head_group: int, head_groups: int) -> int:
    """Return the head group that stores the heads of ``head_group``: its lowest replica."""
    replicas = max(1, head_groups // kv_heads)
    return head_group - head_group % replicas


def check_block_tokens(layout: KVLayout, block_tokens: int) -> None:
    """Raise ``LayoutError`` unless a chunk is a whole number of the engine's blocks."""
    check_integer("block_tokens", block_tokens, 1, CHUNK_TOKENS_MAX)
    if layout.chunk_tokens % block_tokens:
        raise LayoutError(
            f"chunk_tokens is {layout.chunk_tokens} and block_tokens is {block_tokens}; "
            "chunk_tokens must be a multiple of block_tokens"
        )


def validate_shard_layout(layout: ShardLayout) -> None:
    """Raise ``LayoutError`` for a field out of bounds; cost does not depend on the values."""
    check_integer("layers", layout.layers, 1, INDEX_MAX)
    check_integer("kv_heads", layout.kv_heads, 1, INDEX_MAX)
    check_integer("k_dim", layout.k_dim, 1, DIM_MAX)
    check_integer("v_dim", layout.v_dim, 0, DIM_MAX)
    check_dtype("dtype", layout.dtype)
    check_integer("tokens", layout.tokens, 1, CHUNK_TOKENS_MAX)
    check_integer("section_layers", layout.section_layers, 1, INDEX_MAX)
    check_integer("the number of sections", layout.sections, 1, SECTIONS_MAX)
    check_integer("sink_tokens", layout.sink_tokens, 0, layout.tokens)


def _validate_group(name: str, group: KVGroup, head_groups: int) -> None:
    if group.kind not in tuple(GroupKind):
        raise LayoutError(f"{name}.kind is {group.kind!r}; allowed are {', '.join(GroupKind)}")
    _check_ascending(f"{name}.layers", group.layers)
    check_dtype(f"{name}.dtype", group.dtype)
    latent = group.kind == GroupKind.LATENT
    window = group.kind == GroupKind.WINDOW
    kv_heads = check_integer(f"{name}.kv_heads", group.kv_heads, 1, 1 if latent else INDEX_MAX)
    check_integer(f"{name}.k_dim", group.k_dim, 1, DIM_MAX)
    check_integer(f"{name}.v_dim", group.v_dim, 0 if latent else 1, 0 if latent else DIM_MAX)
    check_integer(
        f"{name}.window_tokens", group.window_tokens, 1 if window else 0, DIM_MAX if window else 0
    )
    if kv_heads % head_groups and head_groups % kv_heads:
        raise LayoutError(
            f"head_groups is {head_groups} and {name}.kv_heads is {kv_heads}; "
            "one must divide the other"
        )


def _check_ascending(name: str, values: tuple[int, ...]) -> None:
    check_integer(f"the length of {name}", len(values), 1, INDEX_MAX)
    low = 0
    for index, value in enumerate(values):
        low = check_integer(f"{name}[{index}]", value, low, INDEX_MAX) + 1


def _check_sections(layout: KVLayout, group: int) -> None:
    for stage in range(len(layout.stage_starts)):
        layers = _stage_layers(layout, group, stage)
        if layers > SECTIONS_MAX * layout.section_layers:
            raise LayoutError(
                f"section_layers is {layout.section_layers}, so {layers} layers of groups[{group}] "
                f"make more than {SECTIONS_MAX} sections; raise section_layers"
            )


def _stage_layers(layout: KVLayout, group: int, stage: int) -> int:
    start = stage_layer_start(layout, group, stage)
    if stage + 1 < len(layout.stage_starts):
        return stage_layer_start(layout, group, stage + 1) - start
    return len(layout.groups[group].layers) - start
