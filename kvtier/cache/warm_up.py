"""Moving a made-up chunk before the first real one: kernels are compiled at their first use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from kvtier.cache.planner import ChunkShape, chunk_shape, load_moves, shard_writers, store_moves
from kvtier.cache.worker import CacheWorker
from kvtier.clock import SystemClock
from kvtier.codecs.known import KnownCodecs
from kvtier.constants import WARM_UP_S_MAX
from kvtier.types import Blocks, Direction, KVLayout, Placement, Plan, ShardId, Slot

_POLL_S = 0.001


def warm_up(
    worker: CacheWorker,
    codecs: KnownCodecs,
    names: Sequence[str],
    layout: KVLayout,
    *,
    block_tokens: int,
    arena_bytes: int,
) -> None:
    """Pack the pool's first blocks into the arena's start and unpack them again, with each codec.

    As a sequence's first chunk and as a later one: see ``KnownCodecs.foreseen`` for ``names``.

    For a worker that is the only one, before anything is stored, computed or learned: what lies
    there is lost. Blocks for seconds where kernels have to be compiled, at most
    ``WARM_UP_S_MAX``; a codec that cannot be warmed up shows that again when it is used.
    """
    for name in names:
        for chunk in (0, 1):  # The first one's first rows may be kept in another way.
            shape = chunk_shape(layout, codecs.get(name), chunk=chunk)
            if shape.chunk_bytes <= arena_bytes:
                for plan in _plans(layout, shape, chunk, block_tokens):
                    _run(worker, plan)


def _plans(layout: KVLayout, shape: ChunkShape, chunk: int, block_tokens: int) -> Iterator[Plan]:
    """One that stores and one that loads the pool's first blocks as this chunk."""
    ids = tuple(range(layout.chunk_tokens // block_tokens))
    blocks = Blocks(chunk * layout.chunk_tokens, (ids,) * len(layout.groups), block_tokens)
    place = Placement()
    offsets = accumulate(shape.sizes.values(), initial=0)
    slots: dict[ShardId, Slot] = {
        shard: Slot(offset, nbytes)
        for offset, (shard, nbytes) in zip(offsets, shape.sizes.items(), strict=False)
    }
    stores = store_moves(
        layout,
        shape,
        shard_writers(layout, shape, [place]),
        chunk=chunk,
        blocks=blocks,
        slots=slots.__getitem__,
    )
    loads = load_moves(
        layout,
        shape,
        [place],
        chunk=chunk,
        groups=frozenset(range(len(layout.groups))),
        blocks=blocks,
        slots=slots.__getitem__,
        sections=lambda shard: range(shape.layouts[shard].sections),
    )
    for number, (direction, moves) in enumerate(
        ((Direction.STORE, stores), (Direction.LOAD, loads))
    ):
        yield Plan(-1 - number, direction, math.inf, tuple(moves))


def _run(worker: CacheWorker, plan: Plan) -> None:
    clock = SystemClock()
    end = clock.now() + WARM_UP_S_MAX
    worker.execute(plan)
    while not worker.poll() and clock.now() < end:
        clock.sleep(_POLL_S)
