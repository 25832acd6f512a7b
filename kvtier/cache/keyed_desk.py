"""What the transfers of one keyed cache share: who copies, and what was deleted.

One thread copies between callers' buffers and the arena, many payloads in one order: from DRAM
straight into the buffer of who asks (``Filling``), and what a plan of the cache says. What lies on
disk is copied by the threads that read it (``Asked``).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvtier.cache.below.convoy import Landing
from kvtier.cache.cache import Cache
from kvtier.cache.executor import ThreadPool, done_boundary
from kvtier.cache.hold import Hold
from kvtier.cache.sequence import Sequence
from kvtier.codecs.opaque import BufferPool, Pieces, copy_out, move_payload
from kvtier.constants import KEYED_ORDER_MAX
from kvtier.errors import CodecError
from kvtier.interfaces import Clock
from kvtier.types import Blocks, ChunkKey, MissReason, Namespace, Placement, Plan, Result, Tier

#: The tier that gave or holds the payload, or why there is none.
Outcome = Tier | MissReason

#: No rank of an engine has this number, so the death of one answers no copy that still runs.
WORKER: Final = Placement(worker=-1)

_NO_BUFFER: Final = Pieces()
_log = logging.getLogger("kvtier.keyed")


@dataclass(slots=True, eq=False)
class Filling:
    """A buffer that is filled with what is held. ``outcome``: once it is not touched any more.

    ``wanted`` turns false when nobody waits; a copy that has not begun then does not.
    """

    hold: Hold
    root: bytes
    buffer: Pieces
    deadline: float
    wanted: bool = True
    outcome: Outcome | None = None

    def end(self, outcome: Outcome) -> None:
        """Let go of both, whatever came of it."""
        self.buffer = _NO_BUFFER
        try:
            self.hold.release()
        finally:  # Whoever waits would wait for ever.
            self.outcome = outcome


@dataclass(slots=True, eq=False)
class Asked:
    """A buffer that is asked for below DRAM. ``answered``: ``landing`` is how it comes.

    None: not this way.
    """

    sequence: Sequence
    buffer: Pieces
    deadline: float
    answered: bool = False
    landing: Landing | None = None


class Desk:
    """What all transfers of one keyed cache share. Safe from any thread."""

    def __init__(
        self, cache: Cache, namespace: Namespace, clock: Clock, stirred: Callable[[], None]
    ) -> None:
        """``stirred`` is called in threads that copy, without a lock."""
        self.cache = cache
        self.clock = clock
        self.pool = BufferPool()
        self._stirred = stirred
        self._news = threading.Event()
        self._namespace = namespace
        self._arena = cache.arena
        self._copier = ThreadPool("kvtier-payload", 1)
        self._orders: list[Filling | Plan] = []
        self._asked: list[Asked] = []
        self._numbers = itertools.count()
        self._failed: dict[int, MissReason] = {}  # By plan, until its put has asked.
        self._doomed: set[ChunkKey] = set()
        self._closed = False
        self._lock = threading.Lock()

    def lay_out(self, buffer: Pieces) -> tuple[int, Blocks]:
        """Make a buffer known to plans; return its number, and the block that it is."""
        number = next(self._numbers)
        self.pool.add(number, buffer)
        return number, Blocks(0, ((number,),), block_tokens=1)

    def order(self, what: Filling | Plan) -> None:
        """Have something copied, with what else is ordered until ``send``.

        Once closed, it comes to nothing at once.
        """
        with self._lock:
            self._orders.append(what)
            if self._closed or len(self._orders) >= KEYED_ORDER_MAX:
                self._send()

    def ask(self, asked: Asked) -> None:
        """Have a buffer filled from below DRAM, with all that is asked for until ``send``."""
        with self._lock:
            self._asked.append(asked)

    def send(self) -> bool:
        """Have all begun that was ordered and asked for; True: some does not come this way."""
        with self._lock:
            self._send()
            asked, self._asked = self._asked, []
        try:
            for deadline in {each.deadline for each in asked}:
                some = [each for each in asked if each.deadline == deadline]
                what = [(each.sequence, each.buffer) for each in some]
                landings = self.cache.fetcher.begin(what, deadline, self._tell)
                for each, landing in zip(some, landings, strict=True):
                    each.landing = landing
        finally:  # Whoever asks would wait for ever.
            for each in asked:
                each.answered = True
        return any(each.landing is None for each in asked)

    def wait(self, seconds: float) -> None:
        """Block until a transfer may go on, or for so long."""
        self._news.wait(seconds)
        self._news.clear()

    def failure(self, plan_id: int) -> MissReason | None:
        """Return why a plan that is answered came to nothing; once."""
        with self._lock:
            return self._failed.pop(plan_id, None)

    def doom(self, keys: Iterable[ChunkKey]) -> None:
        """Let payloads go; what cannot go yet is hidden until it can."""
        with self._lock:
            self._doomed.update(keys)
        for key in keys:
            self.hidden(key)

    def hidden(self, key: ChunkKey) -> bool:
        """Tell whether something is still held that was deleted. Looks after it."""
        if not self._doomed:  # As ever; whoever deletes now does so at the same time.
            return False
        with self._lock:
            if key in self._doomed and self.cache.remove([key])[0]:
                self._doomed.remove(key)
            return key in self._doomed

    def sweep(self) -> None:
        """Look after what was deleted and could not go."""
        with self._lock:
            doomed = list(self._doomed)
            gone = self.cache.remove(doomed)
            self._doomed.difference_update(k for k, left in zip(doomed, gone, strict=True) if left)

    def close(self) -> None:
        """Finish the copies that were taken on and take no more."""
        with self._lock:
            self._send()
            self._closed = True
        self._copier.close(None)

    def _tell(self) -> None:
        self._news.set()
        self._stirred()

    def _send(self) -> None:
        orders, self._orders = self._orders, []
        if self._closed:
            self._answer(orders, [MissReason.CANCELLED] * len(orders))
        elif orders:
            self._copier.submit(lambda: self._carry_out_boundary(orders))

    def _carry_out_boundary(self, orders: list[Filling | Plan]) -> None:
        """Copy in our own thread. Whoever waits gets an outcome, whatever happens."""
        outcomes: list[Outcome] = []
        try:
            outcomes.extend(map(self._copy, orders))
        except Exception:  # Those that were not copied get an outcome below.
            _log.exception("a payload could not be copied")
        outcomes += [MissReason.WORKER] * (len(orders) - len(outcomes))
        try:
            with self._lock:
                self._answer(orders, outcomes)
        except Exception:  # The thread goes on: later orders are copied by it, too.
            _log.exception("what was copied could not be told")
        self._tell()

    def _copy(self, order: Filling | Plan) -> Outcome:
        if self.clock.now() >= order.deadline:
            return MissReason.DEADLINE
        if isinstance(order, Filling):
            if not order.wanted:
                return MissReason.DEADLINE
            slot = order.hold.slot
            copy_out(self._arena[slot.offset : slot.offset + slot.nbytes], order.buffer)
            return Tier.DRAM
        try:
            for move in order.moves:
                move_payload(order.direction, self._arena, self.pool, move)
        except CodecError:  # Of another size than the buffer.
            return MissReason.CODEC
        return Tier.DRAM

    def _answer(self, orders: SequenceOf[Filling | Plan], outcomes: SequenceOf[Outcome]) -> None:
        """Tell the cache of plans, all at once, and end fillings; under our lock."""
        results: list[Result] = []
        # What was read in an epoch that is over counts for nothing.
        root = self.cache.root(self._namespace)
        for order, outcome in zip(orders, outcomes, strict=True):
            reason = outcome if isinstance(outcome, MissReason) else None
            if isinstance(order, Filling):
                # Others wait for what comes after it.
                told = outcome if order.root == root else MissReason.ABSENT
                done_boundary(partial(order.end, told))
                continue
            if reason is not None:
                self._failed[order.plan_id] = reason
            results.append(Result(order.plan_id, WORKER.worker, ok=not reason, reason=reason))
        if results:
            self.cache.finish(results)
