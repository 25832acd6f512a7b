"""A rank in a process of its own: pool and worker there, plans and results through a pipe."""

from __future__ import annotations

import multiprocessing
import threading
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any, Final

from kvtier.cache.worker import CacheWorker
from kvtier.interfaces import PagedPool
from kvtier.testing.engine_double import RankPool
from kvtier.tiers.memory import ArenaHandle, map_arena
from kvtier.types import Blocks, ChunkKey, KVLayout, Part, Placement, Plan, Result

#: Real seconds after which a process that does not answer is taken for dead.
_ANSWER_S: Final = 60.0


class Order(StrEnum):
    """What a rank's process may be told."""

    WRITE = "write"
    POISON = "poison"
    CHECK = "check"
    EXECUTE = "execute"
    POLL = "poll"
    STALL = "stall"
    WAIT_FOR_STALL = "wait_for_stall"


class RankProcess:
    """One rank of an engine whose cache lives elsewhere. Every call waits for its answer.

    The process maps the arena of ``handle``; the cache of that arena stays open meanwhile.
    """

    def __init__(
        self,
        layout: KVLayout,
        placement: Placement,
        handle: ArenaHandle,
        *,
        block_tokens: int,
        block_count: int,
    ) -> None:
        """Start the process; the first call waits until it is ready."""
        self.placement = placement
        # A forked child would inherit the owner's threads' locks; engines spawn too.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, layout, placement, handle, block_tokens, block_count)
        )
        self._process.start()
        theirs.close()
        self._ready = False

    def write(self, keys: list[ChunkKey], blocks: Blocks) -> None:
        """See ``RankPool.write``."""
        self._ask(Order.WRITE, keys, blocks)

    def poison(self) -> None:
        """Forget all KV."""
        self._ask(Order.POISON)

    def check(self, keys: list[ChunkKey], blocks: Blocks, tokens: range) -> None:
        """See ``RankPool.check`` and ``check_untouched``, which it does too."""
        wrong = self._ask(Order.CHECK, keys, blocks, tokens)
        if wrong:
            raise AssertionError(wrong)

    def execute(self, plan: Plan) -> None:
        """Hand a plan to the worker."""
        self._ask(Order.EXECUTE, plan)

    def poll(self) -> list[Result]:
        """Return the worker's results since the last poll."""
        results: list[Result] = self._ask(Order.POLL)
        return results

    def stall(self) -> None:
        """Let the worker stop for ever in the middle of its next move."""
        self._ask(Order.STALL)

    def wait_for_stall(self) -> None:
        """Block until the worker has stopped in the middle of a move."""
        self._ask(Order.WAIT_FOR_STALL)

    def kill(self) -> None:
        """End the process by ``SIGKILL``; it has nothing that anybody would miss."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()

    def _ask(self, order: Order, *arguments: object) -> Any:
        if not self._ready:
            self._answer()
            self._ready = True
        self._pipe.send((order, arguments))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(_ANSWER_S), f"rank {self.placement.worker} does not answer"
        return self._pipe.recv()


class _StallingPool:
    """A pool that keeps whoever asks for its second view waiting for ever."""

    def __init__(self, pool: PagedPool) -> None:
        self._pool = pool
        self._views = 0
        self.stalled = threading.Event()

    @property
    def block_tokens(self) -> int:
        return self._pool.block_tokens

    @property
    def block_count(self) -> int:
        return self._pool.block_count

    @property
    def stream(self) -> int:
        return self._pool.stream

    def layer_view(self, group: int, layer: int, part: Part) -> object:
        self._views += 1
        # Two views make a layer, so this one comes after the first section has been moved.
        if self._views > 2:
            self.stalled.set()
            threading.Event().wait()
        return self._pool.layer_view(group, layer, part)


class _Rank:
    """What the process holds, one method for each order."""

    def __init__(self, rank: RankPool, worker: CacheWorker) -> None:
        self._rank = rank
        self._worker = worker
        self._stalling = _StallingPool(rank.pool)
        worker.register_pool(rank.pool)

    def write(self, keys: list[ChunkKey], blocks: Blocks) -> None:
        self._rank.write(keys, blocks)

    def poison(self) -> None:
        self._rank.pool.poison()

    def check(self, keys: list[ChunkKey], blocks: Blocks, tokens: range) -> str:
        try:
            self._rank.check(keys, blocks, tokens)
            self._rank.check_untouched(blocks)
        except AssertionError as error:
            return str(error)
        return ""

    def execute(self, plan: Plan) -> None:
        self._worker.execute(plan)

    def poll(self) -> list[Result]:
        return self._worker.poll()

    def stall(self) -> None:
        self._worker.register_pool(self._stalling)

    def wait_for_stall(self) -> None:
        self._stalling.stalled.wait()


def _serve(
    pipe: Connection,
    layout: KVLayout,
    placement: Placement,
    handle: ArenaHandle,
    block_tokens: int,
    block_count: int,
) -> None:
    """Be a rank until somebody ends the process."""
    import torch

    torch.set_num_threads(1)
    rank = RankPool(layout, placement, block_tokens=block_tokens, block_count=block_count)
    worker = CacheWorker(placement, map_arena(handle))
    served = _Rank(rank, worker)
    pipe.send(None)
    while True:
        order, arguments = pipe.recv()
        pipe.send(getattr(served, order)(*arguments))
