"""Moving a made-up chunk before the first real one: kernels are compiled at their first use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from kvtier.cache.planner import (
    ChunkShape,
    chunk_shape,
    load_moves,
    shard_writers,
    shards_read,
    store_moves,
)
from kvtier.cache.worker import CacheWorker
from kvtier.clock import SystemClock
from kvtier.codecs.known import KnownCodecs
from kvtier.constants import WARM_UP_S_MAX
from kvtier.errors import LayoutError
from kvtier.types import Blocks, Direction, KVLayout, Placement, Plan, ShardId, Slot

_POLL_S = 0.001
#: A sequence's first chunk, whose first rows may be kept in another way, and one of the others.
_CHUNKS = (0, 1)
_ALONE = Placement()


def warm_up(
    worker: CacheWorker,
    codecs: KnownCodecs,
    names: Sequence[str],
    layout: KVLayout,
    *,
    block_tokens: int,
    arena_bytes: int,
    placement: Placement = _ALONE,
    workers: Sequence[Placement] = (_ALONE,),
) -> None:
    """Pack the pool's first blocks into the arena's start and unpack them again, with each codec.

    As a sequence's first chunk and as a later one: see ``KnownCodecs.foreseen`` for ``names``.
    ``worker`` has this placement among ``workers``, which hold the layout together, and moves its
    own part.

    For a worker that has the arena for itself, before anything is stored, computed or learned: what
    lies there is lost. Blocks for seconds where kernels have to be compiled, at most
    ``WARM_UP_S_MAX``; a codec that cannot be warmed up shows that again when it is used.
    """
    for name in names:
        for chunk in _CHUNKS:
            shape = chunk_shape(layout, codecs.get(name), chunk=chunk)
            slots = _slots(layout, shape, placement)
            if sum(slot.nbytes for slot in slots.values()) > arena_bytes:
                continue
            ids = tuple(range(layout.chunk_tokens // block_tokens))
            blocks = Blocks(chunk * layout.chunk_tokens, (ids,) * len(layout.groups), block_tokens)
            own = _writes(layout, shape, workers, placement)
            for plan in _plans(layout, shape, chunk, blocks, placement, own, slots):
                _run(worker, plan)


def warm_up_bytes(
    codecs: KnownCodecs, names: Sequence[str], layout: KVLayout, placement: Placement
) -> int:
    """Return the size of an arena in which all of these codecs can be warmed up."""
    shapes = (chunk_shape(layout, codecs.get(name), chunk=n) for name in names for n in _CHUNKS)
    slots = (_slots(layout, shape, placement) for shape in shapes)
    return max((sum(slot.nbytes for slot in each.values()) for each in slots), default=0)


def _slots(layout: KVLayout, shape: ChunkShape, placement: Placement) -> dict[ShardId, Slot]:
    """Places for the shards that a worker has heads of, one behind the other."""
    sizes = {shard: shape.sizes[shard] for shard in shards_read(layout, placement)}
    offsets = accumulate(sizes.values(), initial=0)
    return {
        shard: Slot(offset, nbytes)
        for offset, (shard, nbytes) in zip(offsets, sizes.items(), strict=False)
    }


def _writes(
    layout: KVLayout, shape: ChunkShape, workers: Sequence[Placement], placement: Placement
) -> dict[ShardId, Placement]:
    """The shards that a worker stores: none if it is a replica, or all hold parts of them alone."""
    try:
        writers = shard_writers(layout, shape, workers)
    except LayoutError:
        return {}
    return {shard: writer for shard, writer in writers.items() if writer == placement}


def _plans(
    layout: KVLayout,
    shape: ChunkShape,
    chunk: int,
    blocks: Blocks,
    placement: Placement,
    own: Mapping[ShardId, Placement],
    slots: Mapping[ShardId, Slot],
) -> Iterator[Plan]:
    """One that stores and one that loads the pool's first blocks as this chunk."""
    stores = store_moves(
        layout,
        shape,
        own,
        chunk=chunk,
        blocks=blocks,
        slots=slots.__getitem__,
    )
    loads = load_moves(
        layout,
        shape,
        [placement],
        chunk=chunk,
        groups=frozenset(range(len(layout.groups))),
        end_token=chunk * layout.chunk_tokens,
        blocks=blocks,
        slots=slots.__getitem__,
        sections=lambda shard: range(shape.layouts[shard].sections),
    )
    for number, (direction, moves) in enumerate(
        ((Direction.STORE, stores), (Direction.LOAD, loads))
    ):
        if moves:
            yield Plan(-1 - number, direction, math.inf, tuple(moves))


def _run(worker: CacheWorker, plan: Plan) -> None:
    clock = SystemClock()
    end = clock.now() + WARM_UP_S_MAX
    worker.execute(plan)
    while not worker.poll() and clock.now() < end:
        clock.sleep(_POLL_S)
