"""The façade that an engine embeds: owner of index, tiers and arena; never touches device memory.

One lock guards everything here. It is held for bookkeeping only: I/O, checksums and copies run
in other threads without it. No method waits for a tier.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from kvtier.cache.assembly import Given, make_desks, make_fetcher, make_medium
from kvtier.cache.below.removal import remove
from kvtier.cache.figures import cache_stats
from kvtier.cache.hold import Hold, hold_first
from kvtier.cache.load import Load
from kvtier.cache.match import Pending, Ready
from kvtier.cache.planner import check_blocks, check_store
from kvtier.cache.sequence import Sequence
from kvtier.cache.spans import record_match
from kvtier.cache.worth.costs import Choice
from kvtier.clock import SystemClock
from kvtier.codecs.known import KnownCodecs
from kvtier.config import CacheConfig
from kvtier.constants import CLOSE_DEADLINE_S_DEFAULT, CLOSE_S_MIN
from kvtier.errors import ConfigError
from kvtier.interfaces import Clock, Connector
from kvtier.obs.spans import Spans
from kvtier.obs.stats import CacheStats
from kvtier.registry import connect as connect_url
from kvtier.tiers.disk.files import FileSystem
from kvtier.tiers.memory import ArenaHandle
from kvtier.tiers.owned_memory import Region
from kvtier.tiers.window import Window
from kvtier.types import (
    Blocks,
    ChunkKey,
    Features,
    Fidelity,
    MissReason,
    Namespace,
    Plan,
    Result,
)

_log = logging.getLogger("kvtier.disk")

_FEATURES = Features()


class Cache:
    """Tiers below one engine's HBM. Any thread may call; no call waits for a tier."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        clock: Clock | None = None,
        files: FileSystem | None = None,
        connect: Callable[[str], Connector] = connect_url,
        spans: Spans | None = None,
    ) -> None:
        """Map and touch the arena (about a second per 4 GiB) and begin to open the disk.

        Waits for the epochs of disk and remotes, a second or two where they do not answer. Raises
        ``ConfigError`` for settings that cannot be, ``RegistryError`` for an unknown policy or
        codec. A disk or remote that cannot be used is no error: it is tried again.
        ``files`` stands in for the operating system's file system, ``connect`` opens remotes,
        ``spans`` is told of every match, load, fill and store.
        """
        given = Given(config, clock or SystemClock(), files, connect, spans, self._tick)
        self._config, self._clock, self._spans = config, given.clock, spans
        self._closed = False
        self._medium = medium = make_medium(given)
        self._lock = medium.lock
        self._codecs = [medium.shapes.codecs.get(name) for name in config.codecs]
        self._rooms = medium.rooms
        self._roots = medium.roots
        self._desks = desks = make_desks(given, medium)
        #: What brings payloads up, for keyed caches.
        self.fetcher = make_fetcher(medium, desks, lambda: self._closed)
        #: What the tiers tell of themselves, if the config says so.
        self.events = medium.events
        #: What loads and computing cost, and what is worth loading.
        self.costs = desks.costs
        #: What tenants hold, and their end. What stays whatever else comes.
        self.tenants, self.pins = desks.tenancy.tenants, desks.tenancy.pins
        #: What lies where, for operators.
        self.holdings = desks.tenancy.holdings
        self._pending_until = self._clock.now() + config.pending_deadline_s
        medium.executor.start()
        if desks.cost_keeper is not None:
            desks.cost_keeper.start()
        self._rooms.await_epochs()

    @property
    def arena(self) -> memoryview:
        """The arena's memory, for workers in this process; valid until ``close``."""
        return self._medium.arena.memory

    @property
    def window(self) -> Window:
        """What is lent to the cache, for workers in this process."""
        return self._medium.dram.window

    @property
    def arena_handle(self) -> ArenaHandle:
        """How workers in other processes map the arena. The config must say ``shared``."""
        handle = self._medium.arena.handle
        assert handle is not None, "the arena is not shared"
        return handle

    def region_at(self, offset: int) -> Region | None:
        """Return the file that a byte of the arena lies in, for its tenant's processes to map.

        The chunk there is pinned meanwhile. None: nobody may; see the config's ``exported_to``.
        """
        with self._lock:
            return self._medium.arena.region_at(offset)

    @property
    def codecs(self) -> KnownCodecs:
        """What packs and unpacks, for workers in this process."""
        return self._medium.shapes.codecs

    def prepare(self, namespace: Namespace) -> None:
        """Find the model's calibration, where a configured codec needs one, or begin to learn it.

        Reads small files: once for each model, before its first request. Without a calibration
        such a codec stores as ``int5k4v``. Where workers are other processes none sees all heads,
        so nothing is learned: each reads what is there, from the disk's directories.
        """
        codecs = self._medium.shapes.codecs
        (codecs.find if self._config.shared else codecs.prepare)(namespace, self._config.codecs)

    def sequence(self, namespace: Namespace, *, features: Features = _FEATURES) -> Sequence:
        """Begin to hash a request's tokens under the namespace's present epoch.

        Raises ``ConfigError`` for an exact namespace where the cache has a lossy codec.
        """
        if namespace.fidelity is Fidelity.EXACT:
            for codec in self._codecs:
                if not codec.traits.exact:
                    raise ConfigError(
                        f"codec {codec.name!r} is lossy and the namespace's fidelity is 'exact'; "
                        "allowed is 'lossy'"
                    )
        with self._lock:
            root = self._roots.root(namespace)
        keep_tokens = self.events is not None
        return Sequence(namespace, root, features=features, keep_tokens=keep_tokens)

    def root(self, namespace: Namespace) -> bytes:
        """Return the digest that a namespace's keys follow from, in its present epoch."""
        with self._lock:
            return self._roots.root(namespace)

    def match(self, sequence: Sequence) -> Ready | Pending:
        """Look up the longest usable prefix. Pins and counts nothing.

        ``Pending`` only while the disk is being opened or a remote is asked, and within the
        configured deadline.
        """
        if self._spans is None:
            return self._match(sequence)
        begun_s = self._clock.now()
        match = self._match(sequence)
        seconds = self._clock.now() - begun_s
        record_match(self._spans, match, sequence.token_count, seconds)
        return match

    def _match(self, sequence: Sequence) -> Ready | Pending:
        with self._lock:
            now, patience_s = self._clock.now(), self._config.pending_deadline_s
            if self._closed:
                return Ready(sequence, ())
            opening = self._rooms.disk is not None and self._rooms.disk.opening
            if opening and now < self._pending_until:
                return Pending(self._pending_until)
            if not self._roots.current(sequence):
                return Ready(sequence, ())
            lookup = self._desks.lookup
            found = lookup.find(sequence)
            if lookup.waits(sequence, found, now, patience_s):
                assert sequence.pending_until is not None, "set where it waits"
                return Pending(sequence.pending_until, found.unknown_token(sequence))
            return Ready(sequence, found.hits)

    def note_admission(
        self, match: Ready, start_token: int, end_token: int, choice: Choice | None = None
    ) -> None:
        """Count one admitted request's lookup and touch what it found; once per request.

        The engine has tokens up to ``start_token`` in HBM and asked for those up to
        ``end_token``. Only whole chunks count. Hits are counted by the load, when they are real;
        what ``costs.choose`` left is counted here.
        """
        with self._lock:
            self._desks.lookup.count(match, start_token, end_token)
            if choice is not None:
                self.costs.note_choice(choice)
                self._desks.lookup.count_left(match, choice)
            if self._roots.current(match.sequence):
                self._touch(match)

    def begin_load(
        self,
        match: Ready,
        blocks: Blocks,
        *,
        deadline: float | None = None,
        choice: Choice | None = None,
    ) -> Load | None:
        """Begin to bring the match's tokens into the engine's blocks, as far as they cover it.

        Only these blocks are written, whole blocks of them. ``deadline`` is a clock instant; by
        default it follows from the config. With ``costs.choose``'s answer for these blocks, a load
        is given up as soon as computing is quicker. None when there is nothing to load. Raises
        ``LayoutError`` for blocks that do not fit the layout.
        """
        check_blocks(match.sequence.layout, blocks)
        if deadline is None:
            deadline = self._clock.now() + self._config.load_deadline_s
        with self._lock:
            if self._closed or not self._roots.current(match.sequence):
                return None
            load = Load(self._desks.loading, match, blocks, deadline, choice)
            if load.empty:
                return None
            self._medium.loads.add(load)
            load.pin()
            self._touch(match)
            load.bring()
        return load

    def hold(self, sequence: Sequence) -> Hold | None:
        """Pin a sequence's first chunk, to be read where it lies in DRAM until its ``release``.

        Counts as a lookup, an admission and a load. None: it is not there in one shard, and
        nothing is counted; a load may bring it up.
        """
        with self._lock:
            if self._closed or not self._roots.current(sequence):
                return None
            held = hold_first(self._desks.loading, sequence, self._rooms.pump)
            if held is not None:
                self._touch(held[1])
            return None if held is None else held[0]

    def prefetch(
        self, match: Ready, *, start_token: int = 0, deadline: float | None = None
    ) -> bool:
        """Begin to bring what a match found up into DRAM, for a request that has no blocks yet.

        The engine has the tokens before ``start_token``. Takes a part of DRAM at most, pins nothing
        that has come, and ends at the first chunk that does not come in time. False: too many are
        under way, or nothing is to be done.
        """
        if deadline is None:
            deadline = self._clock.now() + self._config.load_deadline_s
        with self._lock:
            if self._closed or not self._roots.current(match.sequence):
                return False
            return self._desks.prefetcher.begin(match, start_token, deadline)

    def begin_store(self, sequence: Sequence, chunks: range, blocks: Blocks) -> Plan | None:
        """Order complete chunks out of the engine's blocks, skipping what is held already.

        ``blocks`` begin at the first token of ``chunks.start`` and cover all of ``chunks``; the
        engine leaves them alone until ``store_done``. None when nothing is left to do or the
        cache refuses (no room, too much under way). Raises ``LayoutError`` for blocks that do not
        fit the layout.
        """
        check_store(sequence.layout, chunks, len(sequence.chunk_keys), blocks)
        sequence.refused = None
        with self._lock:
            if self._closed or not self._roots.current(sequence):
                return None
            if not self._roots.note_store(sequence):
                sequence.refused = MissReason.UNAVAILABLE
                return None
            return self._desks.storer.begin(sequence, chunks, blocks)

    def store_done(self, plan_id: int) -> bool:
        """Tell whether every worker has answered a store, so that its blocks may be reused."""
        with self._lock:
            return not self._medium.plans.is_open(plan_id)

    def finish(self, results: Iterable[Result]) -> None:
        """Take the workers' answers. A plan counts only when all of its workers did all of it."""
        with self._lock:
            for result in results:
                self._medium.plans.answer(result)
                if result.moved is not None:
                    self.costs.note_moved(result.moved)
            self._rooms.pump()

    def lose_worker(self, worker: int) -> None:
        """Answer everything that a dead worker owes as failed, and let no load count on it.

        Every load has KV for all workers, so those under way come to nothing. What begins later
        takes for granted that another worker has that number.
        """
        with self._lock:
            self._medium.loads.end(MissReason.WORKER)
            self._medium.plans.lose(worker)

    def invalidate(self, namespace: Namespace) -> int:
        """Make everything stored under a namespace unreachable, at once; return the new epoch.

        Loads under way come to nothing. Blocks while directories and remotes are told; see
        ``Tenants.delete``. Raises ``TierUnavailableError`` when one could not be: then it holds
        for this process, and is told when that one comes back.
        """
        return self.tenants.invalidate(namespace)

    def remove(self, keys: Iterable[ChunkKey]) -> list[bool]:
        """Let chunks go, whatever is left of them; loads under way keep what they have pinned.

        False: one that is being stored, read or written, which stays as it is; ask again. After
        ``close`` all stay.
        """
        with self._lock:
            if self._closed:
                return [False for _ in keys]
            dram, rooms = self._medium.dram, self._rooms
            tiers = (dram, rooms.disk_tier, rooms.writeout, rooms.remote)
            return [remove(key, *tiers) for key in keys]

    def stats(self) -> CacheStats:
        """Count everything, now."""
        medium, desks, rooms = self._medium, self._desks, self._rooms
        with self._lock:
            return cache_stats(
                self._config,
                medium.counters,
                medium.dram,
                rooms.disk_tier,
                desks.storer,
                desks.below.filler,
                rooms.writeout,
                rooms.remote,
                medium.log,
                desks.costs,
                loads_inflight=medium.loads.count,
            )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        with self._lock:
            if self.events is not None:
                self.events.log.check_integrity()
            self._medium.dram.check_integrity()
            self._rooms.check_integrity()

    def close(self, *, timeout_s: float = CLOSE_DEADLINE_S_DEFAULT) -> None:
        """Write out what is dirty as far as time allows, end the threads, unmap the arena.

        The engine has stopped its workers; loads are cancelled, and from now on there are no hits
        and no room. A second call does nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._medium.loads.end(MissReason.CANCELLED)
            self._desks.prefetcher.end()
            self._rooms.flush()
        end = time.monotonic() + timeout_s
        last = self._rooms.disk.last if self._rooms.disk is not None else []
        if self._desks.cost_keeper is not None:
            last[0] = self._desks.cost_keeper.finish(last[0])
        self._medium.executor.close(timeout_s, last)
        self._rooms.close(max(CLOSE_S_MIN, end - time.monotonic()))
        self._medium.shapes.codecs.close(timeout_s)
        with self._lock:
            self._medium.arena.close()

    def _touch(self, match: Ready) -> None:
        self._desks.lookup.touch(match)
        self._desks.tenancy.wishes.found(match.sequence, [hit.key for hit in match.hits])

    def _tick(self) -> None:
        with self._lock:
            self._medium.loads.keep_deadlines()
            self._desks.prefetcher.pump()
            lines = self._rooms.tick()
            self._desks.tenancy.tick()
            if self._desks.cost_keeper is not None:
                self._desks.cost_keeper.tick()
        for line in lines:
            _log.warning("%s", line)
