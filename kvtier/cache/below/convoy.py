"""Payloads that come up from one directory together, each into its buffer once it is verified.

::

    reading threads   take the next ──► read, verify ──► copy into its buffer ──► settle ──┐
                            └──────────────────────────────────────────────────────────────┘

A thread goes from one to the next by itself, so a payload costs no hand-over. To the rest of the
cache each is a fill like any other: who else waits for the chunk follows it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from kvtier.cache.below.disk_source import DiskSource
from kvtier.cache.below.fill import Arriving, Fill, Hold, Origin, UnwantedError
from kvtier.cache.executor import Executor, Fault, done_boundary, outcome_boundary
from kvtier.cache.sequence import Sequence
from kvtier.codecs.opaque import Pieces, copy_out
from kvtier.constants import CONVOY_STIR_PAYLOADS, IO_THREADS_DEFAULT, SHARD_BYTES_MAX
from kvtier.errors import DeadlineError
from kvtier.interfaces import Clock
from kvtier.tiers.disk.volume import DiskPlace
from kvtier.tiers.index import Lease
from kvtier.types import MissReason, Tier

_NO_BUFFER = Pieces()


class Landing:
    """A buffer that waits for its payload. ``outcome``: once it is not touched any more.

    ``missed``: why the payload is not in it; None: it is.
    """

    def __init__(self, sequence: Sequence, buffer: Pieces, deadline: float, clock: Clock) -> None:
        self.sequence = sequence
        self._buffer = buffer
        self._deadline = deadline
        self._clock = clock
        self.missed: MissReason | None = MissReason.DEADLINE
        self._landing = False
        self._lock = threading.Lock()
        self.outcome: Tier | MissReason | None = None

    def give_up(self, reason: MissReason) -> None:
        """Wait no more. A copy that runs is awaited: its outcome follows."""
        with self._lock:
            if not self._landing:
                self._end(reason)

    def land(self, slot: memoryview) -> None:
        """Copy the payload of a slot, in the thread that has read it, if somebody waits."""
        with self._lock:
            late = self._clock.now() >= self._deadline
            self._landing = self.outcome is None and not late
        if self._landing:
            self.missed = MissReason.WORKER
            copy_out(slot, self._buffer)
            self.missed = None

    def conclude(self, outcome: Tier | MissReason) -> None:
        """Say what came of it, unless it was given up."""
        with self._lock:
            self._end(outcome)

    def _end(self, outcome: Tier | MissReason) -> None:
        if self.outcome is None:
            self._buffer = _NO_BUFFER
            self.outcome = outcome


@dataclass(slots=True, eq=False)
class _Ride:
    """One payload on its way. ``late``: the deadline came before it."""

    landing: Landing
    slot: memoryview
    work: Callable[[], None]
    done: Callable[[Fault | None], None]
    overdue_done: Callable[[Fault | None], None]
    over: bool = False
    late: bool = False


class Convoy:
    """Brings some payloads up. Filled under the cache's lock, then begun without it, once.

    ``landed`` is called once for each landing, when what its fill came to is settled, and concludes
    it; without a lock, in a reading thread or the executor's loop. ``stirred`` is called after
    some of them, and after the last.
    """

    def __init__(
        self,
        executor: Executor,
        lane: int,
        lock: AbstractContextManager[object],
        landed: Callable[[Landing, Fill], None],
        stirred: Callable[[], None],
    ) -> None:
        """``lane`` is the directory's, ``lock`` the cache's."""
        self._cache_lock = lock
        self._executor = executor
        self._lane = lane
        self._landed = landed
        self._stirred = stirred
        self._rides: list[_Ride] = []
        self._fills: dict[Landing, Fill] = {}
        self._waiting: deque[_Ride] = deque()
        self._left = 0
        self._all: Future[Fault | None] = Future()
        self._lock = threading.Lock()

    def source(self, disk: DiskSource, landing: Landing) -> ConvoySource:
        """Return what a fill reads through; it waits for ``begin``."""
        return ConvoySource(self, disk, landing)

    def join(self, landing: Landing, fill: Fill) -> None:
        """Note the fill that was started with a source of this convoy."""
        self._fills[landing] = fill

    def add(self, ride: _Ride) -> None:
        """Take a payload along."""
        self._rides.append(ride)

    def begin(self, deadline: float) -> None:
        """Start to read; until ``deadline``."""
        self._waiting.extend(self._rides)
        self._left = len(self._rides)
        self._executor.watch(self._all, self._ended, deadline=deadline, late=lambda _: None)
        for _ in range(min(self._left, IO_THREADS_DEFAULT)):
            self._executor.begin_read(self._lane, self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                ride = self._waiting.popleft() if self._waiting else None
            if ride is None:
                return
            self._bring(ride)

    def _bring(self, ride: _Ride) -> None:
        """Bring one payload up. Whatever goes wrong, it is answered and counted as brought."""
        fill, landing = self._fills[ride.landing], ride.landing
        if landing.outcome is not None:
            with self._cache_lock:
                fill.leave()  # Unless others follow it, it is not read.
        outcome = outcome_boundary(ride.work)
        with self._lock:
            ride.over = True
        if ride.late:
            done_boundary(partial(ride.overdue_done, outcome))
        else:
            if outcome is None:  # Whatever becomes of the copy, the chunk has come.
                outcome_boundary(partial(landing.land, ride.slot))
            done_boundary(partial(ride.done, outcome))
            self._conclude(ride)
        with self._lock:
            self._left -= 1
            left = self._left
        if left % CONVOY_STIR_PAYLOADS == 0:  # To wake somebody takes as long as a small read.
            done_boundary(self._stirred)
        if not left:
            self._all.set_result(None)

    def _ended(self, outcome: Fault | None) -> None:
        """At the deadline, in the executor's loop: nobody waits for what has not come.

        What no thread has begun is no fault of the directory's, and its slots are free at once.
        """
        if outcome is None:
            return
        with self._lock:
            unbegun = list(self._waiting)
            self._waiting.clear()
            late = [ride for ride in self._rides if not ride.over and ride not in unbegun]
            for ride in late:
                ride.late = True
                # Before its late end.
                done_boundary(partial(ride.done, DeadlineError("no answer in time")))
            self._left -= len(unbegun)
            all_over = bool(unbegun) and not self._left
        for ride in unbegun:
            done_boundary(partial(ride.done, UnwantedError("its turn has not come in time")))
        for ride in (*late, *unbegun):
            self._conclude(ride)
        done_boundary(self._stirred)
        if all_over:
            self._all.set_result(None)

    def _conclude(self, ride: _Ride) -> None:
        """Say what came of a payload; who waits for it would wait for ever."""
        landing = ride.landing
        if not done_boundary(partial(self._landed, landing, self._fills[landing])):
            landing.conclude(MissReason.IO_ERROR)


class ConvoySource:
    """A ``Source`` over one record of the disk tier that is read by its convoy."""

    def __init__(self, convoy: Convoy, disk: DiskSource, landing: Landing) -> None:
        self._convoy = convoy
        self._disk = disk
        self._landing = landing

    @property
    def origin(self) -> Origin:
        """As the record's."""
        return self._disk.origin

    def hold(self) -> Lease[DiskPlace] | Hold:
        """Pin the record."""
        return self._disk.hold()

    def fetch(
        self,
        arriving: Arriving,
        done: Callable[[Fault | None], None],
        *,
        deadline: float,
        late: Callable[[Fault | None], None],
    ) -> None:
        """Ride along; the convoy has the one deadline of all."""
        del deadline
        (slot,) = arriving.slots.values()
        # Nobody weighs it against computing, so it need not tell early how fast it goes.
        work = self._disk.reading(arriving, first_bytes=SHARD_BYTES_MAX)
        self._convoy.add(_Ride(self._landing, slot, work, done, late))

    def settle(self, outcome: Fault | None) -> MissReason | None:
        """As the record's."""
        return self._disk.settle(outcome)

    def end_late(self) -> None:
        """As the record's."""
        self._disk.end_late()
