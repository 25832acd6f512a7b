"""Bringing one chunk from a lower tier into DRAM, section by section, for whoever wants it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from kvtier.cache.executor import Fault, done_boundary
from kvtier.cache.shapes import Shapes
from kvtier.cache.worth.costs import Costs
from kvtier.cache.worth.transfer import Transfer
from kvtier.constants import LENT_BYTES_MAX
from kvtier.errors import DeadlineError, TierError
from kvtier.interfaces import Clock, Loan
from kvtier.obs.counters import Counters
from kvtier.tiers.arrival import Expected
from kvtier.tiers.dram import DramRecord, DramTier
from kvtier.types import ChunkKey, Entry, KVLayout, MissReason, Placement, ShardId, Tier

_log = logging.getLogger("kvtier.below")

#: Called without the lock with a shard and how many of its first sections may be used.
Progress = Callable[[ShardId, int], None]


class UnwantedError(TierError):
    """Nobody waits for a chunk any more, so the rest of it was not read."""


class ObjectGoneError(FileNotFoundError):
    """An object that a lower tier was said to hold is not there."""


class NotLentError(TierError):
    """A chunk that was to be read where it lies has to be copied."""


class Hold(Protocol):
    """Keeps a chunk where it is."""

    def release(self) -> None:
        """Let it go; a second call does nothing."""
        ...


class Origin(NamedTuple):
    """A chunk in a lower tier. ``shards`` are those that lie there; perhaps not all it has.

    ``place`` tells apart those that have one tier. ``stored_bytes`` are what is read of it, where
    that is not what it takes in DRAM. What is ``lendable`` may be read where it lies.
    """

    tier: Tier
    place: str
    key: ChunkKey
    parent: ChunkKey | None
    position: int
    namespace: bytes
    codec: str
    shards: Collection[ShardId]
    stored_bytes: int | None = None
    lendable: bool = False


@dataclass(frozen=True, slots=True)
class Arriving:
    """Where a fill's bytes go: a slot for each shard, what it must be, whom to tell.

    The slots are the source's until its work has ended. ``wanted`` turns false when nobody waits
    any more; a source may then leave off with an ``UnwantedError``. Without slots, what it brings
    are not bytes but loans of the shards, as long as those are expected to be, handed to ``lend``
    before any progress; where it cannot, that is a ``NotLentError``.
    """

    slots: dict[ShardId, memoryview]
    expected: dict[ShardId, Expected]
    progress: Progress
    wanted: Callable[[], bool]
    lend: Callable[[ShardId, Loan], None]


class Source(Protocol):
    """What brings one chunk up, once. Used under the cache's lock."""

    @property
    def origin(self) -> Origin:
        """What is there."""
        ...

    def hold(self) -> Hold:
        """Keep it there until the hold is released."""
        ...

    def fetch(
        self,
        arriving: Arriving,
        done: Callable[[Fault | None], None],
        *,
        deadline: float,
        late: Callable[[Fault | None], None],
    ) -> None:
        """Begin to read and verify; returns at once.

        ``done`` is called once, without the lock: at the deadline with a ``DeadlineError``, and
        then ``late`` once nothing touches the slots any more.
        """
        ...

    def settle(self, outcome: Fault | None) -> MissReason | None:
        """Make the tier draw its conclusion; return why the chunk did not come, None if it did."""
        ...

    def end_late(self) -> None:
        """Note that what was overdue has ended."""
        ...


@dataclass(slots=True, eq=False)
class Fill:
    """A chunk on its way. ``verified`` counts, per shard, the sections that may be used.

    Whoever uses the record pins it for itself; the fill keeps its own pin until its I/O has
    ended, also after its deadline, so no slot is given away while anything may write to it.
    ``followers`` is how many wait for it; without any, what is not begun is not read. What is
    ``lent`` is in nobody's reach but theirs: it does not stay once they have done with it.
    """

    record: DramRecord
    source: Source
    hold: Hold
    verified: dict[ShardId, int]
    transfer: Transfer
    started: float
    deadline: float
    failure: MissReason | None = None
    followers: int = 1
    lent: bool = False

    def leave(self) -> None:
        """Wait for it no more; once for each ``start`` and ``follow``."""
        self.followers -= 1


class Filler:
    """Starts fills and settles them. Used under the cache's lock, which its callbacks take.

    ``on_filled`` is called under the lock with each fill that has come to an end in time, and
    ``on_end`` with any and the seconds that it took.
    """

    def __init__(
        self,
        dram: DramTier,
        lock: threading.Lock,
        counters: Counters,
        clock: Clock,
        shapes: Shapes,
        costs: Costs,
        on_filled: Callable[[Fill, KVLayout], None],
        on_end: Callable[[Fill, float], None] | None = None,
        lend_to: Collection[Placement] = (),
    ) -> None:
        """What may be read where it lies is left there for the workers of ``lend_to``.

        Without any, all that comes up is copied, to stay in DRAM.
        """
        self._dram = dram
        self._lend_to = lend_to
        self._shapes = shapes
        self._lock = lock
        self._counters = counters
        self._clock = clock
        self._costs = costs
        self._on_filled = on_filled
        self._on_end = on_end
        self._running: dict[ChunkKey, Fill] = {}
        self.late_count = 0  # Reads that are overdue and have not ended.

    def running(self, key: ChunkKey) -> bool:
        """Tell whether a chunk is on its way."""
        return key in self._running

    def follow(self, key: ChunkKey) -> Fill | None:
        """Wait for a chunk that is on its way, until ``Fill.leave``; None: it is not."""
        fill = self._running.get(key)
        if fill is not None:
            fill.followers += 1
        return fill

    def start(
        self,
        source: Source,
        layout: KVLayout,
        deadline: float,
        workers: Collection[Placement] = (),
    ) -> Fill | None:
        """Read a chunk into DRAM until ``deadline``, or borrow it; followed by the caller.

        ``workers`` are those that it is for, where that are not the cache's. None: no room beside
        what is pinned, or lent.
        """
        origin = source.origin
        shape = self._shapes.of(layout, origin.position, origin.codec)
        # What lies below may lack shards of the chunk; what comes into DRAM then lacks them too.
        sizes = {shard: size for shard, size in shape.sizes.items() if shard in origin.shards}
        entry = Entry(origin.key, origin.parent, sum(sizes.values()), origin.position)
        lent = self._lent(origin, entry.nbytes, workers)
        make_room = self._dram.borrow if lent else self._dram.reserve
        record = make_room(entry, origin.namespace, origin.codec, sizes)
        if record is None:
            return None
        verified = dict.fromkeys(sizes, 0)
        now = self._clock.now()
        geometries = {shard: shape.geometries[shard] for shard in sizes}
        transfer = Transfer(self._costs.link(origin.tier), geometries, now)
        fill = Fill(record, source, source.hold(), verified, transfer, now, deadline, lent=lent)
        self._running[entry.key] = fill

        def progress(shard: ShardId, sections: int) -> None:
            with self._lock:
                verified[shard] = sections
                transfer.progress(shard, sections, self._clock.now())

        def lend(shard: ShardId, loan: Loan) -> None:
            with self._lock:
                self._dram.window.lend(record.places[shard], loan)

        expected = {
            shard: Expected(
                chunk=entry.key,
                shard=shard,
                namespace=origin.namespace,
                codec=origin.codec,
                layout=shape.layouts[shard],
                geometry=shape.geometries[shard],
            )
            for shard in sizes
        }
        own = {} if lent else record.places
        slots = {shard: self._dram.arena.view(slot) for shard, slot in own.items()}

        def wanted() -> bool:
            return fill.failure is None and fill.followers > 0

        source.fetch(
            Arriving(slots, expected, progress, wanted, lend),
            lambda outcome: self._settle(fill, layout, outcome),
            deadline=deadline,
            late=lambda _: self._end_late(fill),
        )
        return fill

    def _lent(self, origin: Origin, nbytes: int, workers: Collection[Placement]) -> bool:
        """Tell whether a chunk is to be read where it lies; what is too large for that is not."""
        fits = bool(self._lend_to) and origin.lendable and nbytes <= LENT_BYTES_MAX
        return fits and self._dram.window.serves(workers or self._lend_to)

    def _settle(self, fill: Fill, layout: KVLayout, outcome: Fault | None) -> None:
        origin = fill.source.origin
        counters = self._counters[origin.tier]
        with self._lock:
            del self._running[origin.key]
            unwanted = isinstance(outcome, UnwantedError)
            fill.failure = MissReason.CANCELLED if unwanted else _settled_boundary(fill, outcome)
            if self._on_end is not None:
                took_s = self._clock.now() - fill.started
                done_boundary(partial(self._on_end, fill, took_s))
            if isinstance(outcome, DeadlineError):
                self.late_count += 1
                self._dram.abandon(fill.record)
                return
            fill.transfer.end(self._clock.now())
            if fill.failure is None:
                counters.read_bytes += origin.stored_bytes or fill.record.entry.nbytes
                counters.read_latency.observe(self._clock.now() - fill.started)
                counters.lent_bytes += fill.record.entry.nbytes if fill.lent else 0
            else:
                counters.corrupt_shards += fill.failure is MissReason.CORRUPT
                counters.io_errors += fill.failure is MissReason.IO_ERROR
            if fill.failure is None and not fill.lent:
                self._dram.commit(fill.record)
            else:  # What is lent is for those who wait for it now, and then goes back.
                self._dram.abort(fill.record)
            fill.hold.release()
            self._on_filled(fill, layout)

    def _end_late(self, fill: Fill) -> None:
        """The overdue I/O has ended: its slots may be used for something else."""
        with self._lock:
            self.late_count -= 1
            fill.transfer.end(self._clock.now())
            self._dram.index.unpin(fill.record)
            fill.hold.release()
            fill.source.end_late()


def _settled_boundary(fill: Fill, outcome: Fault | None) -> MissReason | None:
    """Return why a chunk did not come. Where settling itself goes wrong, it counts as unread."""
    try:
        return fill.source.settle(outcome)
    # Whoever waits for the chunk would wait until its deadline, and its slots stay pinned.
    except Exception:
        _log.exception("a fill could not be settled")
        return MissReason.IO_ERROR
