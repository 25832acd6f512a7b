"""What a cache is made of, put together in the order in which the parts need each other."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtier.cache.below.below import Below
from kvtier.cache.below.disk_choices import disk_choices, local_files
from kvtier.cache.below.disk_room import DiskRoom
from kvtier.cache.below.fill import Fill, Filler
from kvtier.cache.below.prefetch import Prefetcher
from kvtier.cache.below.remote_room import RemoteRoom, open_remotes
from kvtier.cache.below.rooms import Rooms
from kvtier.cache.below.staging import OwedKeys, sweep
from kvtier.cache.event_feed import EventFeed
from kvtier.cache.executor import Executor
from kvtier.cache.fetcher import Fetcher
from kvtier.cache.load import LoadContext
from kvtier.cache.loads import Loads
from kvtier.cache.lookup import Lookup
from kvtier.cache.plans import OpenPlans
from kvtier.cache.shapes import Shapes
from kvtier.cache.spans import record_fill
from kvtier.cache.store import Storer
from kvtier.cache.tenancy.epochs import Epochs
from kvtier.cache.tenancy.pins import KeptKeys
from kvtier.cache.tenancy.roots import Roots
from kvtier.cache.tenancy.tenancy import Tenancy, make_tenancy
from kvtier.cache.worth.cost_keeper import CostKeeper, make_costs
from kvtier.cache.worth.costs import Costs
from kvtier.codecs.calibration_copies import CalibrationCopies
from kvtier.codecs.known import KnownCodecs
from kvtier.config import CacheConfig
from kvtier.constants import PREFETCH_SHARE, STORE_STAGING_SHARE
from kvtier.interfaces import Clock, Connector
from kvtier.keys import tenant_digest
from kvtier.obs.counters import Counters
from kvtier.obs.events import EventLog
from kvtier.obs.spans import Spans
from kvtier.registry import policies
from kvtier.tiers.arena import Arena
from kvtier.tiers.disk.files import FileSystem
from kvtier.tiers.dram import DramTier
from kvtier.types import KVLayout, Tier


@dataclass(frozen=True, slots=True)
class Given:
    """What a cache is given. ``files`` None: the operating system's; ``spans`` None: no spans."""

    config: CacheConfig
    clock: Clock
    files: FileSystem | None
    connect: Callable[[str], Connector]
    spans: Spans | None
    #: Called in the loop's thread, without the lock.
    tick: Callable[[], None]


@dataclass(slots=True)
class Medium:
    """Where bytes lie, and what moves them below DRAM."""

    lock: threading.Lock
    counters: Counters
    shapes: Shapes
    roots: Roots
    events: EventFeed | None
    arena: Arena
    dram: DramTier
    kept: KeptKeys
    rooms: Rooms
    executor: Executor
    loads: Loads
    plans: OpenPlans

    @property
    def log(self) -> EventLog | None:
        """What is told of the tiers, if anything is."""
        return self.events.log if self.events is not None else None


@dataclass(slots=True)
class Desks:
    """What decides: each takes orders of the cache."""

    tenancy: Tenancy
    costs: Costs
    cost_keeper: CostKeeper | None
    below: Below
    lookup: Lookup
    storer: Storer
    prefetcher: Prefetcher
    loading: LoadContext


def make_medium(given: Given) -> Medium:
    """Map the arena, open the remotes, make the tiers; no thread of the executor ticks yet.

    Raises ``ConfigError``, ``RegistryError`` or ``MissingExtraError``, and then holds nothing.
    """
    config, clock, lock = given.config, given.clock, threading.Lock()
    paths = config.disk.paths if config.disk else ()
    store = CalibrationCopies(list(map(Path, paths))) if paths else None
    shapes, counters = Shapes(KnownCodecs(store)), Counters((Tier.DRAM, Tier.DISK, Tier.REMOTE))
    for name in config.codecs:
        shapes.codecs.get(name)
    epochs, rooms = Epochs(len(paths), len(config.remotes)), Rooms(counters[Tier.DRAM])
    roots = Roots(epochs, len(paths), lambda: _held_roots(dram, rooms))
    policy = policies.load(config.policy)
    choices = disk_choices(config.disk) if config.disk else None
    owner = tenant_digest(config.exported_to) if config.exported_to else None
    slab_bytes, shared = config.slab_bytes, config.shared
    arena = Arena(config.arena_bytes, slab_bytes=slab_bytes, shared=shared, owner=owner)
    staged = config.dram_bytes == 0
    kept = OwedKeys(rooms, clock) if staged else KeptKeys(arena.capacity_bytes, clock)
    owned = () if owner is None else (roots.tenant_of,)
    dram = DramTier(arena, kept.guard(policy), clock, rooms.left_dram, kept.keeps, *owned)
    if staged:
        rooms.sweep = partial(sweep, dram, rooms)
    with ExitStack() as undo:
        undo.callback(arena.close)
        opened = open_remotes(config.remotes, given.connect, lock, clock)
        undo.pop_all()
    executor = Executor(clock, lanes=len(paths), tick=given.tick)
    work = (dram, executor, lock, counters, clock, shapes)
    if config.disk is not None and choices is not None:
        files = given.files or local_files(arena)
        rooms.disk = DiskRoom(config.disk, choices, files, *work, epochs, roots)
    loads = Loads()
    if opened:
        raised = partial(loads.end_stale, roots)
        rooms.remote = RemoteRoom(opened, config.codec, *work, epochs, len(paths), raised)
    events = EventFeed(lock, epochs, roots.root) if config.events else None
    medium = Medium(
        lock=lock,
        counters=counters,
        shapes=shapes,
        roots=roots,
        events=events,
        arena=arena,
        dram=dram,
        kept=kept,
        rooms=rooms,
        executor=executor,
        loads=loads,
        plans=OpenPlans(),
    )
    dram.index.watch(medium.log, Tier.DRAM)
    if rooms.disk is not None:
        rooms.disk.tier.index.watch(medium.log, Tier.DISK)
    if rooms.remote is not None:
        rooms.remote.watch(medium.log)
    return medium


def make_desks(given: Given, medium: Medium) -> Desks:
    """Make what decides over the tiers."""
    config, clock, spans, rooms = given.config, given.clock, given.spans, medium.rooms
    dram, shapes, counters = medium.dram, medium.shapes, medium.counters
    tiers = (dram, rooms.disk_tier)
    costs, cost_keeper = make_costs(
        config, rooms.disk_tier, medium.lock, clock, shapes, medium.executor
    )
    tenancy = _make_tenancy(given, medium)

    def filled(fill: Fill, layout: KVLayout) -> None:
        if fill.failure is None and not rooms.closed:
            rooms.spread(fill.record.entry.key, layout)
        medium.loads.bring()
        prefetcher.pump()

    record = None if spans is None else partial(record_fill, spans)
    staged = config.dram_bytes == 0
    lend_to = config.workers if staged and not config.shared else ()
    filler = Filler(dram, medium.lock, counters, clock, shapes, costs, filled, record, lend_to)
    remotes = rooms.remote.remotes if rooms.remote is not None else None
    below = Below(*tiers, remotes, filler, medium.executor, shapes)
    prefetch_bytes = int(config.dram_bytes * PREFETCH_SHARE)
    prefetcher = Prefetcher(dram, below, medium.roots, clock, prefetch_bytes)
    return Desks(
        tenancy=tenancy,
        costs=costs,
        cost_keeper=cost_keeper,
        below=below,
        lookup=Lookup(*tiers, rooms.remote, rooms.writeout, shapes, counters, medium.log),
        storer=Storer(
            *tiers,
            rooms.writeout,
            rooms.remote,
            shapes,
            medium.plans,
            counters[Tier.DRAM],
            clock,
            config.codec,
            config.disk_codec,
            config.workers,
            medium.log,
            spans,
            tenancy,
            remotes if staged else None,
            config.arena_bytes * STORE_STAGING_SHARE if staged else math.inf,
        ),
        prefetcher=prefetcher,
        loading=LoadContext(
            dram=dram,
            below=below,
            lock=medium.lock,
            clock=clock,
            workers=config.workers,
            counters=counters,
            plans=medium.plans,
            shapes=shapes,
            costs=costs,
            spans=spans,
        ),
    )


def make_fetcher(medium: Medium, desks: Desks, closed: Callable[[], bool]) -> Fetcher:
    """Make what brings payloads up for keyed caches, until the cache is ``closed``."""
    wishes = desks.tenancy.wishes
    how = (desks.loading, desks.lookup, medium.roots, wishes, medium.executor)
    return Fetcher(*how, closed)


def _make_tenancy(given: Given, medium: Medium) -> Tenancy:
    disk, room = medium.rooms.disk, medium.rooms.remote

    def raised() -> None:
        medium.loads.end_stale(medium.roots)
        if room is not None:
            room.doubt()

    tenancy = make_tenancy(
        given.config,
        medium.lock,
        given.clock,
        medium.roots,
        (medium.dram, medium.kept),
        (disk.tier, disk.kept) if disk is not None else None,
        medium.rooms.writeout,
        room,
        left_disk=disk.left if disk is not None else lambda _: None,
        end_loads=raised,
        save=medium.rooms.save_epochs,
    )
    if disk is not None:
        disk.writeout.quotas = tenancy.quotas
    if room is not None:
        room.serve(tenancy.quotas, lambda root: bool(medium.roots.tenant_of(root)))
    return tenancy


def _held_roots(dram: DramTier, rooms: Rooms) -> set[bytes]:
    disk = rooms.disk_tier
    below = {*disk.index.namespaces, *disk.cold.namespaces} if disk is not None else set()
    return {*dram.index.namespaces, *below}
