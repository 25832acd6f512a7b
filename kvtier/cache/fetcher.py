"""Bringing payloads up from disk straight into the buffers of who asks, many at a time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from kvtier.cache.below.convoy import Convoy, Landing
from kvtier.cache.below.disk_source import DiskSource
from kvtier.cache.below.fill import Fill
from kvtier.cache.executor import Executor
from kvtier.cache.load import LoadContext
from kvtier.cache.lookup import Lookup
from kvtier.cache.match import Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.spans import record_load
from kvtier.cache.tenancy.roots import Roots
from kvtier.cache.tenancy.wishes import Wishes
from kvtier.codecs.opaque import Pieces
from kvtier.constants import KEYED_FETCH_BYTES_MAX
from kvtier.types import ChunkHit, LoadOutcome, Miss, MissReason, Tier


class Fetcher:
    """Starts convoys. Any thread may call; no call waits for a tier."""

    def __init__(
        self,
        context: LoadContext,
        lookup: Lookup,
        roots: Roots,
        wishes: Wishes,
        executor: Executor,
        closed: Callable[[], bool],
    ) -> None:
        """``closed`` tells, under the cache's lock, whether it takes nothing on any more."""
        self._context = context
        self._lookup = lookup
        self._roots = roots
        self._wishes = wishes
        self._executor = executor
        self._closed = closed

    def begin(
        self,
        asked: SequenceOf[tuple[Sequence, Pieces]],
        deadline: float,
        stirred: Callable[[], None],
    ) -> list[Landing | None]:
        """Begin to fill buffers with payloads, sequences of one chunk, that lie on disk.

        None for one that does not, or that something else brings up, or that has no room or is too
        large: a load may bring it. ``stirred`` is called, in a thread of the cache and without its
        lock, when some landings have an outcome. A buffer is the caller's again after that.
        """
        convoys: dict[int, Convoy] = {}
        landings: list[Landing | None] = []
        with self._context.lock:
            for sequence, buffer in asked:
                landings.append(self._start(sequence, buffer, deadline, convoys, stirred))
        for convoy in convoys.values():
            convoy.begin(deadline)
        return landings

    def _start(
        self,
        sequence: Sequence,
        buffer: Pieces,
        deadline: float,
        convoys: dict[int, Convoy],
        stirred: Callable[[], None],
    ) -> Landing | None:
        context, key = self._context, sequence.chunk_keys[0]
        large = buffer.nbytes > KEYED_FETCH_BYTES_MAX
        if large or self._closed() or not self._roots.current(sequence):
            return None
        if context.dram.index.get(key) is not None or context.below.filler.running(key):
            return None
        disk = context.below.find(sequence, 0)
        if not isinstance(disk, DiskSource) or len(disk.origin.shards) != 1:
            return None
        convoy = convoys.get(disk.lane)
        if convoy is None:
            lane, lock = disk.lane, context.lock
            convoy = Convoy(self._executor, lane, lock, self._landed, stirred)
        landing = Landing(sequence, buffer, deadline, context.clock)
        source = convoy.source(disk, landing)
        fill = context.below.start(source, sequence, deadline, [])
        if fill is None:
            return None
        convoy.join(landing, fill)
        convoys[disk.lane] = convoy
        match = Ready(sequence, (ChunkHit(key, Tier.DISK, disk.origin.codec),))
        self._lookup.count(match, 0, 1)
        self._lookup.touch(match)
        self._wishes.found(sequence, [key])
        return landing

    def _landed(self, landing: Landing, fill: Fill) -> None:
        """Count what came of one, and conclude it."""
        context, sequence = self._context, landing.sequence
        with context.lock:
            # What was read in an epoch that is over counts for nothing.
            came = landing.missed is None and self._roots.current(sequence)
            reason = fill.failure or landing.missed or MissReason.ABSENT
            if reason is MissReason.CANCELLED and context.clock.now() >= fill.deadline:
                reason = MissReason.DEADLINE
            if came:
                outcome = LoadOutcome(0, 1, {Tier.DISK: 1}, ())
            else:
                outcome = LoadOutcome(0, 0, {}, (Miss(Tier.DISK, reason, 1),))
            context.counters.note_load(sequence.namespace.tenant_salt, outcome)
            record_load(context.spans, outcome, context.clock.now() - fill.started)
        landing.conclude(Tier.DISK if came else reason)
