"""Moving a made-up chunk before the first real one: kernels are compiled at their first use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtier.cache.planner import chunk_shape, load_moves, shard_writers, store_moves
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

    For a worker that is the only one, before anything is stored, computed or learned: what lies
    there is lost. Blocks for seconds where kernels have to be compiled, at most
    ``WARM_UP_S_MAX``; a codec that cannot be warmed up shows that again when it is used.
    """
    chunk = 1  # Not the first one, whose shape is rarer.
    ids = tuple(range(layout.chunk_tokens // block_tokens))
    blocks = Blocks(chunk * layout.chunk_tokens, (ids,) * len(layout.groups), block_tokens)
    place = Placement()
    for number, name in enumerate(names):
        shape = chunk_shape(layout, codecs.get(name), chunk=chunk)
        if shape.chunk_bytes > arena_bytes:
            continue
        slots: dict[ShardId, Slot] = {}
        offset = 0
        for shard, nbytes in shape.sizes.items():
            slots[shard] = Slot(offset, nbytes)
            offset += nbytes
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
            sections=lambda shard, shape=shape: range(shape.layouts[shard].sections),  # type: ignore[misc]
        )
        for direction, moves in ((Direction.STORE, stores), (Direction.LOAD, loads)):
            _run(worker, Plan(-1 - number, direction, math.inf, tuple(moves)))


def _run(worker: CacheWorker, plan: Plan) -> None:
    clock = SystemClock()
    end = clock.now() + WARM_UP_S_MAX
    worker.execute(plan)
    while not worker.poll() and clock.now() < end:
        clock.sleep(_POLL_S)
