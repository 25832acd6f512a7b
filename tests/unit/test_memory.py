"""Mapped memory: which pages, how far, how much there is."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import GIB, HUGE_PAGE_BYTES, MIB
from kvtier.errors import ConfigError
from kvtier.testing.clock import FakeClock
from kvtier.tiers.arena import Arena
from kvtier.tiers.memory import Memory, ProgressLog, available_bytes, huge_on_advice, map_arena

SET_ASIDE = Path("/proc/sys/vm/nr_hugepages")
FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
HUGE_PAGES = 8


def free_huge_pages() -> int:
    return int(FREE.read_text()) if FREE.exists() else 0


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """How many huge pages are free: some set aside for this test alone, where the kernel lets us.

    Elsewhere there may be none, and the tests hold the arena to ordinary pages.
    """
    before = SET_ASIDE.read_text() if SET_ASIDE.exists() else ""
    try:
        with contextlib.suppress(OSError, ValueError):
            SET_ASIDE.write_text(str(int(before) + HUGE_PAGES))
        yield free_huge_pages()
    finally:
        with contextlib.suppress(OSError):
            SET_ASIDE.write_text(before)


READER = """
import sys
from kvtier.tiers.memory import ArenaHandle, map_arena
memory = map_arena(ArenaHandle(sys.argv[1], int(sys.argv[2])))
print(bytes(memory[-5:]).decode())
"""


def test_a_shared_arena_takes_huge_pages_that_are_set_aside(huge_pages: int) -> None:
    arena = Arena(4 * HUGE_PAGE_BYTES + 4096, shared=True)
    taken = huge_pages >= 4
    assert arena.huge == (taken or huge_on_advice("shmem_enabled"))
    assert arena.capacity_bytes == 4 * HUGE_PAGE_BYTES + (0 if taken else 4096)
    assert len(arena.memory) == arena.capacity_bytes
    assert arena.handle is not None
    arena.memory[-5:] = b"hello"
    run = subprocess.run(
        [sys.executable, "-c", READER, arena.handle.path, str(arena.handle.nbytes)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "hello\n"
    assert free_huge_pages() == huge_pages - (4 if taken else 0)
    arena.close()
    assert free_huge_pages() == huge_pages


def test_too_few_huge_pages_are_left_alone(huge_pages: int) -> None:
    nbytes = (huge_pages + 1) * HUGE_PAGE_BYTES
    memory = Memory(nbytes, shared=True)
    assert len(memory.view) == nbytes
    assert memory.huge == huge_on_advice("shmem_enabled")
    assert free_huge_pages() == huge_pages
    memory.close()


def test_a_little_memory_has_no_huge_pages() -> None:
    for shared in (False, True):
        memory = Memory(4096, shared=shared)
        assert not memory.huge
        memory.close()


@pytest.mark.parametrize("shared", [False, True])
def test_progress_is_told_after_each_step_and_ends_with_all(shared: bool) -> None:
    steps: list[tuple[int, int]] = []
    total = 130 * MIB
    arena = Arena(total, shared=shared, progress=lambda *step: steps.append(step))
    arena.close()
    assert steps == [(64 * MIB, total), (128 * MIB, total), (total, total)]


@pytest.mark.parametrize(
    ("step_bytes", "step_s", "lines"),
    [
        (GIB, 0.1, ["4 of 10", "8 of 10", "10 of 10"]),
        (GIB, 1.0, ["2 of 10", "4 of 10", "6 of 10", "8 of 10", "10 of 10"]),
        (10 * GIB, 0.1, ["10 of 10"]),
        (5 * GIB, 0.1, ["5 of 10", "10 of 10"]),
    ],
)
def test_a_line_per_four_gib_or_two_seconds(
    caplog: pytest.LogCaptureFixture, step_bytes: int, step_s: float, lines: list[str]
) -> None:
    clock = FakeClock()
    log = ProgressLog(clock)
    with caplog.at_level(logging.INFO, "kvtier.arena"):
        for done in range(step_bytes, 10 * GIB + 1, step_bytes):
            clock.advance(step_s)
            log(done, 10 * GIB)
    assert caplog.messages == [f"arena: {line} GiB mapped" for line in lines]


def test_little_memory_is_mapped_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvtier.arena"):
        Memory(16 * MIB).close()
    assert caplog.messages == []


class Machine:
    """The files in which a kernel tells how much memory there is."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 64 kB\nMemAvailable:  48 kB\nSwapFree: 0 kB\n")
        self.write("proc/self/cgroup", "")

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def group(self, folder: str, limit: str, used: int, cached: int, *, version: int) -> None:
        names = {
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            2: ("memory.max", "memory.current", "inactive_file"),
        }[version]
        mount = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
        self.write(f"{mount}/{folder}/{names[0]}", f"{limit}\n")
        self.write(f"{mount}/{folder}/{names[1]}", f"{used}\n")
        self.write(f"{mount}/{folder}/memory.stat", f"anon 5\n{names[2]} {cached}\nfile 7\n")

    def available(self) -> int:
        return available_bytes(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_the_machine_has_available_is_the_bound(machine: Machine) -> None:
    assert machine.available() == 48 * 1024
    machine.write("proc/self/cgroup", "0::/\n")
    assert machine.available() == 48 * 1024


@pytest.mark.parametrize("version", [1, 2])
def test_every_group_above_bounds_and_unused_cache_counts_as_free(
    machine: Machine, version: int
) -> None:
    line = "4:memory:/a/b" if version == 1 else "0::/a/b"
    machine.write("proc/self/cgroup", f"9:cpuset:/x\n{line}\n")
    machine.group("a/b", "max" if version == 2 else str(1 << 62), 9000, 0, version=version)
    assert machine.available() == 48 * 1024
    machine.group("a", "20000", 9000, 1000, version=version)
    assert machine.available() == 12000
    machine.group("a/b", "6000", 5000, 500, version=version)
    assert machine.available() == 1500
    machine.group("a/b", "6000", 7000, 500, version=version)
    assert machine.available() == 0


def test_a_containers_own_root_bounds_too(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/../host/pod\n")
    machine.group("", "10000", 4000, 0, version=2)
    assert machine.available() == 6000


@pytest.mark.parametrize("shared", [False, True])
def test_an_arena_larger_than_what_is_available_is_refused_before_it_is_touched(
    shared: bool,
) -> None:
    """More than is free, less than there is: touching it would end some process."""
    steps: list[int] = []
    wanted = available_bytes() + GIB
    with pytest.raises(ConfigError, match=rf"{wanted - wanted % 4096} bytes.*\d+ available"):
        Arena(wanted, shared=shared, progress=lambda done, _: steps.append(done))
    assert steps == []


def test_another_mapping_reads_what_the_owner_wrote() -> None:
    memory = Memory(8192, shared=True)
    assert memory.handle is not None
    other = map_arena(memory.handle)
    memory.view[:2] = b"ab"
    assert bytes(other[:2]) == b"ab"
    memory.close()
    memory.close()
