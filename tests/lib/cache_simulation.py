"""A whole cache over DRAM, disks and remotes under random steps, on virtual time, from one seed.

What may happen beside the engine's requests: late, failing, lying, hung and full disks and remotes,
workers that die, cancels, invalidations, removals, ends in good and in bad order. What must hold
is looked at after each step and, with more to look at, when everything has come to rest.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

from kvtier.cache.cache import Cache
from kvtier.config import CacheConfig, DiskConfig, RemoteConfig
from kvtier.constants import HEALTH_BACKOFF_S_MAX, WRITES_INFLIGHT_MAX
from kvtier.errors import TierUnavailableError
from kvtier.interfaces import Connector
from kvtier.testing.fault_files import (
    EVER,
    BitFlip,
    FaultyFiles,
    FileCrash,
    FileFailure,
    FileOperation,
    ShortRead,
    TornWrite,
)
from kvtier.tiers.disk.files import FileInfo, LocalFiles
from kvtier.types import Placement
from tests.lib.cache_setup import ErrorLog
from tests.lib.cache_world import CHUNK, CHUNK_BYTES, NAMESPACES, World, prompt
from tests.lib.simulation_swarm import CacheSwarm, drawn_cache
from tests.lib.virtual_time import VirtualTime
from tests.lib.world_remote import HANG_S, Mood, WorldRemote, telling_byte

REQUESTS_MAX = 6
FAMILIES, BRANCHES, CHUNKS_MAX = 3, 2, 7
#: How deep steps of the engine may lie within a read that is under way.
NESTED_MAX = 2
#: In how long all has come to rest: what hangs in the one thread that writes hangs in turn.
WELL_S = 2 * HEALTH_BACKOFF_S_MAX + 2 * WRITES_INFLIGHT_MAX * HANG_S
#: How often it is looked whether all has come to rest.
LOOK_S = 0.25


class InterruptedFiles(LocalFiles):
    """The operating system's files; while a shard is read the engine goes on.

    They are listed in the order of their names and as old as these say, whenever they were made.
    """

    def __init__(self, meanwhile: object) -> None:
        self._meanwhile = meanwhile

    def list(self, directory: str) -> list[FileInfo]:
        found = sorted(super().list(directory), key=lambda file: file.path)
        return [replace(file, modified_s=_generation(file.path) / 1e9) for file in found]

    def read(self, path: str, offset: int, into: memoryview) -> int:
        count = super().read(path, offset, into)
        if path.endswith(".kvs"):
            assert callable(self._meanwhile)
            self._meanwhile()
        return count


def _generation(path: str) -> int:
    """Return the number of the write that made a shard's file; 0: it is another file."""
    stem = path.removesuffix(".kvs")
    return int(stem.rpartition("-")[2], 16) if stem != path else 0


class CacheSimulation:
    """One day of one machine. ``time`` is that of a ``virtual_time`` that is entered."""

    def __init__(
        self,
        root: str,
        seed: int,
        time: VirtualTime,
        swarm: CacheSwarm | None = None,
        *,
        every_step: bool = False,
    ) -> None:
        """``swarm`` stands in for what the seed draws."""
        self.draws = random.Random(seed)
        self.swarm = swarm or drawn_cache(self.draws, every_step=every_step)
        self.folder = Path(root)
        self.time = time
        time.delay_s = self.delay_s
        self.files = FaultyFiles(InterruptedFiles(self.meanwhile), seed=seed)
        self.remotes = [WorldRemote(self.draws) for _ in self.swarm.remotes]
        self.seen: Counter[str] = Counter()
        self.disk_is_slow = False
        self.nested = 0
        self.errors: list[logging.LogRecord] = []
        self.world = self.open()

    def open(self) -> World:
        """Start a process."""
        swarm = self.swarm
        disk = None
        if swarm.directories:
            paths = tuple(str(self.folder / str(number)) for number in range(swarm.directories))
            disk = DiskConfig(
                paths[0],
                swarm.disk_chunks * CHUNK_BYTES,
                mode=swarm.disk_mode,
                policy=swarm.policy,
                admission=swarm.admission,
                byte_codec=swarm.byte_codec,
                more_paths=paths[1:],
            )
        remotes = tuple(
            RemoteConfig(
                f"world://{number}",
                capacity_bytes=each.capacity_chunks * CHUNK_BYTES,
                ttl_s=each.ttl_s,
                absent_s=each.absent_s,
                mode=each.mode,
                connections=each.connections,
                deadline_s=each.deadline_s,
                byte_codec=each.byte_codec,
            )
            for number, each in enumerate(swarm.remotes)
        )
        placements = tuple(Placement(n, n, swarm.workers) for n in range(swarm.workers))
        config = CacheConfig(
            dram_bytes=swarm.dram_chunks * CHUNK_BYTES,
            disk=disk,
            remotes=remotes,
            slab_bytes=4096,
            policy=swarm.policy,
            workers=placements,
            pending_deadline_s=0.3,
        )

        def connect(url: str) -> Connector:
            return self.remotes[int(url.removeprefix("world://"))]

        with mock.patch.object(os, "urandom", self.draws.randbytes):
            cache = Cache(config, clock=self.time.loop, files=self.files, connect=connect)
        return World(cache, self.time.loop, self.draws, placements)

    def delay_s(self, threads: str) -> float:
        """Draw what a thread's job takes."""
        if not threads.startswith(("kvtier-read", "kvtier-write")):
            return self.draws.expovariate(5000.0)
        if self.disk_is_slow and self.draws.random() < 0.2:
            return self.draws.uniform(0.0, HANG_S)
        return self.draws.expovariate(500.0)

    # Steps.

    def arrive(self) -> None:
        if len(self.world.requests) < REQUESTS_MAX:
            draws = self.draws
            chunks = draws.randint(1, CHUNKS_MAX)
            tokens = prompt(draws.randrange(FAMILIES), draws.randrange(BRANCHES), chunks)
            start = draws.choice((0, 0, 0, 4, CHUNK, 3 * CHUNK // 2))
            if start < len(tokens):
                self.world.arrive(draws.choice(self.swarm.namespaces), tokens, start)

    def poll(self) -> None:
        for request in [*self.world.requests]:
            self.world.poll(request)

    def work(self) -> None:
        self.world.work(self.draws.choice(self.world.workers))

    def answer(self) -> None:
        self.world.answer(self.draws.choice(self.world.workers))

    def engine(self) -> None:
        """What an engine does in one step when all is well."""
        self.poll()
        for worker in self.world.workers:
            while worker.inbox:
                self.world.work(worker)
            self.world.cache.finish([*worker.outbox])
            worker.outbox.clear()

    def wait(self) -> None:
        self.time.loop.pass_time(self.draws.choice((0.001, 0.01, 0.01, 0.05, 0.2)))

    def wait_long(self) -> None:
        self.time.loop.pass_time(self.draws.choice((1.0, 3.0)))

    def cancel(self) -> None:
        if self.world.requests:
            self.world.cancel(self.draws.choice(self.world.requests))

    def kill_worker(self) -> None:
        self.world.kill(self.draws.choice(self.world.workers))

    def invalidate(self) -> None:
        namespace = self.draws.choice(NAMESPACES)
        try:
            self.world.cache.invalidate(namespace)
        except TierUnavailableError:
            self.seen["epoch kept in memory"] += 1
        for request in self.world.requests:
            if request.sequence.namespace == namespace:
                request.stale = request.load is None or request.load.outcome is None
        self.seen["invalidated"] += 1

    def remove(self) -> None:
        namespace = self.draws.choice(NAMESPACES)
        sequence = self.world.cache.sequence(namespace)
        sequence.append(prompt(self.draws.randrange(FAMILIES), 0, CHUNKS_MAX))
        gone = self.world.cache.remove(self.draws.sample(sequence.chunk_keys, 2))
        self.seen["removed"] += sum(gone)

    def spoil(self) -> None:
        """Somebody else damages what lies on a disk or in a remote."""
        paths = sorted(self.folder.rglob("*.kvs"))
        if paths and self.draws.random() < 0.5:
            path = self.draws.choice(paths)
            data = bytearray(path.read_bytes())
            if data:
                data[telling_byte(self.draws, len(data))] ^= 1
                path.write_bytes(data if self.draws.random() < 0.7 else data[: len(data) // 2])
        elif self.remotes:
            remote = self.draws.choice(self.remotes)
            if remote.objects:
                key = self.draws.choice(list(remote.objects))
                if self.draws.random() < 0.5:
                    del remote.objects[key]
                else:
                    remote.objects[key] = remote.objects[key][::-1]
        self.seen["spoiled"] += 1

    def fail_disk(self) -> None:
        """The disk goes wrong, once or from now on."""
        nth, last = self.draws.randrange(1, 4), self.draws.choice((None, EVER))
        read, create = (FileOperation.READ,), (FileOperation.CREATE,)
        faults = (
            FileFailure(operations=read, nth=nth, last=last),
            FileFailure(operations=create, errno=errno.ENOSPC, nth=nth, last=last),
            FileFailure(operations=(FileOperation.REMOVE, FileOperation.APPEND), last=last),
            FileFailure(operations=tuple(FileOperation), nth=nth, last=last),
            BitFlip(nth=nth, offset=8192),
            ShortRead(nth=nth, nbytes=4096),
            TornWrite(nth=nth, nbytes=4096),
        )
        self.files.inject(self.draws.choice(faults))
        self.disk_is_slow = self.draws.random() < 0.5
        self.seen["disk failed"] += 1

    def fail_remote(self) -> None:
        for remote in self.remotes:
            remote.mood = self.draws.choice(tuple(Mood))
            self.seen[f"remote {remote.mood}"] += 1

    def heal(self) -> None:
        self.files.inject()
        self.disk_is_slow = False
        for remote in self.remotes:
            remote.mood = Mood.WELL

    def restart(self) -> None:
        """The engine ends and another one starts."""
        self.end()
        self.world.cache.close(timeout_s=self.close_s())
        self.time.next_process()
        self.world = self.open()
        self.seen["restart"] += 1

    def close_s(self) -> float:
        """How long an engine waits for its cache to close."""
        return self.draws.choice((0.0, 0.1, 5.0))

    def crash(self) -> None:
        """The process dies, perhaps in the middle of a write."""
        if self.draws.random() < 0.5:
            nbytes = self.draws.choice((None, 0, 100, 4096))
            self.files.inject(FileCrash(nth=self.draws.randrange(1, 5), nbytes=nbytes))
            self.time.loop.pass_time(0.01)
            self.seen["crashed in a write"] += self.files.crashed
        self.end()
        self.time.loop.dead = True
        for remote in self.remotes:
            remote.mood = Mood.AWAY
        self.world.cache.close(timeout_s=0.0)
        self.files.restart()
        for remote in self.remotes:
            remote.mood = Mood.WELL
        self.time.next_process()
        self.world = self.open()
        self.seen["crash"] += 1

    def end(self) -> None:
        """Take over what the process that ends has seen; its workers end with it."""
        self.seen += self.world.seen

    def meanwhile(self) -> None:
        """What an engine may do while a thread reads."""
        if self.nested < NESTED_MAX and self.draws.random() < 0.2 and not self.time.loop.dead:
            self.nested += 1
            try:
                step = self.draws.choice((self.poll, self.work, self.answer, self.cancel))
                step()
                self.seen["nested"] += 1
            finally:
                self.nested -= 1

    # What must hold.

    def check(self) -> None:
        assert not self.errors, [record.getMessage() for record in self.errors]
        self.world.check_deadlines()
        if self.draws.random() < 0.05:
            self.world.cache.check_integrity()

    def run(self, steps: int) -> None:
        """Run so many steps and come to rest; the same seed does the same again."""
        names, weights = list(self.swarm.weights), list(self.swarm.weights.values())
        with self.listening():
            for name in self.draws.choices(names, weights, k=steps):
                getattr(self, name)()
                self.check()
            self.finish()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of what breaks where nobody waits for it."""
        log, logger = ErrorLog(self.errors), logging.getLogger("kvtier")
        logger.addHandler(log)
        try:
            yield
        finally:
            logger.removeHandler(log)

    def finish(self) -> None:
        """Everything heals and ends: nothing is left over, and every tier is well again."""
        self.heal()
        for remote in self.remotes:
            self.seen["encoded in a remote"] += remote.encoded_count
        world, loop = self.world, self.time.loop

        def rested() -> bool:
            self.engine()
            return not world.requests

        assert loop.pump(rested, WELL_S, LOOK_S), f"requests do not end: {world.requests}"
        stats = world.cache.stats

        def calm() -> bool:
            now = stats()
            return not now.late_jobs and not any(tier.pinned_chunks for tier in now.tiers)

        assert loop.pump(calm, WELL_S, LOOK_S), f"something is still under way: {stats()}"
        news = itertools.count(100)

        def well() -> bool:
            if not stats().degraded:
                return True
            # A write is tried again when there is something to write, perhaps asked for twice.
            world.arrive(NAMESPACES[0], prompt(next(news) // 3, 0, 2), 0)
            self.engine()
            return False

        is_well = loop.pump(well, WELL_S, LOOK_S) and loop.pump(rested, WELL_S, LOOK_S)
        assert loop.pump(calm, WELL_S, LOOK_S), f"something is still under way: {stats()}"
        assert is_well, f"a tier is not well again: {[(t.tier, t.state) for t in stats().tiers]}"
        world.check_quiet()
        self.end()
        world.cache.close()
        assert not self.errors, [record.getMessage() for record in self.errors]
        shutil.rmtree(self.folder, ignore_errors=True)
