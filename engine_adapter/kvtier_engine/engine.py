"""The engine's front: one thread runs the steps, any thread submits, an event loop listens."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial

from kvtier.constants import CLOSE_DEADLINE_S_DEFAULT
from kvtier.interfaces import Clock
from kvtier_engine.core import DeltaSink, EngineCore
from kvtier_engine.delta_stream import DeltaStream
from kvtier_engine.engine_stats import EngineStats
from kvtier_engine.refusal import (
    EngineLimits,
    EngineStoppedError,
    QueueFullError,
    RequestRefusedError,
    check_request,
)
from kvtier_engine.types import Delta, FinishReason, GenerateRequest, Usage

_log = logging.getLogger(__name__)

#: How long the thread sleeps between looks at moves that nothing else waits for.
MOVES_POLL_S = 0.002
#: An idle engine checks its books at most this often.
INTEGRITY_INTERVAL_S = 5.0


class Engine:
    """Runs an ``EngineCore`` in a thread of its own. All public methods may be called anywhere.

    Idle, the thread sleeps until a request comes; with moves outstanding it looks at them every
    ``MOVES_POLL_S``. Should the core raise, which is a bug, every request ends with an error and
    the engine refuses all others: ``stats().error`` says why.
    """

    def __init__(self, core: EngineCore, limits: EngineLimits, clock: Clock) -> None:
        """Take over ``core``: nobody else uses it from ``start`` on."""
        self._core = core
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._clients: dict[str, tuple[GenerateRequest, DeltaSink]] = {}
        self._draining = False
        self._stop_at: float | None = None
        self._error = ""
        self._checked_s: float | None = None
        self._stats = core.stats()
        self._thread = threading.Thread(target=self._run_boundary, name="kvtier-engine")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def check(self, request: GenerateRequest) -> None:
        """Raise ``RequestRefusedError`` for a request that could never be served."""
        check_request(
            request, self._limits, self._core.pool.block_count, self._core.pool.block_tokens
        )

    def submit(self, request: GenerateRequest, on_delta: DeltaSink) -> None:
        """Take in a request, or raise ``RequestRefusedError``.

        ``on_delta`` is called on the engine's thread until a delta has a reason; it must not
        block. By that last call the request's blocks are free.
        """
        self.check(request)
        with self._changed:
            if self._draining or self._error:
                raise EngineStoppedError(self._error or "the engine is stopping")
            if len(self._clients) >= self._limits.requests_max:
                raise QueueFullError(f"{len(self._clients)} requests are in the engine")
            if request.request_id in self._clients:
                raise RequestRefusedError(f"request id {request.request_id!r} is in use")
            self._clients[request.request_id] = (request, on_delta)
            self._send(partial(self._core.submit, request, partial(self._deliver, request)))

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its last delta says so. Unknown ids are ignored."""
        with self._changed:
            if request_id in self._clients:
                self._send(partial(self._core.abort, request_id))

    def forget_prefixes(self) -> None:
        """Use nothing again of what was computed so far. Takes effect before the next step."""
        with self._changed:
            self._send(self._core.forget_prefixes)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Yield the request's deltas up to the one with a reason. Closing aborts the request.

        Raises ``RequestRefusedError`` at the first step. Deltas that are not fetched in time are
        merged, so a slow reader costs no memory and loses nothing.
        """
        stream = DeltaStream(asyncio.get_running_loop())
        self.submit(request, stream.put)
        ended = False
        try:
            while not ended:
                delta = await stream.get()
                ended = delta.finish_reason is not None
                yield delta
        finally:
            if not ended:
                self.abort(request.request_id)

    def stats(self) -> EngineStats:
        """Return the counts after the latest step."""
        return self._stats

    def stop(self, deadline_s: float) -> bool:
        """Take nothing in, let requests end for so long, abort the rest, end the thread.

        Blocks. True when no request had to be aborted. Moves still outstanding after that are
        waited for, but not for ever: the caller stops the workers next.
        """
        with self._changed:
            self._draining = True
            drained = self._changed.wait_for(lambda: not self._clients, timeout=deadline_s)
            self._stop_at = self._clock.now() + CLOSE_DEADLINE_S_DEFAULT
            self._send(self._core.abort_all)
        if self._thread.ident is not None:
            self._thread.join()
        return drained and not self._error

    def _send(self, action: Callable[[], None]) -> None:
        """Have the engine's thread do something. The caller holds the lock."""
        self._inbox.append(action)
        self._changed.notify_all()

    def _run_boundary(self) -> None:
        """Be the thread. What arrives here is a bug of the engine: answer everyone and end."""
        try:
            self._run()
        # A thread that ended in silence would leave everybody waiting.
        except Exception as error:
            _log.critical("the engine has died", exc_info=error)
            self._die(f"{type(error).__name__}: {error}")

    def _run(self) -> None:
        computed = False
        while self._await_work(computed=computed):
            while self._inbox:
                self._inbox.popleft()()
            computed = self._core.step()
            self._stats = self._core.stats()

    def _await_work(self, *, computed: bool) -> bool:
        """Sleep until there is something to do; False when the thread is to end."""
        if not self._core.busy:
            self._check_books()
        with self._changed:
            if not self._inbox and not computed:
                if self._core.busy:
                    self._changed.wait(MOVES_POLL_S)
                elif self._stop_at is None:
                    self._changed.wait_for(lambda: self._inbox)
            if self._inbox or self._stop_at is None:
                return True
            return self._core.busy and self._clock.now() < self._stop_at

    def _check_books(self) -> None:
        now = self._clock.now()
        if self._checked_s is None or now - self._checked_s >= INTEGRITY_INTERVAL_S:
            self._checked_s = now
            self._core.check_integrity()

    def _deliver(self, request: GenerateRequest, delta: Delta) -> None:
        """Hand a delta on; with the last one, the request's place becomes free."""
        with self._changed:
            _, on_delta = self._clients[request.request_id]
            if delta.finish_reason is not None:
                del self._clients[request.request_id]
                self._stats = self._core.stats()
                self._changed.notify_all()
        on_delta(delta)

    def _die(self, error: str) -> None:
        with self._changed:
            self._error = error
            self._stats = self._core.stats(error)
            clients, self._clients = list(self._clients.values()), {}
            self._changed.notify_all()
        for request, on_delta in clients:
            usage = Usage(len(request.prompt), 0)
            self._tell_boundary(on_delta, Delta("", (), (), usage, FinishReason.ERROR, error=error))

    def _tell_boundary(self, on_delta: DeltaSink, last: Delta) -> None:
        try:
            on_delta(last)
        # The others have to be told too.
        except Exception:
            _log.exception("a callback failed while the engine died")
