"""Stores: which chunks of a request are offered, and the blocks that they are read from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvtier.cache.cache import Cache
from kvtier.cache.lossy_blocks import LossyBlocks
from kvtier.types import Blocks, MissReason, Plan
from kvtier_adapters.vllm.guard import Guard
from kvtier_adapters.vllm.requests import Followed
from kvtier_adapters.vllm.windows import KeptBlocks, whole_group


class HeldBlocks:
    """References to blocks of vLLM's pool, by the plan that reads them.

    A request that ends or is preempted gives back its own references only, so nobody writes into a
    block that is being packed.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._held: dict[int, list[Any]] = {}

    @property
    def bound(self) -> bool:
        """Tell whether vLLM has given its pool."""
        return self._pool is not None

    @property
    def plans(self) -> list[int]:
        """The plans that blocks are held for."""
        return list(self._held)

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool: ``blocks`` by id, ``touch`` and ``free_blocks``."""
        self._pool = pool

    def hold(self, plan_id: int, block_ids: list[int]) -> None:
        """Take a reference to each block for a plan."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._held[plan_id] = blocks

    def release(self, plan_id: int) -> None:
        """Give a plan's references back, the last block first: it is the first to be reused."""
        self._pool.free_blocks(reversed(self._held.pop(plan_id)))


class StoreDesk:
    """Offers what requests have computed. The scheduler's thread only."""

    def __init__(self, cache: Cache, guard: Guard, block_tokens: int, step_blocks: int = 0) -> None:
        """``step_blocks`` is how many blocks a step may take."""
        self._cache = cache
        self._guard = guard
        self._block_tokens = block_tokens
        self._plans: list[Plan] = []
        self.held = HeldBlocks()
        #: What came back from a lossy codec, and vLLM may give to other requests.
        self.lossy = LossyBlocks()
        self.kept = KeptBlocks(block_tokens, step_blocks)

    @property
    def busy(self) -> bool:
        """Tell whether a store has to go out or to be answered."""
        return bool(self._plans or self.held.plans)

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self.held.bind(pool)
        self.kept.bind(pool)

    def offer(self, followed: Followed, tables: Sequence[Sequence[int]]) -> bool:
        """Store every chunk that has been computed and was not offered; the cache skips its own.

        ``tables`` are the request's blocks. The workers store before they compute anything else.
        True: a staging area is crowded, and will be for whoever asks in this step.
        """
        sequence, size = followed.sequence, self._block_tokens
        chunk_blocks = sequence.chunk_tokens // size
        end = min(followed.computed // sequence.chunk_tokens, min(map(len, tables)) // chunk_blocks)
        first = max(followed.stored_chunks, followed.lost_chunks)
        if end <= max(followed.offered_chunks, first) or not self.held.bound:
            return False
        followed.append_known()
        chunks = range(first, end)
        some = slice(chunks.start * chunk_blocks, end * chunk_blocks)
        ids = tuple(tuple(table[some]) for table in tables)
        blocks = Blocks(chunks.start * sequence.chunk_tokens, ids, size)
        hashes = followed.request.block_hashes[chunks.start * chunk_blocks :]
        if lossy := self.lossy.count(hashes, ids[whole_group(sequence.layout)]):
            lossy_chunks = chunks.start + -(-lossy // chunk_blocks)
            sequence.lossy_chunks = max(sequence.lossy_chunks, lossy_chunks)
        plan = self._guard.call_boundary(
            lambda: self._cache.begin_store(sequence, chunks, blocks), None
        )
        # What passes through a staging area goes in turns: with each step, as that has room.
        crowded = sequence.refused is MissReason.CROWDED
        followed.offered_chunks = followed.stored_chunks if crowded else end
        if plan is not None:
            # A plan takes what there was room for; what comes behind is offered at the end again.
            moved = {block_id for move in plan.moves for block_id in move.block_ids}
            last = max(index for index, block_id in enumerate(ids[0]) if block_id in moved)
            followed.stored_chunks = (chunks.start * chunk_blocks + last + 1) // chunk_blocks
            if crowded:
                followed.offered_chunks = followed.stored_chunks
            taken = [block_id for table in ids for block_id in table if block_id in moved]
            self.held.hold(plan.plan_id, taken)
            self._plans.append(plan)
        self.kept.let_go(followed, followed.offered_chunks)
        return crowded

    def take(self) -> tuple[Plan, ...]:
        """Return the stores that go out now."""
        plans, self._plans = tuple(self._plans), []
        return plans

    def release_answered(self) -> None:
        """Let go of the blocks of stores that every worker has answered."""
        for plan_id in self.held.plans:
            done = partial(self._cache.store_done, plan_id)
            if self._guard.call_boundary(done, otherwise=False):
                self.held.release(plan_id)
