"""The hands beside an engine's pool: executes plans, one worker per rank.

Plans and results are plain data, so the worker may live in another process than the cache; it
maps the arena there. Copies of the host run in one thread of its own, in the order of the plans;
those of a GPU run by themselves, and are asked for in turns of the caller (``turns``).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvtier.cache.turns import Turns
from kvtier.clock import SystemClock
from kvtier.codecs.gpu import (
    GpuMover,
    Shipment,
    StripedCodec,
    Wait,
    batches,
    cuda_mover,
    mark,
    one_by_one,
)
from kvtier.codecs.known import KnownCodecs
from kvtier.errors import CodecError, KVTierError
from kvtier.interfaces import Clock, PagedPool
from kvtier.tiers.window import Window
from kvtier.types import Direction, MissReason, Move, Moved, Part, Placement, Plan, Result

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
        window: Window | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Where the cache is in this process, ``codecs`` and ``window`` are its own.

        The one knows calibrations; through the other pools in the host's memory are filled from
        memory that is lent to the cache.
        """
        self._placement = placement
        self._arena = arena
        self._window = window
        self._clock = clock or SystemClock()
        self._pool: PagedPool | None = None
        self._asked_to_pin = False
        self._pinned: memoryview | None = None
        self._codecs = codecs or KnownCodecs()
        self._cuda = False
        self._turns = Turns(self._clock)
        self._turning = threading.Lock()
        # One for each thread that moves: the caller's, and our own.
        self._movers: dict[bool, GpuMover] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtier-copy", daemon=True)
        self._thread.start()

    def register_pool(self, pool: PagedPool) -> None:
        """Name the pool that all later plans mean.

        The first one on a CUDA device has the arena page-locked in this process until ``close``,
        which blocks for that long; where it is refused, copies are slower.
        """
        self._pool = pool
        self._movers = {}
        self._cuda = _on_cuda(pool)
        if self._window is not None:  # A device copies from what is page-locked alone.
            self._window.open(self._placement.worker, reads=not self._cuda)
        if not self._asked_to_pin and self._cuda:
            from kvtier_kernels import pinned

            self._asked_to_pin = True
            # A view of our own stays usable when the arena's owner closes first.
            view = memoryview(self._arena)
            self._pinned = view if pinned.register(view) else None

    def execute(self, plan: Plan) -> None:
        """Take a plan on and return at once; one that has no move for this worker is ignored.

        On CUDA it starts after all that the pool's stream has been given before this call, by this
        thread or another: what wrote the blocks of a store, what last read those of a load.
        """
        if self._placement.worker not in plan.workers:
            return
        after = mark(self._pool) if self._pool is not None and self._cuda else None
        if not self._goes_in_turns(plan):
            self._jobs.put(partial(self._carry_whole, plan, after))
            return
        with self._turning:
            self._turns.add(self._carry_boundary(plan, after, in_turns=True), self._cut_short(plan))
        self._turn()

    def poll(self) -> list[Result]:
        """Return the results since the last poll; on CUDA, give the device more of its moves.

        That takes ``COPY_TURN_S`` of the caller, and waits for nothing.
        """
        self._turn()
        results: list[Result] = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self) -> None:
        """Finish the plans that were taken on, then end. A second call does nothing."""
        with self._turning:
            for result in self._turns.finish():
                self._results.put(result)
        self._jobs.put(None)
        self._thread.join()
        if self._pinned is not None:
            from kvtier_kernels import pinned

            pinned.unregister(self._pinned)
            self._pinned = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _goes_in_turns(self, plan: Plan) -> bool:
        """Whether the device makes all of the moves by itself, with nothing to do for the host."""
        if self._pinned is None or not self._cuda:
            return False
        try:
            codecs = [self._codecs.get(name) for name in {m.codec for m in self._mine(plan)}]
        except KVTierError:
            return False  # It will be the plan's result.
        return all(isinstance(codec, StripedCodec) for codec in codecs)

    def _turn(self) -> None:
        with self._turning:
            for result in self._turns.turn():
                self._results.put(result)

    def _carry_whole(self, plan: Plan, after: Any) -> None:
        turns = Turns(self._clock)
        turns.add(self._carry_boundary(plan, after, in_turns=False), self._cut_short(plan))
        for result in turns.finish():
            self._results.put(result)

    def _carry_boundary(
        self, plan: Plan, after: Any, *, in_turns: bool
    ) -> Generator[Wait, None, Result]:
        """Carry out one plan; whatever happens becomes its result, because the cache waits for it.

        Pauses as ``GpuMover.moving`` does.
        """
        worker = self._placement.worker
        began = self._clock.now()
        try:
            if not (yield from self._ship(plan, after, in_turns=in_turns)):
                return Result(plan.plan_id, worker, ok=False, reason=MissReason.DEADLINE)
            moved = _moved(plan, worker, self._clock.now() - began)
            if plan.direction is Direction.STORE and in_turns:
                # To learn is to compute: not the caller's work.
                taught: Future[None] = Future()
                self._jobs.put(partial(self._teach_boundary, plan, taught))
                yield taught.done
                taught.result()
            elif plan.direction is Direction.STORE:
                self._teach(plan)
        except CodecError as error:
            return Result(plan.plan_id, worker, False, MissReason.CODEC, str(error))
        except KVTierError as error:
            return Result(plan.plan_id, worker, False, MissReason.WORKER, str(error))
        # The cache waits for an answer, whatever went wrong.
        except Exception as error:
            _log.exception("plan %d failed", plan.plan_id)
            return Result(plan.plan_id, worker, False, MissReason.WORKER, repr(error))
        return Result(plan.plan_id, worker, ok=True, moved=moved)

    def _cut_short(self, plan: Plan) -> Result:
        worker = self._placement.worker
        return Result(plan.plan_id, worker, False, MissReason.WORKER, "it was interrupted")

    def _shipment(self, move: Move) -> Shipment:
        slot = move.slot
        if self._window is not None and self._window.holds_slot(slot):
            payload = self._window.view(slot)[move.payload_offset :]
        else:
            payload = self._arena[slot.offset + move.payload_offset : slot.offset + slot.nbytes]
        return Shipment(self._codecs.get(move.codec), move, payload)

    def _ship(self, plan: Plan, after: Any, *, in_turns: bool) -> Generator[Wait, None, bool]:
        """Make the worker's moves, on CUDA as many together as go; False after the deadline."""
        assert self._pool is not None, "a plan before a pool"

        def late() -> bool:
            return self._clock.now() >= plan.deadline

        shipments = map(self._shipment, self._mine(plan))
        if self._cuda:
            if in_turns not in self._movers:
                self._movers[in_turns] = cuda_mover(self._pool)
            mover = self._movers[in_turns]
            return (yield from mover.moving(plan.direction, batches(shipments), after, late))
        for shipment in shipments:
            if late():
                return False
            one_by_one(plan.direction, [shipment], self._pool)
        return True

    def _teach_boundary(self, plan: Plan, taught: Future[None]) -> None:
        """Have codecs learn in our own thread, and pass on what happens to who waits for it."""
        try:
            self._teach(plan)
        except Exception as error:  # It is raised where the plan's result is made.
            taught.set_exception(error)
        else:
            taught.set_result(None)

    def _teach(self, plan: Plan) -> None:
        """Show codecs that learn what was stored; a second packing, for the disk, is no news."""
        assert self._pool is not None, "a plan before a pool"
        seen: set[object] = set()
        for move in self._mine(plan):
            if (place := (move.shard, move.position_start, move.first_section)) not in seen:
                seen.add(place)
                self._codecs.observe(self._pool, move)

    def _mine(self, plan: Plan) -> Iterator[Move]:
        return (move for move in plan.moves if move.worker == self._placement.worker)


def _moved(plan: Plan, worker: int, seconds: float) -> Moved | None:
    """Say what a load has cost; its first move's codec stands for all of them."""
    mine = [move for move in plan.moves if move.worker == worker]
    if plan.direction is not Direction.LOAD or not mine:
        return None
    nbytes = sum(move.slot.nbytes * move.section_count // move.layout.sections for move in mine)
    return Moved(mine[0].codec, nbytes, seconds)


def _on_cuda(pool: PagedPool) -> bool:
    """Tell by DLPack, so that the cache needs no torch."""
    device = getattr(pool.layer_view(0, 0, Part.K), "__dlpack_device__", None)
    return device is not None and device()[0] == _DLPACK_CUDA
