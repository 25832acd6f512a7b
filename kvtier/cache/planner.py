"""Which chunks are usable and which bytes move where. Pure: no I/O, no lock, no clock, no state.

::

    tokens      0 ─────────── 256 ─────────── 512 ─────────── 768
    chunks      |      0       |       1       |       2       |
    blocks         start_token ▼───────────────────────▼ end of the blocks
    moves                      [part of 0][  all of 1 ][part of 2]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier.codecs.sections import aligned_bytes
from kvtier.errors import LayoutError
from kvtier.interfaces import BlockCodec
from kvtier.layout import check_block_tokens, head_group_owner, head_range, shard_ids, shard_layout
from kvtier.shard_format import ShardGeometry, shard_geometry
from kvtier.types import (
    Blocks,
    GroupKind,
    HeadSlice,
    KVGroup,
    KVLayout,
    Move,
    Placement,
    ShardId,
    ShardLayout,
    Slot,
)


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The shards of a full chunk under a codec: their shapes and where their bytes lie."""

    codec: str
    layouts: dict[ShardId, ShardLayout]
    geometries: dict[ShardId, ShardGeometry]

    @property
    def sizes(self) -> dict[ShardId, int]:
        """Slot and file sizes in bytes."""
        return {shard: geometry.shard_bytes for shard, geometry in self.geometries.items()}

    @property
    def chunk_bytes(self) -> int:
        """All shards of one chunk."""
        return sum(geometry.shard_bytes for geometry in self.geometries.values())


def chunk_shape(layout: KVLayout, codec: BlockCodec, *, chunk: int = 1) -> ChunkShape:
    """Return the shape of a layout's chunks under a codec. The first one, 0, may be larger."""
    sinks = min(codec.traits.sink_tokens, layout.chunk_tokens) if chunk == 0 else 0
    layouts = {
        shard: replace(shard_layout(layout, shard), sink_tokens=sinks)
        for shard in shard_ids(layout)
    }
    geometries = {
        shard: shard_geometry([codec.section_bytes(shape, s) for s in range(shape.sections)])
        for shard, shape in layouts.items()
    }
    for shard, shape in layouts.items():
        sizes = [codec.section_bytes(shape, s) for s in range(shape.sections)]
        packed = sum(aligned_bytes(nbytes) for nbytes in sizes)
        geometry = geometries[shard]
        assert geometry.shard_bytes == geometry.header_bytes + packed, "two rules for one layout"
    return ChunkShape(codec.name, layouts, geometries)


def needed_groups(layout: KVLayout, chunk: int, end_token: int) -> frozenset[int]:
    """Return the KV groups of a chunk that the token after ``end_token`` tokens attends to.

    Full and latent groups need every chunk, window groups those that overlap their last window.
    """
    return frozenset(
        index
        for index, group in enumerate(layout.groups)
        if group.kind is not GroupKind.WINDOW
        or (chunk + 1) * layout.chunk_tokens > end_token - group.window_tokens
    )


def first_needed(group: KVGroup, end_token: int, block_tokens: int) -> int:
    """Return where the blocks begin that the token after ``end_token`` tokens attends to.

    An engine has no blocks of its own for what lies before the windows of a prefix.
    """
    if group.kind is not GroupKind.WINDOW:
        return 0
    first = max(0, end_token - group.window_tokens)
    return first - first % block_tokens


def usable_chunks(layout: KVLayout, present: Sequence[frozenset[int]]) -> int:
    """Return the longest prefix, in chunks, whose needed KV groups are all present.

    ``present[i]`` holds the groups of chunk i that one of the tiers has whole.
    """
    # How many chunks at the end of a prefix a window group needs, and how many it has in a row.
    spans = {
        index: -(-group.window_tokens // layout.chunk_tokens)
        for index, group in enumerate(layout.groups)
        if group.kind is GroupKind.WINDOW
    }
    runs = dict.fromkeys(spans, 0)
    always = frozenset(range(len(layout.groups))) - spans.keys()
    usable = 0
    for count, held in enumerate(present, 1):
        if not always <= held:
            break
        for group in runs:
            runs[group] = runs[group] + 1 if group in held else 0
        if all(runs[group] >= min(span, count) for group, span in spans.items()):
            usable = count
    return usable


def present_groups(layout: KVLayout, shards: Iterable[ShardId]) -> frozenset[int]:
    """Return the KV groups of which all shards are among ``shards``."""
    held = set(shards)
    missing = {shard.group for shard in shard_ids(layout) if shard not in held}
    return frozenset(range(len(layout.groups))) - missing


def chunk_tokens_covered(layout: KVLayout, chunk: int, blocks: Blocks) -> range:
    """Return the tokens of a chunk, counted within it, that the blocks cover."""
    start = chunk * layout.chunk_tokens
    covered = min(len(ids) for ids in blocks.block_ids) * blocks.block_tokens
    low = max(blocks.start_token - start, 0)
    high = min(blocks.start_token + covered - start, layout.chunk_tokens)
    return range(low, max(low, high))


def check_blocks(layout: KVLayout, blocks: Blocks) -> None:
    """Raise ``LayoutError`` for blocks that do not fit the layout."""
    check_block_tokens(layout, blocks.block_tokens)
    if len(blocks.block_ids) != len(layout.groups):
        raise LayoutError(
            f"blocks for {len(blocks.block_ids)} KV groups; the layout has {len(layout.groups)}"
        )
    if blocks.start_token < 0 or blocks.start_token % blocks.block_tokens:
        raise LayoutError(
            f"start_token is {blocks.start_token}; it must be 0 or a multiple of "
            f"{blocks.block_tokens}"
        )


def check_store(layout: KVLayout, chunks: range, complete: int, blocks: Blocks) -> None:
    """Raise ``LayoutError`` unless the blocks cover every token of all of the chunks.

    ``complete`` chunks are there to be stored.
    """
    check_blocks(layout, blocks)
    if chunks and not 0 <= min(chunks) <= max(chunks) < complete:
        raise LayoutError(f"chunks are {chunks}; the sequence has {complete} complete chunks")
    for chunk in chunks:
        covered = chunk_tokens_covered(layout, chunk, blocks)
        if len(covered) < layout.chunk_tokens:
            raise LayoutError(
                f"the blocks cover {len(covered)} tokens of chunk {chunk}; a store takes all "
                f"{layout.chunk_tokens}"
            )


def load_moves(
    layout: KVLayout,
    shape: ChunkShape,
    workers: Sequence[Placement],
    *,
    chunk: int,
    groups: frozenset[int],
    end_token: int,
    blocks: Blocks,
    slots: Callable[[ShardId], Slot],
    sections: Callable[[ShardId], range],
) -> list[Move]:
    """Order the covered tokens of one chunk into the pools of the workers that need them.

    Of ``groups``, those that ``needed_groups`` says for the same ``end_token``, windows have only
    the blocks in them filled. ``sections(shard)`` says which sections are ready and not ordered
    yet; it may be empty.
    """
    size, start = blocks.block_tokens, chunk * layout.chunk_tokens
    first = [first_needed(group, end_token, size) - start for group in layout.groups]
    covered = chunk_tokens_covered(layout, chunk, blocks)
    tokens = [range(max(covered.start, each), covered.stop) for each in first]
    return [
        _move(
            layout,
            shape,
            worker,
            shard,
            heads,
            chunk,
            tokens[shard.group],
            blocks,
            slots(shard),
            ready,
        )
        for worker in workers
        for shard, heads in _readers_shards(layout, worker)
        if shard.group in groups and (ready := sections(shard))
    ]


def shard_writers(
    layout: KVLayout, shape: ChunkShape, workers: Sequence[Placement]
) -> dict[ShardId, Placement]:
    """Return the one worker that stores each shard: the lowest of those that hold it whole.

    Raises ``LayoutError`` when the workers do not make up whole shards.
    """
    writers = {
        shard: worker for worker in reversed(workers) for shard in _writers_shards(layout, worker)
    }
    missing = [shard for shard in shape.layouts if shard not in writers]
    if missing:
        raise LayoutError(
            f"no worker holds all of shard {tuple(missing[0])}; head_groups "
            f"({layout.head_groups}) must be a multiple of the tensor-parallel degree "
            f"({workers[0].tp_size}), with every rank and stage among the workers"
        )
    return writers


def store_moves(
    layout: KVLayout,
    shape: ChunkShape,
    writers: Mapping[ShardId, Placement],
    *,
    chunk: int,
    blocks: Blocks,
    slots: Callable[[ShardId], Slot],
) -> list[Move]:
    """Order one whole chunk out of the pools, each shard by the worker that writes it.

    Shards without a writer among ``writers`` are left out.
    """
    return [
        _move(
            layout,
            shape,
            writers[shard],
            shard,
            _head_slice(layout, writers[shard], shard),
            chunk,
            chunk_tokens_covered(layout, chunk, blocks),
            blocks,
            slots(shard),
            range(shape.layouts[shard].sections),
        )
        for shard in shape.layouts
        if shard in writers
    ]


def shards_read(layout: KVLayout, worker: Placement) -> list[ShardId]:
    """Return the shards of which a worker's pool has heads."""
    return [shard for shard, _ in _readers_shards(layout, worker)]


def _move(
    layout: KVLayout,
    shape: ChunkShape,
    worker: Placement,
    shard: ShardId,
    heads: HeadSlice,
    chunk: int,
    tokens: range,
    blocks: Blocks,
    slot: Slot,
    sections: range,
) -> Move:
    first_block = (chunk * layout.chunk_tokens + tokens.start - blocks.start_token) // (
        blocks.block_tokens
    )
    count = len(tokens) // blocks.block_tokens
    return Move(
        worker=worker.worker,
        codec=shape.codec,
        shard=shard,
        layout=shape.layouts[shard],
        slot=slot,
        payload_offset=shape.geometries[shard].header_bytes,
        first_section=sections.start,
        section_count=len(sections),
        heads=heads,
        pool_layer_start=0,
        token_start=tokens.start,
        token_count=len(tokens),
        block_ids=blocks.block_ids[shard.group][first_block : first_block + count],
        position_start=chunk * layout.chunk_tokens,
    )


def _pool_heads(kv_heads: int, worker: Placement) -> range:
    return head_range(kv_heads, worker.tp_rank, worker.tp_size)


def _shard_heads(layout: KVLayout, shard: ShardId) -> range:
    return head_range(layout.groups[shard.group].kv_heads, shard.head_group, layout.head_groups)


def _head_slice(layout: KVLayout, worker: Placement, shard: ShardId) -> HeadSlice:
    pool = _pool_heads(layout.groups[shard.group].kv_heads, worker)
    held = _shard_heads(layout, shard)
    start, stop = max(pool.start, held.start), min(pool.stop, held.stop)
    return HeadSlice(start - held.start, start - pool.start, stop - start)


def _readers_shards(layout: KVLayout, worker: Placement) -> list[tuple[ShardId, HeadSlice]]:
    slices = [
        (shard, _head_slice(layout, worker, shard))
        for shard in shard_ids(layout)
        if shard.stage == worker.stage
    ]
    return [(shard, heads) for shard, heads in slices if heads.count > 0]


def _writers_shards(layout: KVLayout, worker: Placement) -> list[ShardId]:
    """Return the shards that a worker's pool holds whole, replicas included."""
    return [
        shard
        for shard, heads in _readers_shards(layout, worker)
        if heads.count == len(_shard_heads(layout, shard))
        and head_group_owner(
            layout.groups[shard.group].kv_heads, shard.head_group, layout.head_groups
        )
        == shard.head_group
    ]
