"""Plans that workers owe an answer to."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvtier.cache.executor import done_boundary
from kvtier.types import MissReason, Plan, Result

#: Called with None when every worker did all of its moves, else with why not.
Answered = Callable[[MissReason | None], None]


@dataclass(slots=True, eq=False)
class _OpenPlan:
    waiting: set[int]
    answered: Answered
    reason: MissReason | None = None


class OpenPlans:
    """Numbers plans and waits for their workers. Used under the cache's lock.

    A plan counts only when all of its workers did all of it: the minimum over ranks.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[int, _OpenPlan] = {}

    def new_id(self) -> int:
        """Return a number that no plan of this cache has had."""
        return next(self._ids)

    def open(self, plan: Plan, answered: Answered) -> None:
        """Wait for every worker of a plan, then call ``answered`` once."""
        assert plan.moves, "an empty plan is never answered"
        self._open[plan.plan_id] = _OpenPlan(set(plan.workers), answered)

    def is_open(self, plan_id: int) -> bool:
        """Tell whether a worker still owes its answer."""
        return plan_id in self._open

    def answer(self, result: Result) -> None:
        """Take one worker's answer; one that is not owed (any more) is ignored."""
        plan = self._open.get(result.plan_id)
        if plan is None or result.worker not in plan.waiting:
            return
        plan.waiting.remove(result.worker)
        if not result.ok:
            plan.reason = result.reason or MissReason.WORKER
        if not plan.waiting:
            del self._open[result.plan_id]
            # Others wait for what comes after it: their blocks are held until then.
            done_boundary(partial(plan.answered, plan.reason))

    def lose(self, worker: int) -> None:
        """Answer all that a dead worker owes as failed."""
        owed = [plan_id for plan_id, plan in self._open.items() if worker in plan.waiting]
        for plan_id in owed:
            self.answer(Result(plan_id, worker, ok=False, reason=MissReason.WORKER))
