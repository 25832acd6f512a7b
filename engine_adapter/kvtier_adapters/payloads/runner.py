"""A thread that drives jobs for an engine that must not wait. Every job ends exactly once."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.payloads.limits import JOBS_ACTIVE_MAX, JOBS_MAX, PAUSE_S_MAX, PAUSE_S_MIN
from kvtier_adapters.payloads.work import Steps

_log = logging.getLogger("kvtier.adapters")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Work, and what is called at its end with what came of it; None: it was lost.

    ``ended`` runs in the runner's thread, or in the one that submits where a job is refused. It
    does not raise.
    """

    steps: Steps[Any]
    ended: Callable[[Any], None]


class Runner:
    """Drives jobs in the order they came, some at a time. Any thread may call.

    Ended jobs are those that returned, raised, or were refused: because too many are there, or
    because the runner is closed. A deadline belongs to the job; it runs while the job waits.
    """

    def __init__(
        self, name: str, complaints: Complaints, *, active_max: int = JOBS_ACTIVE_MAX
    ) -> None:
        """Start the thread, a daemon named ``name``."""
        self._complaints = complaints
        self._active_max = active_max
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._closed = False
        self._woken = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def jobs(self) -> int:
        """Jobs that have not ended."""
        with self._changed:
            return len(self._waiting) + len(self._active)

    def submit(self, job: Job) -> None:
        """Take a job on, or end it as lost at once."""
        with self._changed:
            refused = self._closed or len(self._waiting) + len(self._active) >= JOBS_MAX
            if not refused:
                self._waiting.append(job)
                self._changed.notify_all()
        if refused:
            self._complaints.tell("refused", "a job is refused: too many are under way")
            self._end_boundary(job, None)

    def wake(self) -> None:
        """Go on with the jobs now: one of them may have news."""
        if self._active:
            with self._changed:
                self._woken = True
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Block until every job that was taken on has ended; False: not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._active, timeout_s)

    def close(self) -> None:
        """Take no more and wait until all have ended. Bound their deadlines first."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        pause_s = PAUSE_S_MIN
        while self._await_work(pause_s):
            over = [job for job in self._active if self._step_boundary(job)]
            if not over:
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
                continue
            pause_s = PAUSE_S_MIN
            with self._changed:
                self._active = [job for job in self._active if job not in over]
                self._changed.notify_all()

    def _await_work(self, pause_s: float) -> bool:
        """Wait for a job, or for a while if some are under way; False: closed, and none is left."""
        with self._changed:
            if self._active:
                self._changed.wait_for(lambda: self._woken or self._may_take, pause_s)
            else:
                self._changed.wait_for(lambda: self._waiting or self._closed)
            self._woken = False
            while self._may_take:
                self._active.append(self._waiting.popleft())
            return bool(self._active)

    @property
    def _may_take(self) -> bool:
        return bool(self._waiting) and len(self._active) < self._active_max

    def _step_boundary(self, job: Job) -> bool:
        """Go on with a job; True: it has ended. Whatever it raises, it ends."""
        try:
            next(job.steps)
            return False
        except StopIteration as end:
            value = end.value
        except Exception as error:  # A lost answer would hang the engine.
            self._complaints.tell("raised", f"a job raised {type(error).__name__}: {error}")
            value = None
        self._end_boundary(job, value)
        return True

    def _end_boundary(self, job: Job, value: Any) -> None:
        try:
            job.ended(value)
        except Exception:  # The other jobs go on.
            _log.exception("the end of a job raised")
