"""Loads: from a match to what vLLM is told of it. Each load ends exactly once, whatever happens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.cache.cache import Cache
from kvtier.cache.load import Load
from kvtier.cache.lossy_blocks import LossyBlocks
from kvtier.cache.match import Ready
from kvtier.cache.planner import first_needed
from kvtier.cache.worth.costs import Choice
from kvtier.layout import head_range
from kvtier.types import Blocks, KVLayout, LoadOutcome, Plan, Result, ShardId, Tier
from kvtier_adapters.vllm.guard import Guard
from kvtier_adapters.vllm.messages import LoadEnd, LoadOrder
from kvtier_adapters.vllm.requests import Followed
from kvtier_adapters.vllm.windows import NULL_BLOCK, has_windows, whole_group

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
    blocks: tuple[tuple[int, ...], ...]
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
        some = slice(start // size, (start + tokens) // size)
        ids = tuple(tuple(table[some]) for table in followed.tables)
        match, choice = followed.match, followed.choice
        layout, blocks = followed.sequence.layout, Blocks(start, ids, size)
        self._count += 1
        handle = None
        if match is not None and all_there(layout, blocks):
            handle = self._guard.call_boundary(
                lambda: self._begin(match, blocks, deadline, choice), None
            )
        if handle is None:
            followed.disappointed = True
            self._ends.append(load_end(self._count, request_id, layout, ids))
            return
        units = load_units(layout, self._ranks, range(start, start + tokens), size)
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
        load.followed.disappointed |= good < len(load.blocks[0])
        bad = tuple(() if load.aborted else ids[good:] for ids in load.blocks)
        layout = load.followed.sequence.layout
        if load.followed.sequence.lossy_chunks:
            first = load.start_token // self._block_tokens
            hashes = load.followed.request.block_hashes
            self._lossy.mark(hashes[first : first + good], load.blocks[whole_group(layout)])
        del self._running[load.load_id]
        self._ends.append(load_end(load.load_id, load.request_id, layout, bad))


def load_end(
    load_id: int, request_id: str, layout: KVLayout, bad: tuple[tuple[int, ...], ...]
) -> LoadEnd:
    """Return what is told of a load whose last blocks are bad, by group.

    Of windows and of several groups vLLM can only be told that all of it has failed.
    """
    if len(layout.groups) > 1 or has_windows(layout):
        return LoadEnd(load_id, request_id, failed=bool(bad[0]))
    return LoadEnd(load_id, request_id, bad[0])


def all_there(layout: KVLayout, blocks: Blocks) -> bool:
    """Tell whether vLLM has blocks for all that the token after them attends to."""
    size, start = blocks.block_tokens, blocks.start_token
    end = start + len(blocks.block_ids[0]) * size
    return all(
        NULL_BLOCK not in ids[max(0, first_needed(group, end, size) - start) // size :]
        for group, ids in zip(layout.groups, blocks.block_ids, strict=True)
    )


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


def load_units(layout: KVLayout, ranks: int, tokens: range, block_tokens: int) -> int:
    """Return what all plans of a load of these tokens move, into the pools of all ranks."""
    units = 0
    for group in layout.groups:
        start = max(tokens.start, first_needed(group, tokens.stop, block_tokens))
        sections = -(-len(group.layers) // layout.section_layers)
        heads = sum(len(head_range(group.kv_heads, rank, ranks)) for rank in range(ranks))
        units += (tokens.stop - start) * sections * heads
    return units
