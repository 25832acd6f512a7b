"""Which requests compute which tokens in the next step, and who holds which blocks.

A step serves running requests first (decodes, then prefills in chunks), then takes in waiting
ones. What keeps it free of deadlock: of the requests that hold blocks, the one that ranks first
can always go on. It takes blocks from those behind it; when nothing runs for want of blocks, the
load that ranks last is given up, or a running request makes way for a loaded one before it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush

from kvtier.cache.match import Pending, Ready
from kvtier.interfaces import Clock
from kvtier.types import Tier
from kvtier_engine.block_pool import BlockPool, BlockPoolError
from kvtier_engine.coming import ComingBlocks
from kvtier_engine.decisions import (
    blocks_for,
    choose_end,
    decodes_first,
    most_junior,
    rank,
    usable_tokens,
)
from kvtier_engine.explain import explain
from kvtier_engine.link import Link, LoadEnded
from kvtier_engine.request import Behind, Request, Status
from kvtier_engine.scheduling import SchedulerConfig, SchedulerCounters, Share, Step, Verdict
from kvtier_engine.types import GenerateRequest

#: Waiting requests looked at in one step, at most.
ADMISSION_SCAN_MAX = 64


class Scheduler:
    """Owner of all requests from submission to their end. One thread only: the engine's.

    ``on_admitted`` is told of each request once, when it first runs.
    """

    def __init__(
        self,
        pool: BlockPool,
        link: Link,
        config: SchedulerConfig,
        clock: Clock,
        on_admitted: Callable[[Request], None],
    ) -> None:
        self._pool = pool
        self._link = link
        self._config = config
        self._clock = clock
        self._on_admitted = on_admitted
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._loading: set[Request] = set()
        self._free_rows = list(range(config.max_num_seqs))
        self._rows_removed: list[int] = []
        self._coming = ComingBlocks()
        self._submitted = 0
        self.counters = SchedulerCounters()

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return [*self._running, *self._loading, *self._waiting]

    @property
    def running_count(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def loading_count(self) -> int:
        """Requests whose load is under way."""
        return len(self._loading)

    def submit(self, spec: GenerateRequest) -> Request:
        """Put a request in line. The caller has checked that it fits into the pool."""
        now = self._clock.now()
        place = rank(now, spec.priority, self._submitted, self._config.priority_step_s)
        self._submitted += 1
        chain = self._pool.chain(spec.cache_salt)
        request = Request(spec, place, chain, now, list(spec.prompt))
        self._wait(request)
        return request

    def schedule(self) -> Step:
        """Decide the next step and take the blocks for it. An empty one is due when all wait."""
        for ended in self._link.poll():
            self._end_load(ended)
        shares: list[Share] = []
        stalled = self._serve_running(shares)
        admitted: list[Request] = []
        blocked = self._take_in(shares, admitted)
        needer = stalled or blocked
        if not shares and needer is not None:
            self._unblock(needer)
        return Step(tuple(shares), self._take_removed_rows(), tuple(admitted))

    def advance(self, share: Share) -> None:
        """Note that a share has been computed: its full blocks can be found and stored."""
        share.request.computed += share.count
        share.request.pass_over()
        self._index(share.request)
        self._link.store(share.request)

    def end(self, request: Request) -> int | None:
        """Take a request out, whatever its status; return the row it held. Its blocks are free."""
        assert request.status is not Status.FINISHED, f"{request.spec.request_id} ended twice"
        if request.status is Status.RUNNING:
            self._running.remove(request)
        elif request.status is Status.LOADING:
            self._loading.remove(request)
        else:
            self._waiting.remove(request)
        self._link.drop(request)
        self._release(request)
        request.status = Status.FINISHED
        row, request.row = request.row, None
        if row is not None:
            heappush(self._free_rows, row)
        return row

    def forget_prefixes(self) -> tuple[int, ...]:
        """Let nothing computed so far be used again: every request starts over.

        Return the rows that have become free.
        """
        for request in list(self._running):
            self._preempt(request)
        for request in [*self._loading, *self._waiting]:
            self._give_back(request)
        self._pool.forget()
        return self._take_removed_rows()

    def check_integrity(self) -> None:
        """Raise ``BlockPoolError`` unless every reference is accounted for."""
        expected = self._link.held()
        for request in self.requests:
            expected.update(request.block_ids)
        self._pool.check_integrity(expected)
        if len(self._free_rows) + len(self._running) != self._config.max_num_seqs:
            raise BlockPoolError(f"{len(self._running)} rows in use, free: {self._free_rows}")

    def _serve_running(self, shares: list[Share]) -> Request | None:
        """Give each running request its tokens; return the first one that found no block."""
        budget = self._config.max_num_batched_tokens
        stalled: Request | None = None
        for request in decodes_first(self._running):
            if request.status is not Status.RUNNING:
                continue
            count = min(request.computable, budget)
            if count and not self._grow(request):
                stalled = stalled or request
            elif count:
                shares.append(Share(request, count))
                budget -= count
        return stalled

    def _take_in(self, shares: list[Share], admitted: list[Request]) -> Request | None:
        """Let waiting requests run or load; return the first one for which there is no room.

        Nothing passes a request that lacks room, except those that hold their blocks already.
        """
        budget = self._config.max_num_batched_tokens - sum(share.count for share in shares)
        blocked: Request | None = None
        for request in self._waiting[:ADMISSION_SCAN_MAX]:
            if not self._free_rows or not budget:
                break
            if blocked is not None and request.status is not Status.LOADED:
                continue
            verdict = self._admit(request)
            if verdict is Verdict.NO_ROOM:
                blocked = request
            elif verdict is Verdict.RUNS:
                self._run(request)
                admitted.append(request)
                shares.append(Share(request, min(request.computable, budget)))
                budget -= shares[-1].count
        return blocked

    def _admit(self, request: Request) -> Verdict:
        """Find what is cached of a request and take its blocks, all that its tokens need."""
        if request.status is Status.LOADED:
            return Verdict.RUNS
        step = self._pool.block_tokens
        request.chain.extend(request.tokens)
        usable = usable_tokens(len(request.tokens), step) if request.uses_prefix else 0
        found = self._pool.find(request.chain, usable // step)
        if len(found) * step < usable and self._coming.worth_waiting_for(request, len(found)):
            return Verdict.LATER
        needed = blocks_for(len(request.tokens), step) - len(found)
        # One block of headroom per running request: else their next steps would preempt this one.
        room = needed + len(self._running)
        if not self._has_room(room, found, request):
            self._link.prepare(request, len(found) * step)
            return Verdict.NO_ROOM
        # Asked even where HBM has all of it: the tiers should know what is in use.
        answer = self._link.lookup(request)
        if isinstance(answer, Pending):
            if len(found) * step < usable:
                request.status = Status.LOOKUP
                return Verdict.LATER
            answer = None
        # Computing the front of what is loaded is free where nobody else wants the device.
        alone = not self._running and len(self._waiting) == 1
        choose = partial(self._link.choose, split=alone)
        end = choose_end(request, answer, len(found) * step, usable, step, choose)
        if end is not None and len(self._loading) >= self._config.max_num_seqs:
            return Verdict.LATER
        self._take_blocks(request, found, needed)
        if answer is not None and self._begin_load(request, answer, end):
            return Verdict.PARKED
        return Verdict.RUNS

    def _has_room(self, room: int, found: list[int], request: Request) -> bool:
        """Tell whether so many blocks are to be had, taking them from parked juniors if need be."""
        if self._pool.available_beside(found) >= room:
            return True
        juniors = [
            each
            for each in self._waiting
            if each.status is Status.LOADED and each.rank > request.rank
        ]
        reserve = sum(self._pool.releasable(each.block_ids) for each in juniors)
        if self._pool.available_beside(found) + reserve < room:
            return False
        while self._pool.available_beside(found) < room:
            junior = most_junior(juniors, request)
            if junior is None:
                return False
            juniors.remove(junior)
            self._give_back(junior)
        return True

    def _take_blocks(self, request: Request, found: list[int], needed: int) -> None:
        self._pool.retain(found)
        fresh = self._pool.allocate(needed, after=found[-1] if found else None)
        assert fresh is not None, f"{needed} blocks were promised"
        request.take_blocks([*found, *fresh])
        request.computed = request.found_tokens = len(found) * self._pool.block_tokens
        request.indexed = len(found)
        self._coming.expect(request, len(found))

    def _begin_load(self, request: Request, answer: Ready, end: int | None) -> bool:
        """Tell the tiers of the admission, and park the request if they have something to load."""
        if not self._link.admit(request, answer, end or request.found_tokens):
            return False
        if request.choice is not None and request.choice.split_token is not None:
            request.behind = Behind(request.choice.split_token)
            return False
        self._waiting.remove(request)
        self._loading.add(request)
        request.status = Status.LOADING
        return True

    def _end_load(self, ended: LoadEnded) -> None:
        """Use what a load brought. The rest of its blocks is computed as if never loaded."""
        request, outcome, behind = ended.request, ended.outcome, ended.request.behind
        if behind is None:
            self._loading.remove(request)
            request.status = Status.LOADED
            self._wait(request)
        if outcome is None:
            request.unlinked = True
            (self._give_back if behind is None else self._preempt)(request)
            return
        end = min(outcome.end_token, usable_tokens(len(request.tokens), self._pool.block_tokens))
        request.outcome, request.loaded_by_tier = outcome, dict(outcome.tokens_by_tier)
        if behind is None:
            request.computed = max(request.computed, end)
        else:
            behind.end_token = end
            self._note_run(request)
            request.pass_over()
        self._index(request)

    def _run(self, request: Request) -> None:
        self._waiting.remove(request)
        insort(self._running, request, key=lambda each: each.rank)
        request.row = heappop(self._free_rows)
        request.admitted = True
        request.status = Status.RUNNING
        if request.behind is None:
            self._note_run(request)

    def _note_run(self, request: Request) -> None:
        """Count what a request had from the tiers, once it is known."""
        if request.cached_by_tier is not None:
            self.counters.refound_tokens += request.computed
            return
        cached = {Tier.HBM: request.found_tokens, **request.loaded_by_tier}
        request.cached_by_tier = {tier: count for tier, count in cached.items() if count}
        if request.spec.explain:
            request.why = explain(request)
        self.counters.hit_tokens.update(request.cached_by_tier)
        self.counters.admitted_tokens += len(request.tokens)
        self._on_admitted(request)

    def _grow(self, request: Request) -> bool:
        """Give a running request the block its next token needs, from juniors if need be."""
        needed = blocks_for(len(request.tokens), self._pool.block_tokens) - len(request.block_ids)
        while needed > 0:
            fresh = self._pool.allocate(needed, after=request.block_ids[-1])
            if fresh is not None:
                request.take_blocks(fresh)
                return True
            victim = most_junior(self._victims(), request)
            if victim is None:
                return False
            if victim.status is Status.RUNNING:
                self._preempt(victim)
            else:
                self._give_back(victim)
        return True

    def _victims(self) -> Iterator[Request]:
        """Yield the holders of blocks that could be had at once by taking theirs."""
        for request in [*self._running, *self._waiting]:
            if request.block_ids and self._pool.releasable(request.block_ids):
                yield request

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the line; what it has generated is computed again."""
        if request.behind is not None:
            self._link.drop(request)
        self._running.remove(request)
        assert request.row is not None
        self._rows_removed.append(request.row)
        heappush(self._free_rows, request.row)
        request.row = None
        self._release(request)
        request.status = Status.PREEMPTED
        request.preemptions += 1
        self.counters.preemptions += 1
        self._wait(request)

    def _take_removed_rows(self) -> tuple[int, ...]:
        rows_removed, self._rows_removed = tuple(self._rows_removed), []
        return rows_removed

    def _give_back(self, request: Request) -> None:
        """Take the blocks of a request that does not run; it starts over from the line."""
        if request.status is Status.LOADING:
            self._link.drop(request)
            self._loading.remove(request)
            self._wait(request)
            self.counters.loads_given_up += 1
        self._release(request)
        if request.status is not Status.PREEMPTED:
            request.status = Status.WAITING

    def _unblock(self, needer: Request) -> None:
        """Let someone go on when nothing runs because ``needer`` lacks blocks.

        A loaded request that ranks before it may hold them and wait for its row; else the load
        that ranks last is cancelled, unless blocks enough are on their way back already.
        """
        loaded = (each for each in self._waiting if each.status is Status.LOADED)
        if needer.status is Status.RUNNING and any(each.rank < needer.rank for each in loaded):
            self._preempt(needer)
            return
        held = self._link.held()
        returning = sum(self._pool.references(each) == count for each, count in held.items())
        needed = blocks_for(len(needer.tokens), self._pool.block_tokens) - len(needer.block_ids)
        if self._pool.available + returning >= needed:
            return
        load = most_junior(self._loading, needer)
        if load is not None:
            self._give_back(load)

    def _release(self, request: Request) -> None:
        """Give back a request's blocks. It is no longer about to bring any."""
        self._coming.settle(request, 0, len(request.chain.digests))
        if request.behind is not None and request.behind.end_token is None:
            self._note_run(request)
        request.loaded_by_tier, request.behind = {}, None
        request.found_tokens = request.indexed = 0
        self._pool.release(request.give_blocks())

    def _index(self, request: Request) -> None:
        """Make a request's computed full blocks findable."""
        full = request.computed // self._pool.block_tokens
        if full <= request.indexed:
            return
        request.chain.extend(request.tokens)
        self._pool.register(request.chain, request.block_ids[:full])
        self._coming.settle(request, request.indexed, full)
        request.indexed = full

    def _wait(self, request: Request) -> None:
        insort(self._waiting, request, key=lambda each: each.rank)
