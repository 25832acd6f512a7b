"""Loads: from a match to what vLLM is told of it. Each load ends exactly once, whatever happens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.cache.cache import Cache
from kvtier.cache.load import Load
from kvtier.cache.lossy_blocks import LossyBlocks
from kvtier.cache.match import Ready
from kvtier.cache.worth.costs import Choice
from kvtier.layout import head_range
from kvtier.types import Blocks, KVLayout, LoadOutcome, Plan, Result, ShardId, Tier
from kvtier_adapters.vllm.guard import Guard
from kvtier_adapters.vllm.messages import LoadEnd, LoadOrder
from kvtier_adapters.vllm.requests import Followed

#: A section of a shard of one chunk, for one worker.
_Unit = tuple[int, ShardId, int, int]


@dataclass(slots=True)
class _RunningLoad:
    """A load into ``blocks``. With ``units_left`` at 0 all that it moves is ordered.

    vLLM keeps the blocks until it is told that the load has ended, also of an aborted request.
    """

    load_id: int
    request_id: str
    followed: Followed
    handle: Load
    blocks: tuple[int, ...]
    start_token: int
    units_left: int
    ordered: set[_Unit] = field(default_factory=set)
    aborted: bool = False
    broken: bool = False
    open_plans: set[int] = field(default_factory=set)


class LoadDesk:
    """Begins loads, orders their plans and says how they ended. The scheduler's thread only."""

    def __init__(
        self, cache: Cache, guard: Guard, block_tokens: int, ranks: int, lossy: LossyBlocks
    ) -> None:
        """What a lossy codec brings back is marked in ``lossy``."""
        self._cache = cache
        self._lossy = lossy
        self._guard = guard
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._running: dict[int, _RunningLoad] = {}
        self._ends: list[LoadEnd] = []
        self._count = 0

    @property
    def busy(self) -> bool:
        """Tell whether a load runs, or its end has to be told."""
        return bool(self._running or self._ends)

    @property
    def running(self) -> bool:
        """Tell whether a load runs."""
        return bool(self._running)

    def begin(self, request_id: str, followed: Followed, tokens: int, deadline: float) -> None:
        """Begin to load so many tokens behind those that vLLM has found itself.

        What lies below DRAM comes up meanwhile, whether or not vLLM takes steps. Where there is
        nothing to load (any more), the load ends at once and all of it is computed.
        """
        size, start = self._block_tokens, followed.found
        ids = tuple(followed.table[start // size : (start + tokens) // size])
        match, choice = followed.match, followed.choice
        self._count += 1
        handle = None
        if match is not None:
            blocks = Blocks(start, (ids,), size)
            handle = self._guard.call_boundary(
                lambda: self._begin(match, blocks, deadline, choice), None
            )
        if handle is None:
            followed.disappointed = True
            self._ends.append(LoadEnd(self._count, request_id, ids))
            return
        units = load_units(followed.sequence.layout, self._ranks, tokens)
        load = _RunningLoad(self._count, request_id, followed, handle, ids, start, units)
        self._running[self._count] = load

    def advance(self) -> tuple[tuple[LoadOrder, ...], tuple[LoadEnd, ...]]:
        """Move every load on; return what is to be done for them, and those that have ended."""
        orders = [self._advance(load) for load in list(self._running.values())]
        ends, self._ends = tuple(self._ends), []
        return tuple(order for order in orders if order is not None), ends

    def answered(self, results: Iterable[Result]) -> None:
        """Note which plans are answered; the cache is told by others."""
        plan_ids = {result.plan_id for result in results}
        for load in self._running.values():
            load.open_plans -= plan_ids

    def cancel(self, request_id: str) -> None:
        """Let the loads of a request that has ended come to nothing."""
        for load in self._running.values():
            if load.request_id == request_id:
                load.aborted = True
                self._guard.call_boundary(load.handle.cancel, None)

    def _begin(
        self, match: Ready, blocks: Blocks, deadline: float, choice: Choice | None
    ) -> Load | None:
        handle = self._cache.begin_load(match, blocks, deadline=deadline, choice=choice)
        if handle is not None and any(hit.tier is not Tier.DRAM for hit in match.hits):
            self._cache.prefetch(match, start_token=blocks.start_token, deadline=deadline)
        return handle

    def _advance(self, load: _RunningLoad) -> LoadOrder | None:
        """Poll a load. One that raises is taken for broken, once no plan of it is out any more."""
        plans = None if load.broken else self._guard.call_boundary(load.handle.poll, None)
        if plans is None:
            load.broken = True
            self._guard.call_boundary(load.handle.cancel, None)
            if not load.open_plans:
                self._end(load, None)
            return None
        if plans:
            load.open_plans.update(plan.plan_id for plan in plans)
            load.units_left -= newly_ordered(plans, load.ordered)
            return LoadOrder(load.load_id, load.request_id, tuple(plans), load.units_left == 0)
        if load.handle.outcome is not None:
            self._end(load, load.handle.outcome)
        return None

    def _end(self, load: _RunningLoad, outcome: LoadOutcome | None) -> None:
        end_token = load.start_token if outcome is None else outcome.end_token
        good = max(end_token - load.start_token, 0) // self._block_tokens
        load.followed.disappointed |= good < len(load.blocks)
        bad = () if load.aborted else load.blocks[good:]
        if load.followed.sequence.lossy_chunks:
            first = load.start_token // self._block_tokens
            hashes = load.followed.request.block_hashes
            self._lossy.mark(hashes[first : first + good], load.blocks)
        del self._running[load.load_id]
        self._ends.append(LoadEnd(load.load_id, load.request_id, bad))


def newly_ordered(plans: Iterable[Plan], ordered: set[_Unit]) -> int:
    """Add what plans move to what is ordered; return how many heads' rows of sections are new.

    Where a tier gives up midway another one brings the chunk again, and the same is moved twice.
    """
    new = 0
    for plan in plans:
        for move in plan.moves:
            stop = move.first_section + move.section_count
            for section in range(move.first_section, stop):
                unit = (move.position_start, move.shard, move.worker, section)
                if unit not in ordered:
                    ordered.add(unit)
                    new += move.token_count * move.heads.count
    return new


def load_units(layout: KVLayout, ranks: int, tokens: int) -> int:
    """Return what all plans of a load of so many tokens move, into the pools of all ranks."""
    (group,) = layout.groups
    sections = -(-len(group.layers) // layout.section_layers)
    heads = sum(len(head_range(group.kv_heads, rank, ranks)) for rank in range(ranks))
    return tokens * sections * heads
