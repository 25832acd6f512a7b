"""Several directories of one disk tier, with anything happening to them in any order."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from kvtier.constants import HEALTH_BACKOFF_S_MAX
from kvtier.testing.fault_files import EVER, FileFailure, FileOperation
from kvtier.testing.policy_machine import chunk_key
from tests.lib.disk_lab import bytes_on_disk
from tests.lib.disk_shelves import CHUNK_BYTES, DiskShelves, sizes_of


class Story:
    """A seeded sequence of events over directories, and what must hold after each."""

    def __init__(self, shelves: DiskShelves, rng: random.Random) -> None:
        self.shelves = shelves
        self.rng = rng
        self.away: set[int] = set()
        self.writes = 0

    def step(self) -> None:
        events = [self.write] * 8 + [self.read] * 4 + [self.touch, self.fail, self.heal]
        events += [self.pull_out, self.plug_in, self.chores, self.restart]
        self.rng.choice(events)()
        self.shelves.tier.check_integrity()
        for root in self.shelves.roots:
            assert bytes_on_disk(root) <= self.shelves.share_bytes

    @property
    def name(self) -> int:
        return self.rng.randrange(24)

    def write(self) -> None:
        """Sizes follow from the name, and so does the parent."""
        name = self.name
        self.shelves.tier.displace(chunk_key(name), set(sizes_of(1 + name % 3)))
        if self.shelves.tier.holds(chunk_key(name)) or not self.shelves.tier.writable():
            return
        parent = name - 12 if name >= 12 else None
        wrote = self.shelves.write(name, parent, shards=1 + name % 3)
        assert self.shelves.holds(name) == [wrote]
        self.writes += wrote

    def read(self) -> None:
        self.shelves.read(self.name)

    def touch(self) -> None:
        self.shelves.touch(self.name, self.name)

    def fail(self) -> None:
        self.rng.choice(self.shelves.files).inject(
            FileFailure(
                operations=(self.rng.choice(list(FileOperation)),),
                nth=self.rng.randrange(1, 4),
                last=self.rng.choice((None, EVER)),
                errno=self.rng.choice((errno.ENOSPC, errno.EIO, errno.EROFS)),
            )
        )

    def heal(self) -> None:
        for files in self.shelves.files:
            files.inject()
        self.shelves.clock.advance(HEALTH_BACKOFF_S_MAX)
        for number, volume in enumerate(self.shelves.volumes):
            if not volume.opened and number not in self.away:
                assert self.shelves.open(number) == [True]

    def pull_out(self) -> None:
        number = self.rng.randrange(len(self.shelves.roots))
        if number not in self.away and self.shelves.roots[number].exists():
            self.shelves.pull_out(number)
            self.away.add(number)
            self.shelves.volumes[number].read_failed(OSError(errno.EIO, "pulled out"))

    def plug_in(self) -> None:
        for number in sorted(self.away):
            self.shelves.plug_in(number)
        self.away.clear()
        self.heal()

    def chores(self) -> None:
        self.shelves.do_chores()

    def restart(self) -> None:
        self.plug_in()
        self.shelves.restart()


@pytest.mark.parametrize("count", [2, 3])
def test_whatever_happens_no_bound_is_broken_and_no_byte_is_wrong(
    tmp_path: Path, rng: random.Random, count: int, scale: int
) -> None:
    for round_number in range(4 * scale):
        folder = tmp_path / str(round_number)
        shelves = DiskShelves(folder, count=count, share_bytes=7 * CHUNK_BYTES)
        assert shelves.open() == [True] * count
        story = Story(shelves, rng)
        for _ in range(250):
            story.step()
        story.plug_in()
        assert story.writes > 20
        shelves.do_chores()
        for name in range(24):
            shelves.read(name)
        shelves.check()
        assert shelves.restart() == [True] * count
        shelves.check()
        for name in range(24):
            assert shelves.read(name) or shelves.holds(name) == [False]
        for name in range(6):
            shelves.tier.displace(chunk_key(name), set(sizes_of(1 + name % 3)))
            if shelves.holds(name) == [False]:
                assert shelves.write(name, shards=1 + name % 3)
        shelves.check()
        shelves.close()
