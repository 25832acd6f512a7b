"""DRAM and disk together under random steps, with everything that must be true checked after each.

One seed decides everything: the machine (see ``simulation_swarm``), its steps and its faults.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

from kvtier.constants import HEALTH_BACKOFF_S_MAX
from kvtier.testing.fault_files import (
    ALL_OPERATIONS,
    EVER,
    BitFlip,
    FileCrash,
    FileFailure,
    FileOperation,
    ShortRead,
)
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk import journal
from kvtier.tiers.disk.files import FileInfo, LocalFiles
from kvtier.tiers.disk.scan import parse_name
from kvtier.tiers.disk.tier import PolicyFactory
from kvtier.tiers.index import State
from tests.lib.disk_lab import bytes_on_disk, files_below
from tests.lib.simulation_swarm import drawn
from tests.lib.tier_traffic import CHUNK_NBYTES, DISK_CHUNKS, NAMES, TierTraffic


@contextmanager
def steady_time(ticks: Iterator[int]) -> Iterator[None]:
    """Let the wall clock tick once per look, and files be as old as their names say."""
    listed = LocalFiles.list

    def steady(self: LocalFiles, directory: str) -> list[FileInfo]:
        named = ((parse_name(info.path), info) for info in listed(self, directory))
        infos = [replace(info, modified_s=name[1] / 1e9 if name else 0.0) for name, info in named]
        return sorted(infos, key=lambda info: info.path)

    with (
        mock.patch("time.time_ns", ticks.__next__),
        mock.patch.object(LocalFiles, "list", steady),
    ):
        yield


class Simulation(TierTraffic):
    """The traffic, and faults, restarts, crashes and losses in between."""

    def __init__(
        self,
        root: str,
        seed: int,
        policy: PolicyFactory | None = None,
        *,
        every_step: bool = False,
    ) -> None:
        """``policy`` stands in for ours; ``every_step`` leaves no kind of step out."""
        draws = random.Random(seed)
        swarm = drawn(draws, DISK_CHUNKS * CHUNK_NBYTES, policy, every_step=every_step)
        self.ticks = itertools.count(10**18, 10**6)
        with steady_time(self.ticks):
            super().__init__(root, draws, swarm)
        self.told_count = 0  # Of the chunks that left the disk, those the admission knows of.

    def spoil(self) -> None:
        """Somebody else damages or removes a file."""
        ready = [r for r in self.tier.index if r.state is State.READY]
        if not ready:
            return
        record = self.draws.choice(ready)
        path = Path(self.draws.choice(list(record.places.values())).path)
        if path.exists() and path.stat().st_size:
            self.lost.add(record.entry.key)
            self.spoiled.add(record.entry.key)
            data = bytearray(path.read_bytes())
            data[-min(4096, len(data))] ^= 1
            way = self.draws.randrange(3)
            path.unlink() if way == 0 else path.write_bytes(data[: len(data) // way])

    def fail(self) -> None:
        """One of the disks goes wrong, once or from now on."""
        nth, last = self.draws.randrange(1, 4), self.draws.choice((None, EVER))
        some = self.draws.choice(((FileOperation.READ,), (FileOperation.CREATE,), ALL_OPERATIONS))
        kinds = (
            FileFailure(operations=some, nth=nth, last=last),
            FileFailure(operations=some, nth=nth, last=last),
            FileFailure(operations=(FileOperation.REMOVE, FileOperation.APPEND), last=last),
            BitFlip(nth=nth, offset=8192),
            ShortRead(nth=nth, nbytes=4096),
        )
        self.draws.choice(self.shelves.files).inject(self.draws.choice(kinds))

    def heal(self) -> None:
        for files in self.shelves.files:
            files.inject()

    def tick(self) -> None:
        self.shelves.clock.advance(self.draws.choice((0.1, 1.0, HEALTH_BACKOFF_S_MAX)))
        for number, volume in enumerate(self.shelves.volumes):
            if self.writes[number]:
                continue  # One thread writes and opens, one after the other.
            if volume.open_due:
                self.open_again(number)
            elif volume.writable:
                self.shelves.do_chores(number)

    def reopen(self) -> None:
        number = self.draws.randrange(len(self.writes))
        if not self.writes[number]:
            self.open_again(number)

    def open_again(self, number: int) -> None:
        """An open that cannot read a file, or that finds none, gives it up."""
        before = self.held()
        self.shelves.open(number)
        self.lost |= {chunk_key(name) for name in before - self.held()}

    def restart(self) -> None:
        """The process dies: DRAM is gone, the directories are as they were."""
        self.come_back(self.certain())

    def lose_index(self) -> None:
        """The process dies, and an index with it."""
        certain = self.certain()
        index = self.draws.choice(self.shelves.roots) / "index"
        snapshot = index / "snapshot"
        if self.draws.random() < 0.5 or not snapshot.exists():
            shutil.rmtree(index, ignore_errors=True)
        else:
            data = bytearray(snapshot.read_bytes())
            data[self.draws.randrange(len(data))] ^= 1
            snapshot.write_bytes(data)
        self.seen["index lost"] += 1
        self.come_back(certain)

    def crash(self) -> None:
        """The process dies in the middle of what a writing thread does."""
        self.begin_write()
        certain = self.certain()
        busy = [number for number, writes in enumerate(self.writes) if writes]
        number = self.draws.choice(busy or range(len(self.writes)))
        nbytes = self.draws.choice((None, 0, 100, 4096))
        self.shelves.files[number].inject(FileCrash(nth=self.draws.randrange(1, 9), nbytes=nbytes))
        if self.writes[number]:
            self.end_write_of(number)
        elif self.shelves.volumes[number].opened:
            self.shelves.do_chores(number)
        self.seen["crash"] += self.shelves.files[number].crashed
        self.come_back(certain)

    def certain(self) -> set[int]:
        """Return what is on disk, whole and committed, and that nobody has spoiled."""
        writing = {write.target.entry.key for writes in self.writes for write in writes}
        uncertain = writing | self.spoiled
        return {name for name in self.held() if chunk_key(name) not in uncertain}

    def come_back(self, certain: set[int]) -> None:
        self.seen["restart"] += 1
        before = self.held()
        self.dram.arena.close()
        for files in self.shelves.files:
            files.restart()
        opened = self.shelves.restart()
        assert all(opened), "a disk that is well does not open"
        self.start()
        after = self.held()
        self.check_files(after)
        assert certain <= after, f"{certain - after} are on disk and not found again"
        # Of several directories each has its own order, so what was written above may be missing.
        gone = before - after if len(self.writes) == 1 else set(range(NAMES)) - after
        self.lost |= {chunk_key(name) for name in gone}

    def check_files(self, held: set[int]) -> None:
        """After a start the index at rest names nothing that is not there."""
        paths = [path for root in self.shelves.roots for path in files_below(root, "shards")]
        counts = Counter(path.name[:64] for path in paths)
        for name in held:
            key = chunk_key(name)
            found = self.tier.find(key)
            if found is not None and key not in self.spoiled:
                assert counts[key.hex()] >= len(found[1]), "a chunk is promised that has no files"

    def check(self) -> None:
        evicted = self.shelves.evicted[self.told_count :]
        for key in evicted:
            self.swarm.admission.left(key, self.shelves.clock.now())
        self.told_count += len(evicted)
        self.seen["evicted from disk"] += len(evicted)
        self.seen["in quarantine"] += self.tier.quarantined_count > 0
        self.seen["cold"] += len(self.tier) > len(self.tier.index)
        self.dram.check_integrity()
        self.tier.check_integrity()
        if self.draws.random() < 0.1:
            for root in self.shelves.roots:
                assert bytes_on_disk(root) <= self.shelves.share_bytes
            for record in self.dram.index:
                if record.state is State.READY:
                    self.check_bytes(record)
        for on_disk in self.tier.index:
            parent = on_disk.entry.parent
            if parent is not None and not self.tier.holds(parent):
                assert parent in self.lost, "a chunk lies on disk that nothing reaches"

    def run(self, steps: int) -> None:
        """Run so many steps and end well; the same seed does the same again."""
        logged = mock.patch.object(journal, "JOURNAL_CHANGES_LOGGED", self.swarm.changes_logged)
        with logged, steady_time(self.ticks):
            self.shelves.open()
            names, weights = list(self.swarm.weights), list(self.swarm.weights.values())
            for name in self.draws.choices(names, weights, k=steps):
                getattr(self, name)()
                self.check()
            self.finish()

    def finish(self) -> None:
        """Everything under way ends, the disk is well: no pin, no byte and no file is left over."""
        self.heal()
        while any(self.writes):
            self.end_write()
        while self.fills:
            self.end_fill()
        while self.storing:
            self.end_store()
        for lease in self.pins:
            lease.release()
        self.shelves.clock.advance(HEALTH_BACKOFF_S_MAX)
        assert all(self.shelves.open())
        for index in (self.dram.index, self.tier.index):
            assert index.pinned_count == index.leaving_count == 0
        for name in range(NAMES):
            self.shelves.read(name)
        assert self.shelves.do_chores()
        # Counts what was cut short before it was put away as it is.
        assert all(self.shelves.open())
        self.shelves.check()
        self.shelves.close()
        self.dram.arena.close()
