"""The connector beside vLLM's scheduler: engine types in, cache calls out.

One thread, the scheduler's, and no call waits. A cache that raises is a cache that answers no.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvtier.cache.cache import Cache
from kvtier.cache.match import Pending, Ready
from kvtier.errors import KVTierError
from kvtier.interfaces import Clock
from kvtier.keys import namespace_digest
from kvtier.obs.stats import CacheStats
from kvtier.tiers.memory import ArenaHandle
from kvtier.types import Namespace, Tier
from kvtier_adapters.vllm.events import BlockEvent, EventDesk
from kvtier_adapters.vllm.geometry import block_end, load_range
from kvtier_adapters.vllm.guard import Guard
from kvtier_adapters.vllm.loads import LoadDesk
from kvtier_adapters.vllm.messages import Answers, Orders
from kvtier_adapters.vllm.requests import (
    Followed,
    reads_cache,
    request_features,
    request_namespace,
    uses_cache,
)
from kvtier_adapters.vllm.step_times import Share, StepTimes
from kvtier_adapters.vllm.stores import StoreDesk
from kvtier_adapters.vllm.windows import has_windows

_log = logging.getLogger("kvtier.vllm")
_NOTHING: Final[tuple[int | None, bool]] = (0, False)
#: From a load's order to its end go so many steps, if its reads are quicker than these.
_STEPS_MORE: Final = 2


@dataclass(frozen=True, slots=True)
class Duties:
    """What this engine does: one that only makes KV loads none, one that only uses it stores none.

    It computes on ``ranks``, each with its part of the KV heads.
    One that ``keeps_on_reset`` has vLLM forget what it computed and the tiers not.

    With more than ``running_max`` requests new ones wait, and what they will need is prefetched.
    A step computes at most ``step_tokens``. ``windows`` of the KV groups count as vLLM does, with
    the token itself; 0: none.
    """

    block_tokens: int
    running_max: int
    load_deadline_s: float
    ranks: int = 1
    loads: bool = True
    stores: bool = True
    keeps_on_reset: bool = False
    step_tokens: int = 0
    windows: tuple[int, ...] = (0,)

    @property
    def step_blocks(self) -> int:
        """How many blocks a step may take, of all groups."""
        each = -(-self.step_tokens // self.block_tokens) + self.running_max
        return len(self.windows) * each


class SchedulerSide:
    """Finds, loads and stores KV for vLLM's requests, by orders to the workers once a step."""

    def __init__(
        self,
        cache: Cache,
        namespace: Namespace,
        duties: Duties,
        clock: Clock,
        arena: ArenaHandle | None,
        events: EventDesk | None = None,
    ) -> None:
        """``arena`` is told to workers in other processes; None: all are in this one.

        Without ``events`` nothing of what the tiers hold is told.
        """
        self._cache = cache
        self._namespace = namespace
        self._duties = duties
        self._clock = clock
        self._arena = arena
        self._chunk_tokens = namespace.layout.chunk_tokens
        self._guard = Guard(clock)
        self._followed: dict[str, Followed] = {}
        size = duties.block_tokens
        self._stores = StoreDesk(cache, self._guard, size, duties.step_blocks)
        self._loads = LoadDesk(cache, self._guard, size, duties.ranks, self._stores.lossy)
        self._times = StepTimes()
        self._events = events
        self._off = ""
        self._hints_refused = False

    @property
    def busy(self) -> bool:
        """Tell whether more steps are needed, even without requests."""
        return self._loads.busy or self._stores.busy

    @property
    def off(self) -> str:
        """Why nothing is loaded or stored any more; an empty text while it is."""
        return self._off

    @property
    def faults(self) -> int:
        """How often the cache has raised."""
        return self._guard.faults

    def stats(self) -> CacheStats:
        """Count everything, now."""
        return self._cache.stats()

    def bind(self, block_pool: Any) -> None:
        """Take vLLM's block pool. Without it nothing is stored: blocks could be reused early."""
        self._stores.bind(block_pool)

    def arrived(self, request: Any) -> None:
        """Take note of a new request; where it will have to wait, bring its KV up meanwhile."""
        if not self._reads(request) or len(self._followed) < self._duties.running_max:
            return
        self._guard.call_boundary(lambda: self._prefetch(request), None)

    def lookup(self, request: Any, found: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the first ``found`` can be loaded, and whether any.

        None: not known yet, which lasts no longer than the cache's own deadline.
        """
        if not self._reads(request):
            return _NOTHING
        return self._guard.call_boundary(lambda: self._lookup(request, found), _NOTHING)

    def allocated(self, request: Any, tables: Sequence[list[int]], tokens: int) -> None:
        """Take note of a request's blocks, by group; begin to load ``tokens`` of what was found."""
        followed = self._guard.call_boundary(lambda: self._follow(request), None)
        if followed is None:
            assert not tokens, "loads are offered for requests that are followed"
            return
        # Whatever was in blocks that it had before, nothing of these is settled.
        self._stores.kept.begin(followed, tables)
        followed.settled = 0
        match = followed.match
        if match is not None and not followed.admitted:
            followed.admitted = True
            found, asked, choice = followed.found, request.num_tokens, followed.choice
            self._guard.call_boundary(
                lambda: self._cache.note_admission(match, found, asked, choice), None
            )
        if tokens:
            # A load moves on between steps only, so long steps count on top.
            patience_s = self._duties.load_deadline_s + _STEPS_MORE * self._times.longest_s
            deadline = self._clock.now() + patience_s
            self._loads.begin(request.request_id, followed, tokens, deadline)

    def tiers(self, request: Any, tokens: int) -> dict[Tier, int]:
        """Return where the tokens lay that are being loaded for a request."""
        followed = self._followed.get(request.request_id)
        if followed is None or followed.match is None:
            return {}
        size, found = self._chunk_tokens, range(followed.found, followed.found + tokens)
        counted: Counter[Tier] = Counter()
        for chunk, hit in enumerate(followed.match.hits):
            start, stop = max(chunk * size, found.start), min((chunk + 1) * size, found.stop)
            # What was prefetched counts for where it lay.
            tier = followed.sequence.came_from(chunk, hit.tier)
            counted[tier] += max(0, stop - start)
        return dict(+counted)

    def orders(self, output: Any) -> Orders:
        """Return what the workers are to do in the step that ``output`` schedules."""
        self._track(output)
        self._stores.kept.let_preempted_go()
        shares, crowded = [], False
        for request_id, tokens in output.num_scheduled_tokens.items():
            followed = self._followed.get(request_id)
            if followed is not None:
                scheduled = int(followed.request.num_computed_tokens)
                shares.append(Share(scheduled, tokens))
                stored = self._is_stored(followed)
                # An offer takes a part of a millisecond, which hundreds of requests do not have.
                if stored and not crowded:
                    crowded = self._offer(followed, followed.tables)
                followed.settled = scheduled + tokens
                if stored:
                    self._stores.kept.keep(followed)
        self._times.began(self._clock.now(), shares)
        loads, ends = self._loads.advance()
        return Orders(loads, self._stores.take(), ends, self._arena)

    def answered(self, answers: Answers) -> None:
        """Take what the workers say, and let blocks go that stores have done with."""
        for refusal in answers.refusals:
            self.switch_off(refusal)
        self._loads.answered(answers.results)
        self._guard.call_boundary(lambda: self._cache.finish(answers.results), None)
        self._stores.release_answered()

    def step_ended(self) -> None:
        """Learn from how long the oldest step that was not done took."""
        prefill = self._times.ended(self._clock.now())
        if prefill is not None:
            start, tokens, seconds = prefill.start_token, prefill.tokens, prefill.seconds
            note = self._cache.costs.note_prefill
            self._guard.call_boundary(lambda: note(start, tokens, seconds), None)

    def take_events(self) -> list[BlockEvent]:
        """Return what is to be told of the tiers after this step."""
        return self._guard.call_boundary(self._events.take, []) if self._events is not None else []

    def finished(self, request: Any, tables: Sequence[list[int]]) -> None:
        """Store what is left of a request that has ended, and forget it.

        In vLLM's ``tables`` blocks of windows may be null which are kept here.
        """
        self._loads.cancel(request.request_id)
        followed = self._followed.pop(request.request_id, None)
        if followed is not None:
            followed.offered_chunks = followed.stored_chunks
            tables = followed.tables if has_windows(self._namespace.layout) else tables
            if tables and self._is_stored(followed):
                self._offer(followed, tables)
            self._stores.kept.let_go(followed)

    def reset(self) -> bool:
        """Make all KV of this model unreachable, at once; False where that did not hold everywhere.

        While loads are under way nothing changes, and the answer is False too.
        """
        if self._duties.keeps_on_reset:
            return True
        if self._loads.running:
            return False
        if self._events is not None:
            self._events.forget()
        try:
            self._cache.invalidate(self._namespace)
        except KVTierError as error:
            _log.warning("the reset holds in this process and is not durable yet: %s", error)
            return False
        return True

    def switch_off(self, reason: str) -> None:
        """Load and store nothing from now on."""
        if not self._off:
            self._off = reason
            self._stores.kept.clear()
            _log.warning("KVTier is switched off: %s", reason)

    def close(self) -> None:
        """Write out what is left and end the cache; see ``Cache.close``."""
        self._cache.close()

    def _reads(self, request: Any) -> bool:
        served = self._duties.loads and not self._off
        return served and uses_cache(request) and reads_cache(request)

    def _lookup(self, request: Any, found: int) -> tuple[int | None, bool]:
        followed = self._follow(request)
        followed.found, followed.match, followed.choice = found, None, None
        if followed.disappointed or not self._current(followed):
            return _NOTHING
        self._hash_known(followed)
        match = self._cache.match(followed.sequence)
        if isinstance(match, Pending):
            return None, False
        size = self._duties.block_tokens
        tokens = load_range(found, match.tokens, request.num_tokens, size)
        followed.match = match
        if tokens:
            choice = self._cache.costs.choose(match, tokens.start, tokens.stop)
            followed.choice = choice
            end = block_end(min(choice.end_token, tokens.stop), size)
            tokens = range(found, max(found, end))
        return len(tokens), bool(tokens)

    def _prefetch(self, request: Any) -> None:
        followed = self._follow(request)
        self._hash_known(followed)
        match = self._cache.match(followed.sequence)
        if isinstance(match, Ready) and match.hits:
            self._cache.prefetch(match)

    def _hash_known(self, followed: Followed) -> None:
        followed.append_known()
        if self._events is not None:
            self._events.note(followed)

    def _follow(self, request: Any) -> Followed:
        """Return what is known of a request; begin to hash a new one's tokens."""
        followed = self._followed.get(request.request_id)
        if followed is None:
            features, wrong = request_features(request.kv_transfer_params)
            if wrong and not self._hints_refused:
                self._hints_refused = True
                _log.warning("hints of request %s are ignored: %s", request.request_id, wrong)
            epoch = self._cache.root(self._namespace)
            namespace = self._request_namespace(request, epoch)
            sequence = self._cache.sequence(namespace, features=features)
            followed = Followed(request, sequence, epoch=epoch)
            self._followed[request.request_id] = followed
        return followed

    def _current(self, followed: Followed) -> bool:
        """Tell whether there was no reset since a request was first seen.

        A namespace of its own hears of none, so its sequence would find what was there before.
        """
        return followed.epoch == self._cache.root(self._namespace)

    def _request_namespace(self, request: Any, root: bytes) -> Namespace:
        """Return a request's namespace; one derived from ours follows our epoch once it is raised.

        A reset raises the epoch of ours alone, and must reach all tenants and adapters.
        """
        base = self._namespace
        own = request_namespace(base, request)
        if own == base or root == namespace_digest(base):
            return own
        return replace(own, weights_id=f"{own.weights_id} {root.hex()}")

    def _is_stored(self, followed: Followed) -> bool:
        stored = self._duties.stores and not self._off and uses_cache(followed.request)
        return stored and self._current(followed)

    def _offer(self, followed: Followed, tables: Sequence[list[int]]) -> bool:
        """Store what a request has computed; True: nothing more is taken in this step."""
        crowded = self._stores.offer(followed, tables)
        if self._events is not None:
            self._events.note(followed)
        return crowded

    def _track(self, output: Any) -> None:
        """Keep the block tables: whole ones of requests that begin or resume, else what is new."""
        for new in output.scheduled_new_reqs:
            if (followed := self._followed.get(new.req_id)) is not None:
                self._stores.kept.begin(followed, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            followed = self._followed.get(request_id)
            if followed is None or blocks is None:
                continue
            if request_id in cached.resumed_req_ids or not followed.tables:
                self._stores.kept.begin(followed, blocks)
                continue
            for table, more in zip(followed.tables, blocks, strict=True):
                table.extend(more)
