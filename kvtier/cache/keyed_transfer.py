"""Payloads on their way between callers' buffers and a cache, many in one transfer.

::

    get   waiting ──► looked up ──► load ──► its plans copied ──► outcome
    put   waiting ──► room taken ──► copied ──────────────────► outcome

Each payload is a sequence of one chunk to the cache, and each buffer a block of one token to the
worker that copies. A copy starts only in a ``poll`` and before the deadline; one that runs is
awaited. So nothing touches a buffer after its outcome is known.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Protocol

from kvtier.cache.keyed_desk import WORKER, Asked, Desk, Filling, Outcome
from kvtier.cache.load import Load
from kvtier.cache.match import Pending
from kvtier.cache.sequence import Sequence
from kvtier.codecs.opaque import OpaqueCodec, Pieces, opaque_layout
from kvtier.constants import KEYED_INFLIGHT_BYTES, KEYED_INFLIGHT_MAX
from kvtier.types import ChunkKey, KVLayout, MissReason, Namespace, Placement, Tier

_PAUSE_S_MIN: Final = 20e-6
_PAUSE_S_MAX: Final = 1e-3


@lru_cache(maxsize=1024)
def _shape(nbytes: int) -> tuple[KVLayout, str]:
    """Return how a payload of that size is laid out, and the name of what packs it."""
    return opaque_layout(nbytes), OpaqueCodec(nbytes).name


class Payload(Sequence):
    """What one foreign key names, as a sequence of one chunk. ``nbytes`` None: of any size."""

    def __init__(
        self, namespace: Namespace, root: bytes, key: ChunkKey, nbytes: int | None
    ) -> None:
        super().__init__(namespace, root)
        self._chunk_keys = [key]
        self._layout, self._codec = _shape(1 if nbytes is None else nbytes)
        self._of_any_size = nbytes is None

    @property
    def key(self) -> ChunkKey:
        """The address of the payload."""
        return self._chunk_keys[0]

    @property
    def layout(self) -> KVLayout:
        """One token, and as many layers as there are sections."""
        return self._layout

    @property
    def codec(self) -> str:
        """What says the payload's size."""
        return self._codec

    def takes(self, codec: str) -> bool:
        """Take what has the payload's size, or any payload."""
        return self._of_any_size or codec == self._codec

    @property
    def workers(self) -> tuple[Placement, ...]:
        """The one that knows the callers' buffers."""
        return (WORKER,)


class Item(Protocol):
    """One payload of a transfer, from when it is begun until its outcome."""

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer."""
        ...

    def step(self, deadline: float) -> Outcome | None:
        """Go on as far as possible without waiting; None: ask again."""
        ...

    def cancel(self) -> None:
        """Begin nothing more; ``step`` still tells the outcome."""
        ...


@dataclass(slots=True, eq=False)
class Get:
    """A payload on its way into a buffer."""

    desk: Desk
    payload: Payload
    buffer: Pieces
    filling: Filling | None = None
    asked: Asked | None = None
    load: Load | None = None
    number: int = -1
    plans: list[int] = field(default_factory=list)
    failure: MissReason | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer."""
        return self.buffer.nbytes

    def step(self, deadline: float) -> Outcome | None:
        """See ``Item.step``."""
        if self.filling is not None:
            return self.filling.outcome
        if self.load is None:
            outcome = self._begin(deadline)
            if self.load is None:
                return outcome
        for plan in self.load.poll():
            self.plans.append(plan.plan_id)
            self.desk.order(plan)
        loaded = self.load.outcome
        if loaded is None:
            return None
        self.desk.pool.remove(self.number)
        for plan_id in self.plans:
            self.desk.failure(plan_id)
        if loaded.tokens_by_tier:
            return next(iter(loaded.tokens_by_tier))
        return self._missed(loaded.misses[0].reason if loaded.misses else MissReason.ABSENT)

    def cancel(self) -> None:
        """See ``Item.cancel``."""
        if self.filling is not None:
            self.filling.wanted = False
        if self.load is not None:
            self.load.cancel()

    def _begin(self, deadline: float) -> Outcome | None:
        """Find out where it lies, and begin to bring it from there."""
        desk = self.desk
        late = desk.clock.now() >= deadline
        if self.asked is not None and self.failure is None:
            outcome = self._landed(late=late)
            if self.failure is None:
                return outcome
        if late:
            return MissReason.DEADLINE
        if desk.hidden(self.payload.key):
            return MissReason.ABSENT
        hold = desk.cache.hold(self.payload)
        if hold is not None:
            self.filling = Filling(hold, self.payload.root, self.buffer, deadline)
            desk.order(self.filling)
            return None
        if self.asked is None:
            self.asked = Asked(self.payload, self.buffer, deadline)
            desk.ask(self.asked)
            return None
        return self._load(deadline)

    def _landed(self, *, late: bool) -> Outcome | None:
        """Tell what came of asking the disk. ``failure`` is set where it is to come otherwise."""
        assert self.asked is not None, "asked before"
        if not self.asked.answered:
            return None
        landing = self.asked.landing
        if landing is None:
            self.failure = MissReason.ABSENT
            return None
        if late:
            landing.give_up(MissReason.DEADLINE)
        outcome = landing.outcome
        if isinstance(outcome, MissReason) and outcome is not MissReason.DEADLINE:
            self.failure = outcome  # Another tier may have it.
        return outcome

    def _load(self, deadline: float) -> Outcome | None:
        desk = self.desk
        match = desk.cache.match(self.payload)
        if isinstance(match, Pending):
            return None
        desk.cache.note_admission(match, 0, 1)
        self.number, blocks = desk.lay_out(self.buffer)
        self.load = desk.cache.begin_load(match, blocks, deadline=deadline) if match.hits else None
        if self.load is None:
            desk.pool.remove(self.number)
            return self._missed(MissReason.ABSENT)
        return None

    def _missed(self, reason: MissReason) -> MissReason:
        """Return why there is none; where nobody has it now, why the disk did not give it."""
        absent = reason in {MissReason.ABSENT, MissReason.CODEC}  # The latter: of another size.
        return (self.failure or MissReason.ABSENT) if absent else reason


@dataclass(slots=True, eq=False)
class Put:
    """A payload on its way out of a buffer."""

    desk: Desk
    payload: Payload
    buffer: Pieces
    plan_id: int | None = None
    number: int = -1

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer."""
        return self.buffer.nbytes

    def step(self, deadline: float) -> Outcome | None:
        """See ``Item.step``."""
        desk = self.desk
        if self.plan_id is None:
            if desk.clock.now() >= deadline:
                return self._refusal or MissReason.DEADLINE
            return None if desk.hidden(self.payload.key) else self._begin()
        if not desk.cache.store_done(self.plan_id):
            return None
        desk.pool.remove(self.number)
        return desk.failure(self.plan_id) or Tier.DRAM

    def cancel(self) -> None:
        """See ``Item.cancel``: a copy into the cache's own memory is finished."""

    def _begin(self) -> Outcome | None:
        if self._order() or self._crowded:
            return None
        if self._refusal is not None:
            return self._refusal
        cache = self.desk.cache
        match = cache.match(self.payload)
        if isinstance(match, Pending):
            return None
        if match.hits:
            return match.hits[0].tier
        # The same key is on its way in, or something of another size has its place.
        if not cache.remove([self.payload.key])[0] or self._order() or self._crowded:
            return None
        return self.payload.refused or MissReason.UNAVAILABLE

    @property
    def _refusal(self) -> MissReason | None:
        return self.payload.refused

    @property
    def _crowded(self) -> bool:
        """True when it takes its turn, as others leave the staging area that it passes through."""
        return self._refusal is MissReason.CROWDED

    def _order(self) -> bool:
        """Order the copy; False: it is held already, or refused."""
        number, blocks = self.desk.lay_out(self.buffer)
        plan = self.desk.cache.begin_store(self.payload, range(1), blocks)
        if plan is None:
            self.desk.pool.remove(number)
            return False
        self.number, self.plan_id = number, plan.plan_id
        self.desk.order(plan)
        return True


class Transfer:
    """Payloads under way. ``poll`` it until it is complete. Any thread may call.

    The buffers stay the caller's and must live, and those of a put must not change, until then.
    """

    def __init__(self, desk: Desk, items: Iterable[Item], deadline: float) -> None:
        self._desk = desk
        self.deadline = deadline
        self._waiting = deque(enumerate(items))
        self._active: dict[int, Item] = {}
        self._active_bytes = 0
        self._outcomes: dict[int, Outcome] = {}
        self._ended: MissReason | None = None
        self._lock = threading.Lock()

    @property
    def complete(self) -> bool:
        """Tell whether all outcomes are known."""
        return not self._active and not self._waiting

    def poll(self) -> list[Outcome] | None:
        """Go on without waiting; return one outcome per key, in order, once all are known.

        Complete soon after the deadline, whatever the tiers do: what has not come is a miss by
        then, and a copy that runs is awaited. After a miss a buffer's content is undefined.
        """
        with self._lock:
            self._advance()
            if self._desk.send():
                self._advance()
                self._desk.send()
            if not self.complete:
                return None
            return [self._outcomes[number] for number in range(len(self._outcomes))]

    def wait(self) -> list[Outcome]:
        """Block until complete; for threads that have nothing else to do."""
        pause_s = _PAUSE_S_MIN
        while (outcomes := self.poll()) is None:
            self._desk.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        return outcomes

    def cancel(self) -> None:
        """Begin nothing more. Completion follows when the copies that run have ended."""
        self.end(MissReason.CANCELLED)

    def end(self, reason: MissReason) -> None:
        """As ``cancel``, for another reason."""
        with self._lock:
            if self._ended is None:
                self._ended = reason
            for item in self._active.values():
                item.cancel()

    def _advance(self) -> None:
        for number, item in list(self._active.items()):
            self._step(number, item)
        # Some together, or none: what begins together costs less.
        if len(self._active) > KEYED_INFLIGHT_MAX // 2 and self._ended is None:
            return
        if self._active_bytes > KEYED_INFLIGHT_BYTES // 2 and self._ended is None:
            return
        while self._waiting and self._may_begin(self._waiting[0][1]):
            number, item = self._waiting.popleft()
            if self._ended is not None:
                self._outcomes[number] = self._ended
                continue
            self._active[number] = item
            self._active_bytes += item.nbytes
            self._step(number, item)

    def _may_begin(self, item: Item) -> bool:
        few = len(self._active) < KEYED_INFLIGHT_MAX
        small = self._active_bytes + item.nbytes <= KEYED_INFLIGHT_BYTES
        return not self._active or self._ended is not None or (few and small)

    def _step(self, number: int, item: Item) -> None:
        ended = self._ended
        outcome = item.step(self.deadline if ended is None else -math.inf)
        if outcome is None:
            return
        del self._active[number]
        self._active_bytes -= item.nbytes
        # What was not even begun when all was ended gives that as its reason.
        late = outcome is MissReason.DEADLINE
        self._outcomes[number] = ended if ended is not None and late else outcome
