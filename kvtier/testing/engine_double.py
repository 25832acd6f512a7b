"""An engine that stands in for a real one: patterned KV, random block tables, waits that end.

The KV of every token is bytes derived from the key of its chunk and from its place (group, layer,
part, head, token), so KV that was swapped, left over or half read is recognised wherever it turns
up. Tokens and blocks are the engine's; what the cache says is checked against the pattern::

    engine = EngineDouble(cache, namespace, block_tokens=4)
    sequence = engine.sequence(range(24))
    engine.store(sequence)
    loaded = engine.load(engine.match(sequence))
    engine.check(loaded)
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.cache.cache import Cache
from kvtier.cache.load import Load
from kvtier.cache.match import Pending, Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.worker import CacheWorker
from kvtier.clock import SystemClock
from kvtier.interfaces import Clock
from kvtier.testing.pools import POISON, TorchPool
from kvtier.types import (
    DTYPE_BYTES,
    Blocks,
    ChunkKey,
    GroupKind,
    KVGroup,
    KVLayout,
    LoadOutcome,
    Namespace,
    Part,
    Placement,
    Plan,
)

if TYPE_CHECKING:
    import torch

#: Real seconds after which a wait for another thread is taken for a deadlock.
STUCK_S: Final = 60.0
_POLL_S: Final = 0.0005


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Block until ``condition`` holds; ``AssertionError`` once it is taken for stuck."""
    clock = SystemClock()
    end = clock.now() + STUCK_S
    while not condition():
        assert clock.now() < end, f"stuck: {what}"
        clock.sleep(_POLL_S)


def chunk_rows(
    key: ChunkKey, layout: KVLayout, group: int, layer: int, part: Part, head: int
) -> torch.Tensor:
    """Return the bytes ``[chunk_tokens, dim bytes]`` that a chunk's plane must hold.

    ``layer`` counts within the whole group and ``head`` over all of its heads.
    """
    import torch

    of = layout.groups[group]
    row_bytes = (of.k_dim if part is Part.K else of.v_dim) * DTYPE_BYTES[of.dtype]
    place = b"".join(value.to_bytes(4, "big") for value in (group, layer, part, head))
    seed = int.from_bytes(hashlib.sha256(key + place).digest()[:4], "big")
    mixed = torch.arange(layout.chunk_tokens * row_bytes, dtype=torch.int64) + seed
    mixed = (mixed * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    return ((mixed >> 16) & 0xFF).to(torch.uint8).view(layout.chunk_tokens, row_bytes)


class RankPool:
    """One rank's share of the engine's pool, with patterned KV in it and out of it."""

    def __init__(
        self, layout: KVLayout, placement: Placement, *, block_tokens: int, block_count: int
    ) -> None:
        """Allocate the pool, poisoned. Group by group it has the heads and layers of its rank."""
        self.placement = placement
        self._layout = layout
        self._shares = [_share(layout, group, placement) for group in layout.groups]
        self.pool = TorchPool(
            [_owned(g, share) for g, share in zip(layout.groups, self._shares, strict=True)],
            block_count=block_count,
            block_tokens=block_tokens,
        )

    def write(self, keys: list[ChunkKey], blocks: Blocks) -> None:
        """Put the pattern of a sequence's chunks into all tokens that the blocks cover."""
        tokens = range(len(keys) * self._layout.chunk_tokens)
        for plane in self._planes(keys):
            where = _where(blocks, plane.group, tokens)
            plane.view[where.blocks, where.rows, plane.pool_head] = plane.rows[where.tokens]

    def check(self, keys: list[ChunkKey], blocks: Blocks, tokens: range) -> None:
        """Raise ``AssertionError`` unless ``tokens`` of the blocks hold the pattern.

        Of a window group only what the token after the last one attends to is looked at.
        """
        for plane in self._planes(keys[: -(-tokens.stop // self._layout.chunk_tokens)]):
            group = self._layout.groups[plane.group]
            first = tokens.start
            if group.kind is GroupKind.WINDOW:
                first = max(first, tokens.stop - group.window_tokens)
            where = _where(blocks, plane.group, range(first, tokens.stop))
            found = plane.view[where.blocks, where.rows, plane.pool_head]
            wrong = (found != plane.rows[where.tokens]).any(dim=1)
            if bool(wrong.any()):
                token = int(where.tokens[wrong][0])
                raise AssertionError(f"token {token} is wrong in {plane.name}")

    def check_untouched(self, blocks: Blocks) -> None:
        """Raise ``AssertionError`` unless every block but these is still poisoned."""
        import torch

        for group, share in enumerate(self._shares):
            named = torch.tensor(blocks.block_ids[group], dtype=torch.int64)
            for layer in range(len(share.layers)):
                for part in self._parts(group):
                    view = self._bytes(group, layer, part).clone()
                    view[named] = POISON
                    if not bool((view == POISON).all()):
                        raise AssertionError(f"a block that was not named changed in group {group}")

    def _parts(self, group: int) -> list[Part]:
        return [Part.K, Part.V] if self._layout.groups[group].v_dim else [Part.K]

    def _bytes(self, group: int, layer: int, part: Part) -> torch.Tensor:
        import torch

        return self.pool.layer_view(group, layer, part).view(torch.uint8)

    def _planes(self, keys: list[ChunkKey]) -> Iterable[_Plane]:
        import torch

        if not keys:
            return
        for group, share in enumerate(self._shares):
            for index, layer in enumerate(share.layers):
                for part in self._parts(group):
                    view = self._bytes(group, index, part)
                    for pool_head, head in enumerate(share.heads):
                        rows = [
                            chunk_rows(key, self._layout, group, layer, part, head) for key in keys
                        ]
                        name = f"group {group} layer {layer} {part.name} head {head}"
                        yield _Plane(group, pool_head, view, torch.cat(rows), name)


class EngineDouble:
    """Ranks with their workers beside one cache, in one process and driven by one thread.

    Several doubles may share a cache when each has its own workers' numbers; a cache has one set.
    ``close`` it before the cache.
    """

    def __init__(
        self,
        cache: Cache,
        namespace: Namespace,
        *,
        placements: tuple[Placement, ...] = (Placement(),),
        block_tokens: int = 4,
        block_count: int = 96,
        clock: Clock | None = None,
        seed: int = 0,
    ) -> None:
        """Give every placement a pool and a worker."""
        self.cache = cache
        self.namespace = namespace
        self.block_tokens = block_tokens
        self.ranks = [
            RankPool(namespace.layout, each, block_tokens=block_tokens, block_count=block_count)
            for each in placements
        ]
        self._clock = clock
        self.workers = [self._worker(rank) for rank in self.ranks]
        self._block_ids = range(block_count)
        self._random = random.Random(seed)

    def sequence(self, tokens: Iterable[int]) -> Sequence:
        """Return a sequence of the double's namespace."""
        sequence = self.cache.sequence(self.namespace)
        sequence.append(list(tokens))
        return sequence

    def match(self, sequence: Sequence) -> Ready:
        """Look up a prefix, waiting while the disk is being opened."""
        found: list[Ready] = []

        def ready() -> bool:
            match = self.cache.match(sequence)
            if not isinstance(match, Pending):
                found.append(match)
            return bool(found)

        wait_until(ready, "the disk does not open")
        return found[0]

    def blocks(self, tokens: range) -> Blocks:
        """Draw distinct blocks for ``tokens``, others in each group, in no order."""
        count = -(-len(tokens) // self.block_tokens)
        groups = self.namespace.layout.groups
        ids = tuple(tuple(self._random.sample(self._block_ids, count)) for _ in groups)
        return Blocks(tokens.start, ids, self.block_tokens)

    def poison(self) -> None:
        """Forget all KV: every byte of every pool becomes ``POISON``."""
        for rank in self.ranks:
            rank.pool.poison()

    def begin_store(self, sequence: Sequence, chunks: range) -> Plan | None:
        """Compute some chunks and order them out, without executing the plan."""
        size = sequence.chunk_tokens
        blocks = self.blocks(range(chunks.start * size, chunks.stop * size))
        for rank in self.ranks:
            rank.write(sequence.chunk_keys, blocks)
        return self.cache.begin_store(sequence, chunks, blocks)

    def store(self, sequence: Sequence, chunks: range | None = None) -> bool:
        """Compute chunks (by default all) and store them; False when nothing was ordered."""
        self.poison()
        every = range(len(sequence.chunk_keys))
        plan = self.begin_store(sequence, every if chunks is None else chunks)
        if plan is None:
            return False
        self.run(plan)
        return True

    def execute(self, plan: Plan) -> None:
        """Hand a plan to all workers."""
        for worker in self.workers:
            worker.execute(plan)

    def finish(self) -> None:
        """Carry the workers' answers to the cache."""
        for worker in self.workers:
            self.cache.finish(worker.poll())

    def run(self, plan: Plan) -> None:
        """Execute a store's plan and wait for it."""
        self.execute(plan)

        def done() -> bool:
            self.finish()
            return self.cache.store_done(plan.plan_id)

        wait_until(done, "a store is not answered")

    def begin_load(
        self, match: Ready, tokens: range | None = None, *, deadline: float | None = None
    ) -> Loading | None:
        """Poison the pools and begin to load ``tokens`` (by default all of the match)."""
        self.poison()
        asked = range(match.tokens) if tokens is None else tokens
        blocks = self.blocks(asked)
        load = self.cache.begin_load(match, blocks, deadline=deadline)
        return None if load is None else Loading(load, match, blocks)

    def step(self, loading: Loading) -> bool:
        """Move a load on once; tell whether it is over."""
        for plan in loading.load.poll():
            self.execute(plan)
        self.finish()
        return loading.load.outcome is not None

    def drive(self, loading: Loading) -> LoadOutcome:
        """Move a load on until it is over."""
        wait_until(lambda: self.step(loading), "a load does not end")
        return loading.outcome

    def load(
        self, match: Ready, tokens: range | None = None, *, deadline: float | None = None
    ) -> Loading:
        """Load, wait and check; the match must have something to load."""
        loading = self.begin_load(match, tokens, deadline=deadline)
        assert loading is not None, "nothing to load"
        self.drive(loading)
        self.check(loading)
        return loading

    def check(self, loading: Loading) -> None:
        """Raise ``AssertionError`` unless what a load gave is right, in its own blocks alone.

        Only while no other load or store has used this double's pools since the load began.
        """
        outcome, blocks = loading.outcome, loading.blocks
        covered = min(map(len, blocks.block_ids)) * blocks.block_tokens
        if not 0 <= outcome.end_token - outcome.start_token <= covered:
            raise AssertionError(f"{outcome} of {covered} tokens in the blocks")
        for rank in self.ranks:
            tokens = range(outcome.start_token, outcome.end_token)
            rank.check(loading.match.sequence.chunk_keys, blocks, tokens)
            rank.check_untouched(blocks)

    def replace_worker(self, number: int) -> None:
        """Let a worker die with its answers and put a new one beside its pool.

        The cache is told by ``lose_worker``, afterwards.
        """
        for index, rank in enumerate(self.ranks):
            if rank.placement.worker == number:
                self.workers[index].close()
                self.workers[index] = self._worker(rank)

    def _worker(self, rank: RankPool) -> CacheWorker:
        cache, clock = self.cache, self._clock
        own = (rank.placement, cache.arena)
        worker = CacheWorker(*own, codecs=cache.codecs, window=cache.window, clock=clock)
        worker.register_pool(rank.pool)
        return worker

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()


@dataclass(frozen=True, slots=True)
class Loading:
    """A load with what it was begun with."""

    load: Load
    match: Ready
    blocks: Blocks

    @property
    def outcome(self) -> LoadOutcome:
        """The outcome of a load that is over."""
        assert self.load.outcome is not None, "the load is not over"
        return self.load.outcome


@dataclass(frozen=True, slots=True)
class _Where:
    """Tokens and where the blocks hold them, one index tensor each."""

    tokens: torch.Tensor
    blocks: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Share:
    """The heads and (group) layers that a rank's pool holds of one group."""

    heads: range
    layers: range


@dataclass(frozen=True, slots=True)
class _Plane:
    group: int
    pool_head: int
    view: torch.Tensor  # bytes [block, token, head, dim bytes]
    rows: torch.Tensor  # bytes [token of the sequence, dim bytes]
    name: str


def _share(layout: KVLayout, group: KVGroup, placement: Placement) -> _Share:
    """Work out a rank's share; on purpose not with the planner's functions, which it checks."""
    rank, size, heads = placement.tp_rank, placement.tp_size, group.kv_heads
    first = heads * rank // size
    last = max(heads * (rank + 1) // size, first + 1)
    starts = [*layout.stage_starts, 2**31]
    begin, end = starts[placement.stage], starts[placement.stage + 1]
    layers = [index for index, layer in enumerate(group.layers) if begin <= layer < end]
    return _Share(range(first, last), range(layers[0], layers[-1] + 1) if layers else range(0))


def _owned(group: KVGroup, share: _Share) -> KVGroup:
    return KVGroup(
        kind=group.kind,
        layers=tuple(group.layers[index] for index in share.layers),
        kv_heads=len(share.heads),
        k_dim=group.k_dim,
        v_dim=group.v_dim,
        dtype=group.dtype,
        window_tokens=group.window_tokens,
    )


def _where(blocks: Blocks, group: int, tokens: range) -> _Where:
    """Say where those of the tokens lie that the blocks cover."""
    import torch

    ids = torch.tensor(blocks.block_ids[group], dtype=torch.int64)
    low = max(blocks.start_token, tokens.start)
    high = min(blocks.start_token + len(ids) * blocks.block_tokens, tokens.stop)
    covered = torch.arange(low, max(low, high))
    within = covered - blocks.start_token
    return _Where(covered, ids[within // blocks.block_tokens], within % blocks.block_tokens)
