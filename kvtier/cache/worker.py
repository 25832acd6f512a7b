"""The hands beside an engine's pool: executes plans, one worker per rank.

Plans and results are plain data, so the worker may live in another process than the cache; it
maps the arena there. Copies run in one thread of its own, in the order of the plans.
"""

from __future__ import annotations

import logging
import queue
import threading

from kvtier.clock import SystemClock
from kvtier.codecs.known import KnownCodecs
from kvtier.errors import CodecError, KVTierError
from kvtier.interfaces import BlockCodec, Clock, PagedPool
from kvtier.types import Direction, MissReason, Move, Part, Placement, Plan, Result

_log = logging.getLogger("kvtier.worker")

_DLPACK_CUDA = 2


class CacheWorker:
    """Moves KV between arena slots and one pool. ``execute`` and ``poll`` may be any thread's.

    ``arena`` is the cache's own memory or a mapping of it. The engine keeps a plan's blocks alive
    and (for a store) unchanged until the plan's result was polled.
    """

    def __init__(
        self,
        placement: Placement,
        arena: memoryview,
        *,
        codecs: KnownCodecs | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``codecs`` are the cache's where it is in this process: it knows calibrations."""
        self._placement = placement
        self._arena = arena
        self._clock = clock or SystemClock()
        self._pool: PagedPool | None = None
        self._asked_to_pin = False
        self._pinned: memoryview | None = None
        self._codecs = codecs or KnownCodecs()
        self._plans: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtier-copy", daemon=True)
        self._thread.start()

    def register_pool(self, pool: PagedPool) -> None:
        """Name the pool that all later plans mean.

        The first one on a CUDA device has the arena page-locked in this process until ``close``,
        which blocks for that long; where it is refused, copies are slower.
        """
        self._pool = pool
        if not self._asked_to_pin and _on_cuda(pool):
            from kvtier_kernels import pinned

            self._asked_to_pin = True
            # A view of our own stays usable when the arena's owner closes first.
            view = memoryview(self._arena)
            self._pinned = view if pinned.register(view) else None

    def execute(self, plan: Plan) -> None:
        """Take a plan on and return at once; one that has no move for this worker is ignored."""
        if self._placement.worker in plan.workers:
            self._plans.put(plan)

    def poll(self) -> list[Result]:
        """Return the results since the last poll, in the order of their plans."""
        results: list[Result] = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self) -> None:
        """Finish the plans that were taken on, then end. A second call does nothing."""
        self._plans.put(None)
        self._thread.join()
        if self._pinned is not None:
            from kvtier_kernels import pinned

            pinned.unregister(self._pinned)
            self._pinned = None

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._results.put(self._perform_boundary(plan))

    def _perform_boundary(self, plan: Plan) -> Result:
        """Execute one plan; whatever happens becomes its result, because the cache waits for it."""
        worker = self._placement.worker
        try:
            for move in plan.moves:
                if move.worker != worker:
                    continue
                if self._clock.now() >= plan.deadline:
                    return Result(plan.plan_id, worker, ok=False, reason=MissReason.DEADLINE)
                self._move(self._codecs.get(move.codec), plan.direction, move)
        except CodecError as error:
            return Result(plan.plan_id, worker, False, MissReason.CODEC, str(error))
        except KVTierError as error:
            return Result(plan.plan_id, worker, False, MissReason.WORKER, str(error))
        except Exception as error:
            _log.exception("plan %d failed", plan.plan_id)
            return Result(plan.plan_id, worker, False, MissReason.WORKER, repr(error))
        return Result(plan.plan_id, worker, ok=True)

    def _move(self, codec: BlockCodec, direction: Direction, move: Move) -> None:
        assert self._pool is not None, "a plan before a pool"
        start = move.slot.offset + move.payload_offset
        payload = self._arena[start : move.slot.offset + move.slot.nbytes]
        if direction is Direction.LOAD:
            codec.unpack(payload, self._pool, move)
        else:
            codec.pack(self._pool, move, payload)
            self._codecs.observe(self._pool, move)


def _on_cuda(pool: PagedPool) -> bool:
    """Tell by DLPack, so that the cache needs no torch."""
    device = getattr(pool.layer_view(0, 0, Part.K), "__dlpack_device__", None)
    return device is not None and device()[0] == _DLPACK_CUDA
