"""The disk tier under any order of events, against what its directory really holds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.constants import HEALTH_BACKOFF_S_MAX
from kvtier.testing.fault_files import ALL_OPERATIONS, FaultyFiles, FileFailure
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk.volume import DiskPlace
from kvtier.tiers.index import Lease
from kvtier.types import ShardId
from tests.lib.disk_lab import BoundedFiles, DiskLab, bytes_on_disk, files_below

# In memory where the system has such a place: thousands of small files are written.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
CHUNKS = 5
NAMES = 9


class DiskMachine(RuleBasedStateMachine):
    """Names are numbers; the parent of a chunk follows from its number and never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp(prefix="kvtier-disk-", dir=MEMORY)
        lab = DiskLab(self.root, chunks=CHUNKS, shards=2)
        self.faulty = FaultyFiles(BoundedFiles(self.root, lab.capacity_bytes), seed=1)
        self.lab = DiskLab(self.root, chunks=CHUNKS, shards=2, files=self.faulty)
        assert self.lab.open()
        self.leases: list[Lease[DiskPlace]] = []

    @staticmethod
    def parent(name: int) -> int | None:
        return name - 3 if name >= 3 else None

    def heal(self) -> None:
        self.faulty.inject()
        self.lab.clock.advance(HEALTH_BACKOFF_S_MAX)

    @rule(name=strategies.integers(0, NAMES - 1))
    def write(self, name: int) -> None:
        if not self.lab.tier.holds(chunk_key(name)) and self.lab.tier.writable():
            wrote = self.lab.write(name, self.parent(name))
            assert self.lab.holds(name) == [wrote]

    @rule(name=strategies.integers(0, NAMES - 1))
    def read(self, name: int) -> None:
        """What is read is right; ``DiskLab.read`` sees to that."""
        self.lab.read(name)

    @rule(names=strategies.lists(strategies.integers(0, NAMES - 1), max_size=3))
    def touch(self, names: list[int]) -> None:
        self.lab.touch(*names)

    @precondition(lambda self: len(self.leases) < 3 and len(self.lab.tier.index) > 0)
    @rule(pick=strategies.integers(0, NAMES - 1))
    def pin(self, pick: int) -> None:
        records = list(self.lab.tier.index)
        self.leases.append(self.lab.tier.index.lease([records[pick % len(records)]]))

    @precondition(lambda self: self.leases)
    @rule()
    def unpin(self) -> None:
        self.leases.pop(0).release()

    @rule(
        name=strategies.integers(0, NAMES - 1),
        group=strategies.integers(0, 1),
        way=strategies.sampled_from(("flip", "header", "cut", "remove", "swap")),
    )
    def damage(self, name: int, group: int, way: str) -> None:
        """Something else spoils a file."""
        record = self.lab.tier.ready(chunk_key(name))
        if record is None or ShardId(group, 0, 0) not in record.places:
            return
        path = Path(record.places[ShardId(group, 0, 0)].path)
        if not path.exists():
            return
        data = bytearray(path.read_bytes())
        if way == "remove":
            path.unlink()
        elif way == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif way == "swap":
            other = next(p for p in files_below(self.root, "shards") if p.is_file())
            if other.stat().st_size == len(data):
                path.write_bytes(other.read_bytes())
        else:
            data[-4096 if way == "flip" else 50] ^= 1
            path.write_bytes(data)

    @rule()
    def chores(self) -> None:
        self.lab.do_chores()

    @rule(nth=strategies.integers(1, 6), last=strategies.sampled_from((None, 0)))
    def fail(self, nth: int, last: int | None) -> None:
        self.faulty.inject(FileFailure(operations=ALL_OPERATIONS, nth=nth, last=last))

    @rule()
    def recover(self) -> None:
        self.heal()
        if not self.lab.tier.opened:
            assert self.lab.open()

    @rule()
    def reopen(self) -> None:
        """The same process opens again, with readers under way."""
        self.lab.open()

    @rule()
    def restart(self) -> None:
        for lease in self.leases:
            lease.release()
        self.leases.clear()
        self.lab.restart()

    @invariant()
    def books_agree(self) -> None:
        self.lab.tier.check_integrity()
        assert bytes_on_disk(self.root) <= self.lab.capacity_bytes
        for record in self.lab.tier.index:
            assert record.entry.nbytes == sum(p.nbytes for p in record.places.values())

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        self.heal()
        assert self.lab.open(), "the disk is well again"
        assert self.lab.do_chores()
        # What was cut or removed behind the tier's back shows when it is read.
        for name in range(NAMES):
            self.lab.read(name)
        assert self.lab.do_chores()
        assert self.lab.open()
        self.lab.check()
        for name in range(NAMES):
            if not self.lab.tier.holds(chunk_key(name)):
                self.lab.write(name, self.parent(name))
        self.lab.check()
        self.lab.close()
        shutil.rmtree(self.root)


# Each step touches a disk: fewer of them than the profile has elsewhere.
EXAMPLES = settings.default.max_examples // 4 if settings.default else 25
DiskMachine.TestCase.settings = settings(stateful_step_count=30, max_examples=EXAMPLES)
TestDiskMachine = DiskMachine.TestCase
