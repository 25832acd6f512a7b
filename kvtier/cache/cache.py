"""The façade that an engine embeds: owner of index, tiers and arena; never touches device memory.

One lock guards everything here. It is held for bookkeeping only: I/O, checksums and copies run
in other threads without it. No method waits for a tier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from kvtier.cache.below import Below
from kvtier.cache.cost_keeper import make_costs
from kvtier.cache.costs import Choice
from kvtier.cache.disk_choices import DiskChoices, disk_choices, local_files
from kvtier.cache.epochs import Epochs
from kvtier.cache.event_feed import EventFeed
from kvtier.cache.executor import Executor
from kvtier.cache.figures import cache_stats
from kvtier.cache.fill import Fill, Filler
from kvtier.cache.load import Load, LoadContext
from kvtier.cache.lookup import Lookup
from kvtier.cache.match import Pending, Ready
from kvtier.cache.opener import VolumeOpener, save_epochs_everywhere
from kvtier.cache.pins import KeptKeys
from kvtier.cache.planner import check_blocks, check_store
from kvtier.cache.plans import OpenPlans
from kvtier.cache.remote_room import RemoteRoom, open_remotes
from kvtier.cache.removal import remove
from kvtier.cache.roots import Roots
from kvtier.cache.sequence import Sequence
from kvtier.cache.shapes import Shapes
from kvtier.cache.spans import record_fill, record_match
from kvtier.cache.state_log import StateLog
from kvtier.cache.store import Storer
from kvtier.cache.tenancy import make_tenancy
from kvtier.cache.writeout import Writeout
from kvtier.clock import SystemClock
from kvtier.codecs.calibration_copies import CalibrationCopies
from kvtier.codecs.known import KnownCodecs
from kvtier.config import CacheConfig, DiskConfig
from kvtier.constants import CLOSE_DEADLINE_S_DEFAULT
from kvtier.errors import ConfigError
from kvtier.interfaces import Clock, Connector
from kvtier.obs.counters import Counters
from kvtier.obs.events import EventLog
from kvtier.obs.spans import Spans
from kvtier.obs.stats import CacheStats
from kvtier.registry import connect as connect_url
from kvtier.registry import policies
from kvtier.tiers.arena import Arena
from kvtier.tiers.disk.files import FileSystem
from kvtier.tiers.disk.shard_files import ShardFiles
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.volume import Volume
from kvtier.tiers.dram import DramTier
from kvtier.tiers.memory import ArenaHandle
from kvtier.types import (
    Blocks,
    ChunkKey,
    Features,
    Fidelity,
    KVLayout,
    MissReason,
    Namespace,
    Plan,
    Result,
    Tier,
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

        Waits for the disk's epochs, at most a second where it does not answer. Raises
        ``ConfigError`` for settings that cannot be, ``RegistryError`` for an unknown policy or
        codec. A disk or remote that cannot be used is no error: it is tried again.
        ``files`` stands in for the operating system's file system, ``connect`` opens remotes,
        ``spans`` is told of every match, load, fill and store.
        """
        store = CalibrationCopies(list(map(Path, config.disk.paths))) if config.disk else None
        self._shapes = Shapes(KnownCodecs(store))
        self._codecs = [self._shapes.codecs.get(name) for name in config.codecs]
        self._config = config
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._closed = False
        self._counters = Counters((Tier.DRAM, Tier.DISK, Tier.REMOTE))
        paths = config.disk.paths if config.disk else ()
        self._epochs = Epochs(len(paths))
        self._roots = Roots(self._epochs, len(paths), self._held_roots)
        #: What the tiers tell of themselves, if the config says so.
        self.events = (
            EventFeed(self._lock, self._epochs, self._roots.root) if config.events else None
        )
        self._loads: set[Load] = set()
        self._plans = OpenPlans()
        policy = policies.load(config.policy)
        choices = disk_choices(config.disk) if config.disk else None
        self._arena = Arena(config.dram_bytes, slab_bytes=config.slab_bytes, shared=config.shared)
        kept = KeptKeys(self._arena.capacity_bytes, self._clock)
        self._dram = DramTier(self._arena, policy, self._clock, self._left_dram, kept.keeps)
        self._dram.index.watch(self._log, Tier.DRAM)
        try:
            opened = open_remotes(config.remotes, connect, self._lock, self._clock)
        except BaseException:
            self._arena.close()
            raise
        self._executor = Executor(self._clock, lanes=len(paths), tick=self._tick)
        self._disk: DiskTier | None = None
        self._kept_disk: tuple[DiskTier, KeptKeys] | None = None
        self._state_log: StateLog | None = None
        self._writeout: Writeout | None = None
        self._openers: tuple[VolumeOpener, ...] = ()
        if config.disk is not None and choices is not None:
            self._openers = self._add_disk(config.disk, choices, files or local_files(self._arena))
        self._room: RemoteRoom | None = None
        if config.remotes:
            work = (self._executor, self._lock, self._counters, self._clock, self._shapes)
            self._room = RemoteRoom(opened, config.codec, self._dram, *work)
            self._room.watch(self._log)
        #: What loads and computing cost, and what is worth loading.
        self.costs, self._cost_keeper = make_costs(
            config, self._disk, self._lock, self._clock, self._shapes, self._executor
        )
        self._pending_until = self._clock.now() + config.pending_deadline_s
        tiers = (self._dram, self._disk)
        self._tenancy = make_tenancy(
            config,
            self._lock,
            self._clock,
            self._roots,
            (self._dram, kept),
            self._kept_disk,
            self._writeout,
            self._room,
            left_disk=self._left_disk,
            end_loads=self._end_stale_loads,
            save=lambda: save_epochs_everywhere(self._openers),
        )
        #: What tenants hold, and their end. What stays whatever else comes.
        self.tenants, self.pins = self._tenancy.tenants, self._tenancy.pins
        if self._writeout is not None:
            self._writeout.quotas = self._tenancy.quotas
        self._spans = spans
        filler = Filler(
            self._dram,
            self._lock,
            self._counters,
            self._clock,
            self._shapes,
            self.costs,
            self._filled,
            None if spans is None else partial(record_fill, spans),
        )
        remotes = self._room.remotes if self._room is not None else None
        self._below = Below(*tiers, remotes, filler, self._executor, self._shapes)
        self._lookup = Lookup(
            *tiers, self._room, self._writeout, self._shapes, self._counters, self._log
        )
        self._storer = Storer(
            *tiers,
            self._writeout,
            self._room,
            self._shapes,
            self._plans,
            self._counters[Tier.DRAM],
            self._clock,
            config.codec,
            config.disk_codec,
            config.workers,
            self._log,
            spans,
            self._tenancy,
        )
        self._context = LoadContext(
            dram=self._dram,
            below=self._below,
            lock=self._lock,
            clock=self._clock,
            workers=config.workers,
            counters=self._counters,
            plans=self._plans,
            shapes=self._shapes,
            costs=self.costs,
            spans=spans,
        )
        self._executor.start()
        if self._cost_keeper is not None:
            self._cost_keeper.start()
        for opener in self._openers:
            opener.wait_for_epochs()

    def _add_disk(
        self, config: DiskConfig, choices: DiskChoices, files: FileSystem
    ) -> tuple[VolumeOpener, ...]:
        """Make the disk tier and what works for it; it is not open yet."""
        share = config.capacity_bytes // len(config.paths)
        volumes = [
            Volume(number, ShardFiles(path, config.durability, files), share, self._clock)
            for number, path in enumerate(config.paths)
        ]
        counters = self._counters[Tier.DISK]
        kept = KeptKeys(config.capacity_bytes, self._clock)
        disk = DiskTier(volumes, kept.guard(choices.policy), self._clock, self._left_disk)
        work = (self._executor, self._lock, counters, self._clock, self._shapes)
        disk.index.watch(self._log, Tier.DISK)
        self._disk, self._kept_disk = disk, (disk, kept)
        self._state_log = StateLog(config.path)
        self._writeout = writeout = Writeout(
            self._dram, disk, *work, config.mode, choices.admission, choices.encoder
        )
        return tuple(
            VolumeOpener(
                disk,
                volume,
                self._executor,
                self._lock,
                counters,
                self._epochs,
                self._roots,
                self._clock,
                config.durability,
                writeout.pump,
            )
            for volume in volumes
        )

    @property
    def _log(self) -> EventLog | None:
        return self.events.log if self.events is not None else None

    @property
    def arena(self) -> memoryview:
        """The arena's memory, for workers in this process; valid until ``close``."""
        return self._arena.memory

    @property
    def arena_handle(self) -> ArenaHandle:
        """How workers in other processes map the arena. The config must say ``shared``."""
        assert self._arena.handle is not None, "the arena is not shared"
        return self._arena.handle

    @property
    def codecs(self) -> KnownCodecs:
        """What packs and unpacks, for workers in this process."""
        return self._shapes.codecs

    def prepare(self, namespace: Namespace) -> None:
        """Find the model's calibration, where a configured codec needs one, or begin to learn it.

        Reads small files: once for each model, before its first request. Without a calibration
        such a codec stores as ``int5k4v``. Where workers are other processes none sees all heads,
        so nothing is learned: each reads what is there, from the disk's directories.
        """
        codecs = self._shapes.codecs
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
            disk = self._disk
            if disk is not None and not disk.opened and disk.state[0] == "opening":
                now = self._clock.now()
                if now < self._pending_until and not self._closed:
                    return Pending(self._pending_until)
            if self._closed or not self._roots.current(sequence):
                return Ready(sequence, ())
            found = self._lookup.find(sequence)
            now, patience_s = self._clock.now(), self._config.pending_deadline_s
            if self._lookup.waits(sequence, found, now, patience_s):
                assert sequence.pending_until is not None, "set where it waits"
                return Pending(sequence.pending_until)
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
            self._lookup.count(match, start_token, end_token)
            if choice is not None:
                self.costs.note_choice(choice)
                self._lookup.count_left(match, choice)
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
            load = Load(self._context, match, blocks, deadline, choice)
            if load.empty:
                return None
            self._loads = {active for active in self._loads if active.outcome is None}
            self._loads.add(load)
            load.pin()
            self._touch(match)
        return load

    def begin_store(self, sequence: Sequence, chunks: range, blocks: Blocks) -> Plan | None:
        """Order complete chunks out of the engine's blocks, skipping what is held already.

        ``blocks`` begin at the first token of ``chunks.start`` and cover all of ``chunks``; the
        engine leaves them alone until ``store_done``. None when nothing is left to do or the
        cache refuses (no room, too much under way). Raises ``LayoutError`` for blocks that do not
        fit the layout.
        """
        check_store(sequence.layout, chunks, len(sequence.chunk_keys), blocks)
        with self._lock:
            if self._closed or not self._roots.current(sequence):
                return None
            if not self._roots.note_store(sequence):
                sequence.refused = MissReason.UNAVAILABLE
                return None
            return self._storer.begin(sequence, chunks, blocks)

    def store_done(self, plan_id: int) -> bool:
        """Tell whether every worker has answered a store, so that its blocks may be reused."""
        with self._lock:
            return not self._plans.is_open(plan_id)

    def finish(self, results: Iterable[Result]) -> None:
        """Take the workers' answers. A plan counts only when all of its workers did all of it."""
        with self._lock:
            for result in results:
                self._plans.answer(result)
                if result.moved is not None:
                    self.costs.note_moved(result.moved)
            if not self._closed:
                self._pump()

    def lose_worker(self, worker: int) -> None:
        """Answer everything that a dead worker owes as failed, and let no load count on it.

        Every load has KV for all workers, so those under way come to nothing. What begins later
        takes for granted that another worker has that number.
        """
        with self._lock:
            for load in self._loads:
                load.end(MissReason.WORKER)
            self._plans.lose(worker)

    def invalidate(self, namespace: Namespace) -> int:
        """Make everything stored under a namespace unreachable, at once; return the new epoch.

        Loads under way come to nothing. Blocks while the epoch is written to disk. Raises
        ``TierUnavailableError`` when it could not be: then it holds for this process, and is
        written when the disk comes back.
        """
        return self.tenants.invalidate(namespace)

    def remove(self, keys: Iterable[ChunkKey]) -> list[bool]:
        """Let chunks go, whatever is left of them; loads under way keep what they have pinned.

        False: one that is being stored, read or written, which stays as it is; ask again.
        """
        with self._lock:
            return [remove(key, self._dram, self._disk, self._writeout, self._room) for key in keys]

    def stats(self) -> CacheStats:
        """Count everything, now."""
        with self._lock:
            return cache_stats(
                self._config,
                self._counters,
                self._dram,
                self._disk,
                self._storer,
                self._below.filler,
                self._writeout,
                self._room,
                self._log,
                self.costs,
                loads_inflight=sum(load.outcome is None for load in self._loads),
            )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        with self._lock:
            self._dram.check_integrity()
            if self._writeout is not None:
                self._writeout.check_integrity()
            if self._disk is not None:
                self._disk.check_integrity()
            if self._room is not None:
                self._room.check_integrity()

    def close(self, *, timeout_s: float = CLOSE_DEADLINE_S_DEFAULT) -> None:
        """Write out what is dirty as far as time allows, end the threads, unmap the arena.

        The engine has stopped its workers; loads are cancelled, and from now on there are no hits
        and no room. A second call does nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for load in self._loads:
                load.end(MissReason.CANCELLED)
            if self._writeout is not None:
                self._writeout.flush()
            if self._room is not None:
                self._room.flush()
        last = [opener.finish for opener in self._openers]
        if self._cost_keeper is not None:
            last[0] = self._cost_keeper.finish(last[0])
        self._executor.close(timeout_s, last)
        if self._room is not None:
            self._room.close(timeout_s)
        for opener in self._openers:
            opener.close()
        self._shapes.codecs.close(timeout_s)
        with self._lock:
            self._arena.close()

    def _held_roots(self) -> set[bytes]:
        disk = self._disk
        below = {*disk.index.namespaces, *disk.cold.namespaces} if disk is not None else set()
        return {*self._dram.index.namespaces, *below}

    def _end_stale_loads(self) -> None:
        for load in self._loads:
            if not self._roots.current(load.sequence):
                load.end(MissReason.ABSENT)

    def _touch(self, match: Ready) -> None:
        self._lookup.touch(match)
        self._tenancy.wishes.found(match.sequence, [hit.key for hit in match.hits])

    def _filled(self, fill: Fill, layout: KVLayout) -> None:
        """Let what has come up go where it is missing."""
        if fill.failure is None and not self._closed:
            self._spread(fill.record.entry.key, layout, _FEATURES)

    def _spread(self, key: ChunkKey, layout: KVLayout, features: Features) -> None:
        """Offer a chunk that is in DRAM to every tier that may lack it."""
        if self._writeout is not None:
            self._writeout.note(key, layout, features)
        if self._room is not None:
            self._room.note(key, layout, features)
        self._pump()

    def _pump(self) -> None:
        for each in (self._writeout, self._room):
            if each is not None:
                each.pump()

    def _left_dram(self, key: ChunkKey) -> None:
        self._counters[Tier.DRAM].evicted_chunks += 1
        if self._writeout is not None:
            self._writeout.drop(key)
        if self._room is not None:
            self._room.left_dram(key)

    def _left_disk(self, key: ChunkKey) -> None:
        self._counters[Tier.DISK].evicted_chunks += 1
        if self._writeout is not None:
            self._writeout.left_disk(key)

    def _tick(self) -> None:
        with self._lock:
            self._loads = {load for load in self._loads if load.outcome is None}
            for load in self._loads:
                load.keep_deadline()
            for opener in self._openers:
                opener.tick()
            self._tenancy.tick()
            if self._cost_keeper is not None:
                self._cost_keeper.tick()
            if self._writeout is not None:
                self._writeout.pump()
            if self._room is not None:
                self._room.tick()
            line = self._state_line()
        if line is not None:
            _log.warning("%s", line)

    def _state_line(self) -> str | None:
        if self._disk is None or self._state_log is None:
            return None
        return self._state_log.line(*self._disk.state, self._clock.now())
