"""The arena's memory: mapped at once, in huge pages, shared, let go."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.constants import MIB
from kvtier.errors import ConfigError
from kvtier.tiers.arena import Arena
from kvtier.tiers.memory import ArenaHandle, map_arena
from kvtier.types import Slot

PAGE = 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(32 * PAGE, slab_bytes=8 * PAGE)
    yield made
    made.close()


def mapping_of(memory: memoryview) -> dict[str, str]:
    """Return what the kernel says of the mapping that a view lies in."""
    byte = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(byte)
    del byte
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def kib(fields: dict[str, str], name: str) -> int:
    return int(fields[name].split()[0])


@pytest.mark.parametrize("shared", [False, True])
def test_every_page_is_there_from_the_start(shared: bool) -> None:
    arena = Arena(16 * MIB, shared=shared)
    fields = mapping_of(arena.memory)
    assert kib(fields, "Rss") >= 16 * 1024
    arena.close()


def test_memory_lies_in_huge_pages_where_the_system_has_them() -> None:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    arena = Arena(16 * MIB)
    fields = mapping_of(arena.memory)
    arena.close()
    if not switch.exists() or "[never]" in switch.read_text():
        assert kib(fields, "AnonHugePages") == 0
        return
    assert "hg" in fields["VmFlags"].split()
    assert kib(fields, "AnonHugePages") > 0


def test_capacity_is_whole_pages_and_at_least_one() -> None:
    arena = Arena(3 * PAGE + 100)
    assert arena.capacity_bytes == 3 * PAGE
    arena.close()
    with pytest.raises(ConfigError, match="4096"):
        Arena(PAGE - 1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("nbytes", [1 << 42, 1 << 60], ids=["4 TiB", "1 EiB"])
def test_more_than_the_machine_has_is_refused(shared: bool, nbytes: int) -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match="machine"):
        Arena(nbytes, shared=shared)
    assert open_descriptors() == before


def test_a_slot_larger_than_a_slab_has_its_own(arena: Arena) -> None:
    large = arena.allocate(12 * PAGE)
    small = arena.allocate(PAGE)
    assert large is not None
    assert small is not None
    assert [slab.slot_count for slab in arena.slabs()] == [1, 8]
    assert arena.used_bytes == 13 * PAGE


def test_an_empty_slab_serves_another_size(arena: Arena) -> None:
    ones = [arena.allocate(PAGE) for _ in range(32)]
    assert arena.allocate(2 * PAGE) is None
    for slot in ones[:8]:
        assert slot is not None
        arena.free(slot)
    assert arena.allocate(2 * PAGE) == Slot(0, 2 * PAGE)


def test_the_last_slab_takes_what_is_left(arena: Arena) -> None:
    """Three slots of five pages: the slabs hold one each, and two pages stay free for others."""
    slots = [arena.allocate(5 * PAGE) for _ in range(7)]
    assert slots[-1] is None
    assert all(slots[:-1])
    assert arena.allocate(2 * PAGE) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        Slot(PAGE, PAGE),
        Slot(0, 2 * PAGE),
        Slot(16 * PAGE, PAGE),
        Slot(8 * PAGE, PAGE),
        Slot(7, PAGE),
    ],
    ids=["never given", "other size", "no slab", "behind the slab", "no start"],
)
def test_b92_freeing_what_was_not_given_out_or_twice_is_a_bug(arena: Arena, wrong: Slot) -> None:
    first = arena.allocate(PAGE)
    assert first is not None
    with pytest.raises(AssertionError):
        arena.free(wrong)
    arena.check_integrity()
    arena.free(first)
    with pytest.raises(AssertionError):
        arena.free(first)
    arena.check_integrity()


READER = """
import sys
from kvtier.tiers.memory import ArenaHandle, map_arena
memory = map_arena(ArenaHandle(sys.argv[1], int(sys.argv[2])))
print(bytes(memory[4096:4101]).decode())
memory[8192:8197] = b"reply"
"""


def test_another_process_sees_the_bytes_and_answers() -> None:
    arena = Arena(4 * PAGE, shared=True)
    assert arena.handle is not None
    arena.memory[PAGE : PAGE + 5] = b"hello"
    run = subprocess.run(
        [sys.executable, "-c", READER, arena.handle.path, str(arena.handle.nbytes)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "hello\n"
    assert bytes(arena.memory[2 * PAGE : 2 * PAGE + 5]) == b"reply"
    arena.close()


def test_a_mapping_outlives_its_descriptor_but_nobody_maps_after_close() -> None:
    arena = Arena(2 * PAGE, shared=True)
    handle = arena.handle
    assert handle is not None
    memory = map_arena(handle)
    arena.memory[0:1] = b"x"
    arena.close()
    assert bytes(memory[0:1]) == b"x"
    with pytest.raises(OSError, match="No such file"):
        map_arena(handle)


def test_an_owner_that_is_gone_is_an_os_error(tmp_path: Path) -> None:
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            "from kvtier.tiers.arena import Arena; print(Arena(4096, shared=True).handle.path)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    with pytest.raises(OSError, match="No such"):
        map_arena(ArenaHandle(child.stdout.strip(), PAGE))
    # The number of a process that has ended may be given to another, with other files.
    other = tmp_path / "other"
    other.write_bytes(b"short")
    with pytest.raises(OSError, match="owner"):
        map_arena(ArenaHandle(str(other), PAGE))


def test_an_arena_that_is_not_shared_has_no_handle(arena: Arena) -> None:
    assert arena.handle is None


@pytest.mark.parametrize("shared", [False, True])
def test_close_with_views_alive_leaves_them_safe_and_gives_the_pages_back(shared: bool) -> None:
    arena = Arena(4 * PAGE, shared=shared)
    slot = arena.allocate(PAGE)
    assert slot is not None
    view = arena.view(slot)
    foreign = (ctypes.c_char * PAGE).from_buffer(arena.memory)
    view[0:4] = b"kept"
    before = open_descriptors()
    arena.close()
    arena.close()
    assert open_descriptors() == before - (1 if shared else 0)
    left = b"kept" if shared else bytes(4)
    assert bytes(view[0:4]) == foreign.raw[:4] == left
