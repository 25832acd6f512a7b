"""The scheduler's door to the tiers below HBM: engine types in, cache calls out.

Blocks that a load or a store works on are retained here until the move has been answered, whatever
becomes of the request: a preempted or aborted request gives back its own references, and the pool
still reuses none of these blocks too early.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvtier.cache.lossy_blocks import LossyBlocks
from kvtier.cache.match import Pending, Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.worth.costs import Choice
from kvtier.constants import LOG_INTERVAL_S
from kvtier.types import (
    Blocks,
    Features,
    LoadOutcome,
    MissReason,
    Namespace,
    Plan,
    Result,
)
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.link import CacheFront, LoadEnded, LoadHandle, PlanWorker
from kvtier_engine.request import Request

_log = logging.getLogger(__name__)
_FEATURES = Features()

T = TypeVar("T")


@dataclass(slots=True)
class _Followed:
    """A request's token sequence as the cache knows it, and how much of it was offered.

    ``stored_chunks`` counts up to the last chunk that the cache took out of the blocks.
    """

    sequence: Sequence
    stored_chunks: int = 0
    offered_chunks: int = 0
    prepared: bool = False


@dataclass(slots=True)
class _RunningLoad:
    handle: LoadHandle
    block_ids: list[int]
    request: Request | None


class CacheLink:
    """The link of an engine with a cache. One thread only: the engine's.

    ``namespace`` is the engine's own; a request's salt is put in. A cache that raises is a cache
    that answers no: the fault is counted and the request goes on without it.
    """

    def __init__(
        self, cache: CacheFront, worker: PlanWorker, namespace: Namespace, pool: BlockPool
    ) -> None:
        self._cache = cache
        self._worker = worker
        self._namespace = namespace
        self._pool = pool
        self._chunk_tokens = namespace.layout.chunk_tokens
        self._followed: dict[Request, _Followed] = {}
        self._stores: dict[int, list[int]] = {}
        self._loads: list[_RunningLoad] = []
        self._lossy = LossyBlocks()
        #: Workers' answers that the cache has not taken yet: none may be lost, a block waits on it.
        self._answers: list[Result] = []
        self._logged_s: float | None = None
        self._faults = 0

    @property
    def faults(self) -> int:
        """How often the cache or the worker has raised."""
        return self._faults

    def lookup(self, request: Request) -> Ready | Pending | None:
        """Ask the cache, unless the request has reason not to. It could begin now: time counts."""
        answer = self._asked(request)
        if isinstance(answer, Pending):
            sequence, start = self._sequence(request), answer.start_token
            self._guarded_boundary(lambda: self._cache.costs.bound_lookup(sequence, start), None)
        return answer

    def prepare(self, request: Request, start_token: int) -> None:
        """Prefetch what a lookup finds, as soon as it finds something out."""
        followed = self._followed.get(request)
        if followed is not None and followed.prepared:
            return
        answer = self._asked(request)
        followed = self._followed.get(request)
        if isinstance(answer, Ready) and followed is not None:
            followed.prepared = True
            self._guarded_boundary(
                lambda: self._cache.prefetch(answer, start_token=start_token), otherwise=False
            )

    def choose(
        self, match: Ready, start_token: int, end_token: int, *, split: bool
    ) -> Choice | None:
        """Ask what is worth it; a fault is no reason to load nothing."""
        return self._guarded_boundary(
            lambda: self._cache.costs.choose(match, start_token, end_token, split=split), None
        )

    def note_prefill(self, start_token: float, tokens: int, seconds: float) -> None:
        """Pass it on."""
        self._guarded_boundary(
            lambda: self._cache.costs.note_prefill(start_token, tokens, seconds), None
        )

    def admit(self, request: Request, match: Ready, end_token: int) -> bool:
        """Count the admission once per request, and begin the load if there is one to make."""
        start, choice = request.found_tokens, request.choice
        match.sequence.asked_s = None
        if not request.admitted:
            request.admitted = True
            asked = len(request.tokens)
            self._guarded_boundary(
                lambda: self._cache.note_admission(match, start, asked, choice), None
            )
        if choice is not None and choice.split_token is not None:
            start = max(start, choice.split_token)
        if end_token <= start:
            return False
        block_ids = self._slice(request, start, end_token)
        blocks = self._blocks(start, block_ids)
        handle = self._guarded_boundary(
            lambda: self._cache.begin_load(match, blocks, choice=choice), None
        )
        if handle is None:
            return False
        self._pool.retain(block_ids)
        self._loads.append(_RunningLoad(handle, block_ids, request))
        return True

    def store(self, request: Request) -> None:
        """Offer the chunks that have been completed since the last offer."""
        if request.computed // self._chunk_tokens > self._offered(request):
            self._offer(request)

    def poll(self) -> list[LoadEnded]:
        """Carry answers to the cache and plans to the worker; never waits for either."""
        self._answers += self._guarded_boundary(self._worker.poll, list[Result]())
        if self._answers:
            self._guarded_boundary(self._hand_over_answers, None)
        for plan_id in list(self._stores):
            if self._guarded_boundary(partial(self._cache.store_done, plan_id), otherwise=False):
                self._pool.release(self._stores.pop(plan_id))
        ended = [self._advance_boundary(load) for load in list(self._loads)]
        return [each for each in ended if each is not None]

    def drop(self, request: Request) -> None:
        """Offer what was refused before once more, then forget the request."""
        followed = self._followed.get(request)
        if request.computed // self._chunk_tokens > (followed.stored_chunks if followed else 0):
            self._offer(request)
        self._followed.pop(request, None)
        for load in self._loads:
            if load.request is request:
                load.request = None
                self._guarded_boundary(load.handle.cancel, None)

    def held(self) -> Counter[int]:
        """Return the references held for running loads and for stores not yet answered."""
        held: Counter[int] = Counter()
        for block_ids in self._stores.values():
            held.update(block_ids)
        for load in self._loads:
            held.update(load.block_ids)
        return held

    def _asked(self, request: Request) -> Ready | Pending | None:
        if request.unlinked or not request.uses_prefix:
            return None
        return self._guarded_boundary(lambda: self._cache.match(self._sequence(request)), None)

    def _hand_over_answers(self) -> None:
        self._cache.finish(self._answers)
        self._answers = []

    def _offered(self, request: Request) -> int:
        followed = self._followed.get(request)
        return followed.offered_chunks if followed else 0

    def _offer(self, request: Request) -> None:
        """Begin to store every computed chunk that is not stored yet; the cache skips its own."""
        chunks_end = request.computed // self._chunk_tokens
        sequence = self._guarded_boundary(lambda: self._sequence(request), None)
        followed = self._followed.get(request)
        if sequence is None or followed is None:
            return
        blocks_lossy = self._lossy.count(request.chain.digests, request.block_ids)
        lossy_chunks = -(-blocks_lossy * self._pool.block_tokens // self._chunk_tokens)
        sequence.lossy_chunks = max(sequence.lossy_chunks, lossy_chunks)
        chunks = range(followed.stored_chunks, chunks_end)
        start = chunks.start * self._chunk_tokens
        block_ids = self._slice(request, start, chunks.stop * self._chunk_tokens)
        blocks = self._blocks(start, block_ids)
        plan = self._guarded_boundary(
            lambda: self._cache.begin_store(sequence, chunks, blocks), None
        )
        crowded = sequence.refused is MissReason.CROWDED
        if plan is None:
            followed.offered_chunks = chunks.start if crowded else chunks_end
            return
        # A plan takes what there was room for; what comes after it is offered again later.
        moved = {block_id for move in plan.moves for block_id in move.block_ids}
        taken = [block_id for block_id in block_ids if block_id in moved]
        last = start + (block_ids.index(taken[-1]) + 1) * self._pool.block_tokens
        followed.stored_chunks = last // self._chunk_tokens
        # What passes through a staging area goes in turns: with each step, as that has room.
        followed.offered_chunks = followed.stored_chunks if crowded else chunks_end
        self._pool.retain(taken)
        self._stores[plan.plan_id] = taken
        self._execute_boundary(plan)

    def _sequence(self, request: Request) -> Sequence:
        """Return the request's sequence with all of its tokens in it."""
        followed = self._followed.get(request)
        if followed is None:
            namespace = replace(self._namespace, tenant_salt=request.spec.cache_salt)
            followed = _Followed(self._cache.sequence(namespace, features=request.spec.features))
            self._followed[request] = followed
        sequence = followed.sequence
        sequence.append(request.tokens[sequence.token_count :])
        return sequence

    def _slice(self, request: Request, start: int, end: int) -> list[int]:
        step = self._pool.block_tokens
        return request.block_ids[start // step : -(-end // step)]

    def _blocks(self, start: int, block_ids: list[int]) -> Blocks:
        groups = len(self._namespace.layout.groups)
        return Blocks(start, (tuple(block_ids),) * groups, self._pool.block_tokens)

    def _advance_boundary(self, load: _RunningLoad) -> LoadEnded | None:
        """Move one load on. One that raises is taken for broken and is waited for all the same."""
        request = load.request
        try:
            for plan in load.handle.poll():
                self._execute_boundary(plan)
            outcome = load.handle.outcome
        except Exception as error:  # No request fails because of the cache.
            self._note_fault(error)
            if request is None:
                return None
            load.request = None
            self._guarded_boundary(load.handle.cancel, None)
            return LoadEnded(request, None)
        if outcome is None:
            return None
        self._loads.remove(load)
        self._pool.release(load.block_ids)
        if request is not None:
            self._mark_lossy(request, outcome)
        return None if request is None else LoadEnded(request, outcome)

    def _mark_lossy(self, request: Request, outcome: LoadOutcome) -> None:
        followed = self._followed.get(request)
        if followed is None or not followed.sequence.lossy_chunks:
            return
        step = self._pool.block_tokens
        first, stop = outcome.start_token // step, -(-outcome.end_token // step)
        self._lossy.mark(request.chain.digests[first:stop], request.block_ids[first:stop])

    def _execute_boundary(self, plan: Plan) -> None:
        """Hand a plan to the worker; one that it will not take is answered in its place."""
        try:
            self._worker.execute(plan)
        except Exception as error:  # No request fails because of the cache.
            self._note_fault(error)
            self._answers += [
                Result(plan.plan_id, worker, ok=False, reason=MissReason.WORKER, detail=str(error))
                for worker in plan.workers
            ]

    def _guarded_boundary(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what the cache says, or ``otherwise`` when it raises."""
        try:
            return call()
        except Exception as error:  # No request fails because of the cache.
            self._note_fault(error)
            return otherwise

    def _note_fault(self, error: Exception) -> None:
        """Count a fault; log one a minute."""
        self._faults += 1
        now = time.monotonic()
        if self._logged_s is None or now - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now
            _log.error("cache fault %d, served without it", self._faults, exc_info=error)
