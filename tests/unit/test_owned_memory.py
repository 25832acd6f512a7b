"""Memory of several owners: each maps its own, for reading, and sees nothing of the others."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.constants import ARENA_OWNERS_MAX
from kvtier.errors import ConfigError
from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.arena import Arena
from kvtier.tiers.dram import DramTier
from kvtier.tiers.memory import available_bytes
from kvtier.tiers.owned_memory import OwnedMemory, Region
from kvtier.types import ChunkKey, Entry, Features, ShardId

PAGE = 4096
ANN, BEN = b"ann", b"ben"


@pytest.fixture
def memory() -> Iterator[OwnedMemory]:
    made = OwnedMemory(8 * PAGE, ANN)
    yield made
    made.check_integrity()
    made.close()


def region_of(memory: OwnedMemory | Arena, offset: int) -> Region:
    region = memory.region_at(offset)
    assert region is not None
    return region


def seen(region: Region) -> mmap.mmap:
    return mmap.mmap(region.descriptor, region.nbytes, prot=mmap.PROT_READ)


def test_an_owner_sees_what_is_its_own_where_it_lies(memory: OwnedMemory) -> None:
    memory.view[5 * PAGE : 5 * PAGE + 4] = b"ann5"
    with seen(region_of(memory, 0)) as mapped:
        assert mapped[5 * PAGE : 5 * PAGE + 4] == b"ann5"
        memory.view[0:4] = b"late"
        assert mapped[0:4] == b"late"


def test_b102_a_part_that_changes_hands_is_empty_for_both(memory: OwnedMemory) -> None:
    memory.view[:] = b"a" * (8 * PAGE)
    with seen(region_of(memory, 0)) as anns:
        assert memory.own(2 * PAGE, 3 * PAGE, BEN)
        assert bytes(memory.view[2 * PAGE : 5 * PAGE]) == bytes(3 * PAGE)
        memory.view[2 * PAGE : 5 * PAGE] = b"b" * (3 * PAGE)
        whose = [region_of(memory, page * PAGE).owner for page in range(8)]
        assert whose == [ANN, ANN, BEN, BEN, BEN, ANN, ANN, ANN]
        with seen(region_of(memory, 2 * PAGE)) as bens:
            assert anns[:] == b"a" * (2 * PAGE) + bytes(3 * PAGE) + b"a" * (3 * PAGE)
            assert bens[:] == bytes(2 * PAGE) + b"b" * (3 * PAGE) + bytes(3 * PAGE)
        # And back, with what lies beside it.
        assert memory.own(0, 8 * PAGE, ANN)
        assert anns[:] == b"a" * (2 * PAGE) + bytes(3 * PAGE) + b"a" * (3 * PAGE)
        assert anns[:] == memory.view


def test_who_maps_its_own_cannot_write_or_cut_it(memory: OwnedMemory) -> None:
    descriptor = region_of(memory, 0).descriptor
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for spoil in (
        lambda: os.pwrite(descriptor, b"x", 0),
        lambda: os.ftruncate(descriptor, 0),
    ):
        with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
            spoil()
    # Whoever could open it anew, as root can, finds a file that keeps its length.
    assert Path(f"/proc/self/fd/{descriptor}").stat().st_mode & 0o777 == 0
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR) if os.geteuid() == 0 else -1
    if again >= 0:
        for nbytes in (0, 16 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(again, nbytes)
        os.close(again)


def test_what_is_mapped_outlives_the_memory() -> None:
    memory = OwnedMemory(2 * PAGE, ANN)
    memory.view[0:4] = b"kept"
    mapped = seen(region_of(memory, 0))
    memory.close()
    memory.close()
    assert mapped[0:4] == b"kept"
    mapped.close()


def test_regions_are_told_apart_by_number(memory: OwnedMemory) -> None:
    other = OwnedMemory(PAGE, ANN)
    assert memory.own(0, PAGE, BEN)
    numbers = {region_of(memory, 0).number, region_of(memory, PAGE).number}
    numbers.add(region_of(other, 0).number)
    assert len(numbers) == 3
    other.close()


def test_owners_beyond_the_limit_have_memory_that_nobody_maps() -> None:
    memory = OwnedMemory((ARENA_OWNERS_MAX + 2) * PAGE, b"0")
    for number in range(ARENA_OWNERS_MAX + 2):
        assert memory.own(number * PAGE, PAGE, b"%d" % number)
    assert memory.region_at((ARENA_OWNERS_MAX - 1) * PAGE) is not None
    assert memory.region_at(ARENA_OWNERS_MAX * PAGE) is None
    memory.check_integrity()
    memory.close()


def test_descriptors_are_closed() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    memory = OwnedMemory(4 * PAGE, ANN)
    memory.own(0, PAGE, BEN)
    memory.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="available"):
        OwnedMemory(available_bytes() * 2, ANN)


def test_a_slab_is_one_owners() -> None:
    arena = Arena(16 * PAGE, slab_bytes=4 * PAGE, owner=ANN)
    of_ann = arena.allocate(PAGE, ANN)
    of_ben = arena.allocate(PAGE, BEN)
    again = arena.allocate(PAGE, ANN)
    assert of_ann is not None
    assert of_ben is not None
    assert again is not None
    assert {slab.owner: len(slab.used) for slab in arena.slabs()} == {ANN: 2, BEN: 1}
    assert region_of(arena, of_ann.offset).owner == ANN
    assert region_of(arena, of_ben.offset).owner == BEN
    arena.view(of_ben)[:] = b"b" * PAGE
    arena.free(of_ben)
    arena.check_integrity()
    taken = [arena.allocate(PAGE, ANN) for _ in range(14)]
    assert None not in taken
    assert arena.allocate(PAGE, BEN) is None
    arena.check_integrity()
    assert not any(bytes(arena.view(slot)).strip(b"\0") for slot in taken if slot is not None)
    arena.close()


def test_an_arena_of_one_piece_has_no_regions() -> None:
    arena = Arena(4 * PAGE)
    assert arena.region_at(0) is None
    arena.close()


def test_another_owner_gets_one_slab_and_not_a_slot_of_each() -> None:
    """Slots of its size lie in slabs of somebody else: emptying one slab is what helps."""
    clock = FakeClock()
    left: list[ChunkKey] = []
    arena = Arena(16 * PAGE, slab_bytes=4 * PAGE, owner=ANN)
    tier = DramTier(arena, LRU, clock, left.append, owner_of=lambda namespace: namespace)

    def store(number: int, owner: bytes) -> None:
        clock.advance(1.0)
        entry = Entry(chunk_key(number), None, PAGE, 0)
        record = tier.reserve(entry, owner, "raw", {ShardId(0, 0, 0): PAGE})
        assert record is not None
        tier.commit(record)

    for number in range(16):
        store(number, ANN)
    for number in sorted(range(16), key=lambda each: each % 4):  # The coldest, one of each slab.
        clock.advance(1.0)
        tier.touch([chunk_key(number)], Features())
    store(16, BEN)
    # One for its bytes, and a slab of four.
    assert len(left) <= 5
    tier.check_integrity()
    arena.close()


@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(1, 12), st.sampled_from([ANN, BEN, b"cat"])),
        max_size=30,
    )
)
def test_every_part_is_whose_it_was_given_to_last(gifts: list[tuple[int, int, bytes]]) -> None:
    """Against a list of pages; each owner writes its name, and finds what it wrote, or nothing."""
    memory = OwnedMemory(12 * PAGE, ANN)
    owners, texts = [ANN] * 12, [b"\0\0\0"] * 12
    for first, count, owner in gifts:
        pages = range(first, min(first + count, 12))
        assert memory.own(first * PAGE, len(pages) * PAGE, owner)
        for page in pages:
            if owners[page] != owner:
                owners[page], texts[page] = owner, b"\0\0\0"
        memory.view[first * PAGE : first * PAGE + 3] = owner
        texts[first] = owner
        memory.check_integrity()
    for page, (owner, text) in enumerate(zip(owners, texts, strict=True)):
        region = region_of(memory, page * PAGE)
        assert region.owner == owner
        assert os.pread(region.descriptor, 3, page * PAGE) == text
        others = {region_of(memory, each * PAGE) for each in range(12)} - {region}
        assert not any(os.pread(o.descriptor, PAGE, page * PAGE).strip(b"\0") for o in others)
    memory.close()
