"""The engine without its thread: one call of ``step`` is one step of everything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.interfaces import Clock
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.decisions import prefill_of
from kvtier_engine.engine_stats import EngineCounters, EngineStats
from kvtier_engine.link import Link
from kvtier_engine.output import Detokenizer, OutputState
from kvtier_engine.request import Request
from kvtier_engine.scheduler import Scheduler
from kvtier_engine.scheduling import SchedulerConfig, Share, Step
from kvtier_engine.types import (
    Delta,
    FinishReason,
    GenerateRequest,
    RowStep,
    SamplingParams,
    StepBatch,
    StepOutput,
    TokenLogprob,
    Usage,
)

_log = logging.getLogger(__name__)

DeltaSink = Callable[[Delta], None]


def tell_nobody(request: Request) -> None:
    """Be the ``on_admitted`` of an engine whose admissions nobody follows."""
    del request


class Runner(Protocol):
    """What computes a step, as ``kvtier_engine.runner.ModelRunner``."""

    def add_row(
        self,
        row: int,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        generated: tuple[int, ...] = (),
    ) -> None:
        """Give a free row to a request that has generated so much; leave it free when raising."""
        ...

    def remove_row(self, row: int) -> None:
        """Free a row."""
        ...

    def step(self, batch: StepBatch) -> StepOutput:
        """Compute a batch; when this returns, the KV of its tokens is in its blocks."""
        ...


@dataclass(eq=False, slots=True)
class _Client:
    """Who waits for a request's deltas, and what turns its tokens into them."""

    request: Request
    output: OutputState
    on_delta: DeltaSink
    shown_prompt_logprobs: bool = False


class EngineCore:
    """Scheduler, runner and outputs. One thread only.

    A request is answered with deltas through its ``on_delta``, on this thread; the last one has a
    reason. A callback that raises has its request aborted. A step that raises fails the requests
    of that step and no other.
    """

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        link: Link,
        *,
        config: SchedulerConfig,
        detokenizer: Callable[[], Detokenizer],
        end_ids: frozenset[int],
        clock: Clock,
        on_admitted: Callable[[Request], None] = tell_nobody,
    ) -> None:
        """``detokenizer`` makes a fresh one for each request; ``end_ids`` end an answer.

        ``on_admitted`` is told of each request once, when it first runs; it must not block or
        raise.
        """
        self._runner = runner
        self._pool = pool
        self._link = link
        self._scheduler = Scheduler(pool, link, config, clock, on_admitted)
        self._detokenizer = detokenizer
        self._end_ids = end_ids
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._rows: set[int] = set()
        self._counters = EngineCounters()

    @property
    def pool(self) -> BlockPool:
        """The books of the blocks."""
        return self._pool

    @property
    def has_requests(self) -> bool:
        """True while a request has not ended."""
        return bool(self._clients)

    @property
    def busy(self) -> bool:
        """True while ``step`` has something to do or to wait for."""
        return bool(self._clients) or bool(self._link.held())

    def submit(self, spec: GenerateRequest, on_delta: DeltaSink) -> None:
        """Take in a request that ``check_request`` has let pass; its id is not in use."""
        assert spec.request_id not in self._clients, f"{spec.request_id} is there already"
        output = OutputState(spec.sampling, self._detokenizer(), self._end_ids)
        request = self._scheduler.submit(spec)
        self._clients[spec.request_id] = _Client(request, output, on_delta)

    def abort(self, request_id: str) -> None:
        """End a request now; one that is not there is ignored."""
        client = self._clients.get(request_id)
        if client is not None:
            self._end(client, Delta("", (), (), self._usage(client.request), FinishReason.ABORT))

    def abort_all(self) -> None:
        """End every request now."""
        for request_id in list(self._clients):
            self.abort(request_id)

    def forget_prefixes(self) -> None:
        """Use nothing again of what was computed so far: the weights or the memory have changed.

        Requests that run go on from their tokens, computed anew.
        """
        for row in self._scheduler.forget_prefixes():
            self._remove_row_boundary(row)

    def step(self) -> bool:
        """Schedule, compute, deliver. False when there was nothing to compute."""
        step = self._scheduler.schedule()
        refused = self._change_rows(step)
        shares = [share for share in step.shares if share.request not in refused]
        if not shares:
            return False
        began = self._clock.now()
        output = self._run_boundary(shares)
        if output is None:
            return True
        self._counters.steps += 1
        prefill = prefill_of(shares)
        if prefill is not None:
            self._link.note_prefill(*prefill, self._clock.now() - began)
        for share in shares:
            self._scheduler.advance(share)
        rows = zip(shares, output.sampled, output.prompt_logprobs, strict=True)
        for share, sampled, prompt_logprobs in rows:
            client = self._clients[share.request.spec.request_id]
            assert (sampled is None) == (share.request.remaining > 0), "a token unasked or unmade"
            self._note_prompt_logprobs(share, prompt_logprobs)
            if sampled is not None:
                self._note_token(client, sampled)
        return True

    def check_integrity(self) -> None:
        """Raise ``BlockPoolError`` unless every block and reference is accounted for."""
        self._scheduler.check_integrity()

    def stats(self, error: str = "") -> EngineStats:
        """Return the counts as they stand."""
        counters, scheduled = self._counters, self._scheduler.counters
        running, loading = self._scheduler.running_count, self._scheduler.loading_count
        return EngineStats(
            running=running,
            waiting=len(self._clients) - running - loading,
            loading=loading,
            blocks_total=self._pool.block_count,
            blocks_used=self._pool.block_count - self._pool.available,
            blocks_cached=self._pool.cached,
            blocks_evicted=self._pool.evicted,
            preemptions=scheduled.preemptions,
            loads_given_up=scheduled.loads_given_up,
            cache_faults=self._link.faults,
            steps=counters.steps,
            step_errors=counters.step_errors,
            prompt_tokens=scheduled.admitted_tokens,
            generated_tokens=counters.generated_tokens,
            refound_tokens=scheduled.refound_tokens,
            hit_tokens=dict(scheduled.hit_tokens),
            finished=dict(counters.finished),
            ttft=counters.ttft.copy(),
            itl=counters.itl.copy(),
            error=error,
        )

    def _change_rows(self, step: Step) -> set[Request]:
        """Drop and add the runner's rows; return the requests that it would not take."""
        for row in step.rows_removed:
            self._remove_row_boundary(row)
        refused: set[Request] = set()
        for request in step.admitted:
            error = self._add_row_boundary(request)
            if error is not None:
                refused.add(request)
                self._fail(request, error)
        return refused

    def _add_row_boundary(self, request: Request) -> Exception | None:
        spec = request.spec
        assert request.row is not None
        generated = tuple(request.tokens[len(spec.prompt) :])
        try:
            self._runner.add_row(request.row, spec.prompt, spec.sampling, generated)
        # A runner's bug ends the request that met it, not the engine.
        except Exception as error:
            _log.exception("the runner refused %s", spec.request_id)
            return error
        self._rows.add(request.row)
        return None

    def _remove_row_boundary(self, row: int) -> None:
        self._rows.remove(row)
        try:
            self._runner.remove_row(row)
        # As above; the row stays lost to the runner, and the others go on.
        except Exception:
            _log.exception("the runner could not free row %d", row)

    def _run_boundary(self, shares: Sequence[Share]) -> StepOutput | None:
        """Compute the shares; when that raises, fail their requests and return None."""
        try:
            return self._runner.step(StepBatch(tuple(_row_step(share) for share in shares)))
        # Whatever a step raises, its requests are answered and the engine goes on.
        except Exception as error:
            _log.exception("a step of %d requests failed", len(shares))
            self._counters.step_errors += 1
            for share in shares:
                self._fail(share.request, error)
            return None

    def _fail(self, request: Request, error: Exception) -> None:
        client = self._clients[request.spec.request_id]
        detail = f"{type(error).__name__}: {error}"
        usage = self._usage(request)
        self._end(client, Delta("", (), (), usage, FinishReason.ERROR, error=detail))

    def _note_prompt_logprobs(self, share: Share, values: Sequence[TokenLogprob]) -> None:
        """Put a chunk's values in their places; a preempted prefill brings some of them twice."""
        if not values:
            return
        request = share.request
        first = request.computed - share.count + 1
        kept = request.prompt_logprobs or [None]
        request.prompt_logprobs = [*kept[:first], *values, *kept[first + len(values) :]]

    def _note_token(self, client: _Client, sampled: TokenLogprob) -> None:
        """Append a sampled token and tell the client."""
        request = client.request
        request.tokens.append(sampled.token_id)
        self._counters.generated_tokens += 1
        now = self._clock.now()
        if request.last_token_s is None:
            self._counters.ttft.observe(now - request.submitted_s)
        else:
            self._counters.itl.observe(now - request.last_token_s)
        request.last_token_s = now
        piece = client.output.push(sampled.token_id)
        prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        if not client.shown_prompt_logprobs:
            client.shown_prompt_logprobs = True
            if request.spec.sampling.prompt_logprobs is not None:
                prompt_logprobs = tuple(request.prompt_logprobs or [None])
        delta = Delta(
            text=piece.text,
            token_ids=(sampled.token_id,),
            logprobs=() if request.spec.sampling.top_logprobs is None else (sampled,),
            usage=self._usage(request),
            finish_reason=piece.finish_reason,
            prompt_logprobs=prompt_logprobs,
        )
        if piece.finish_reason is not None:
            self._end(client, delta)
        elif not self._deliver_boundary(client, delta):
            self.abort(request.spec.request_id)

    def _end(self, client: _Client, last: Delta) -> None:
        """Take a request out, then tell its client: by then its blocks are free."""
        assert last.finish_reason is not None
        del self._clients[client.request.spec.request_id]
        row = self._scheduler.end(client.request)
        if row is not None and row in self._rows:
            self._remove_row_boundary(row)
        self._counters.finished[last.finish_reason] += 1
        self._deliver_boundary(client, last)

    def _deliver_boundary(self, client: _Client, delta: Delta) -> bool:
        """Hand a delta over; False when the client's callback raised."""
        try:
            client.on_delta(delta)
        # The client's code: its faults are its own.
        except Exception:
            _log.exception("the callback of %s failed", client.request.spec.request_id)
            return False
        return True

    def _usage(self, request: Request) -> Usage:
        cached = request.cached_by_tier or {}
        return Usage(request.prompt_count, request.generated_count, dict(cached), request.why)


def _row_step(share: Share) -> RowStep:
    request, start = share.request, share.request.computed
    assert request.row is not None
    return RowStep(
        row=request.row,
        token_ids=tuple(request.tokens[start : start + share.count]),
        start=start,
        block_ids=(request.table,),
        sample=share.count == request.remaining,
    )
