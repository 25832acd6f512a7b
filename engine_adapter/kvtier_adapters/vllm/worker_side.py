"""The connector beside one rank's KV cache: executes plans and tells vLLM how loads ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.cache.worker import CacheWorker
from kvtier.types import MissReason, Placement, Plan, Result
from kvtier_adapters.vllm.messages import Answers, LoadEnd, LoadOrder, Orders

_log = logging.getLogger("kvtier.vllm")

#: Makes a rank's worker once the arena can be reached, or says why it cannot be.
OpenWorker = Callable[[Orders], CacheWorker | str]


@dataclass(slots=True)
class _KnownLoad:
    """A load of which plans came here. ``told`` once vLLM knows that it has ended."""

    request_id: str
    open_plans: set[int] = field(default_factory=set)
    last: bool = False
    failed: bool = False
    told: bool = False


class WorkerSide:
    """One rank. The thread of the model runner only.

    A load whose plans are all done is told at once. Any other is told when the scheduler's side,
    which knows what the other ranks did, says how it ended: each load once.
    """

    def __init__(self, placement: Placement) -> None:
        """Until ``serve``, plans are answered as failed."""
        self.placement = placement
        self._open_worker: OpenWorker | None = None
        self._worker: CacheWorker | None = None
        self._refusal = ""
        self._refusal_told = False
        self._loads: dict[int, _KnownLoad] = {}
        self._load_of_plan: dict[int, int] = {}
        self._results: list[Result] = []
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()

    def serve(self, open_worker: OpenWorker) -> None:
        """Name what makes this rank's worker: at the first orders if not before."""
        self._open_worker = open_worker

    def refuse(self, reason: str) -> None:
        """Do nothing from now on, and let the scheduler's side know why."""
        self._refusal = self._refusal or reason

    def open(self, orders: Orders) -> None:
        """Make the worker, unless that was done or refused; on CUDA it page-locks the arena."""
        if self._worker is None and not self._refusal and self._open_worker is not None:
            self._open_boundary(orders, self._open_worker)

    def execute(self, orders: Orders) -> None:
        """Take a step's orders on, and return at once."""
        self.open(orders)
        for order in orders.loads:
            self._load(order)
        for plan in orders.stores:
            self._execute_boundary(plan)
        for end in orders.ends:
            self._end(end)

    def take_received(self) -> set[str]:
        """Look what is done; return the requests whose loads have ended since the last time."""
        for result in self._worker.poll() if self._worker is not None else ():
            self._note(result)
        received, self._received = self._received, set()
        return received

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that loads have left without KV since the last time."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_failed(self) -> set[str]:
        """Return the requests of which nothing was loaded that counts, since the last time."""
        failed, self._failed = self._failed, set()
        return failed

    def take_answers(self) -> Answers:
        """Return what the scheduler's side has to know."""
        results, self._results = tuple(self._results), []
        refusals = (self._refusal,) if self._refusal and not self._refusal_told else ()
        self._refusal_told = bool(self._refusal)
        return Answers(results, refusals)

    def close(self) -> None:
        """Finish the plans that were taken on, and end."""
        if self._worker is not None:
            self._worker.close()

    def _open_boundary(self, orders: Orders, open_worker: OpenWorker) -> None:
        """Make the worker; one that cannot be made is a refusal."""
        try:
            worker = open_worker(orders)
        except Exception as error:  # Whatever it is: requests are answered without a cache.
            _log.exception("the worker of rank %d could not be set up", self.placement.tp_rank)
            worker = f"rank {self.placement.tp_rank}: {type(error).__name__}: {error}"
        if isinstance(worker, str):
            self.refuse(worker)
        else:
            self._worker = worker

    def _load(self, order: LoadOrder) -> None:
        load = self._loads.setdefault(order.load_id, _KnownLoad(order.request_id))
        load.last = order.last
        for plan in order.plans:
            if self.placement.worker in plan.workers:
                load.open_plans.add(plan.plan_id)
                self._load_of_plan[plan.plan_id] = order.load_id
                self._execute_boundary(plan)
        self._tell_if_done(load)

    def _execute_boundary(self, plan: Plan) -> None:
        """Hand a plan on; one that nobody takes is answered here: the cache waits for it."""
        reason = self._refusal or "there is no worker"
        if self._worker is not None:
            try:
                self._worker.execute(plan)
            except Exception as error:  # As above.
                _log.exception("plan %d was not taken on", plan.plan_id)
                reason = repr(error)
            else:
                return
        worker = self.placement.worker
        if worker in plan.workers:
            self._note(Result(plan.plan_id, worker, False, MissReason.WORKER, reason))

    def _note(self, result: Result) -> None:
        self._results.append(result)
        load = self._loads.get(self._load_of_plan.pop(result.plan_id, 0))
        if load is not None:
            load.open_plans.discard(result.plan_id)
            load.failed |= not result.ok
            self._tell_if_done(load)

    def _tell_if_done(self, load: _KnownLoad) -> None:
        if load.last and not (load.open_plans or load.failed or load.told):
            load.told = True
            self._received.add(load.request_id)

    def _end(self, end: LoadEnd) -> None:
        load = self._loads.pop(end.load_id, None)
        if load is not None and load.told:
            return
        self._received.add(end.request_id)
        self._bad_blocks.update(end.bad_blocks)
        if end.failed:
            self._failed.add(end.request_id)
