"""Where the system gives no memory to an owner, nobody else's chunks go for it."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers import owned_memory
from kvtier.tiers.arena import Arena
from kvtier.tiers.dram import DramTier
from kvtier.types import ChunkKey, Entry, ShardId

PAGE = 4096
ANN, BEN = b"ann", b"ben"


class Room:
    """Four slabs of four pages; ann has all but one page."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.left: list[ChunkKey] = []
        self.arena = Arena(16 * PAGE, slab_bytes=4 * PAGE, owner=ANN)
        self.tier = DramTier(
            self.arena, LRU, self.clock, self.left.append, owner_of=lambda namespace: namespace
        )
        self.stored = 0

    def store(self, owner: bytes, pages: int = 1) -> bool:
        self.clock.advance(1.0)
        self.stored += 1
        entry = Entry(chunk_key(self.stored), None, pages * PAGE, 0)
        record = self.tier.reserve(entry, owner, "raw", {ShardId(0, 0, 0): pages * PAGE})
        if record is not None:
            self.tier.commit(record)
        self.tier.check_integrity()
        return record is not None


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    for _ in range(8):
        assert room.store(ANN)
    yield room
    room.arena.close()


def no_file(name: str, nbytes: int) -> None:
    del name, nbytes
    raise OSError(errno.EMFILE, "Too many open files")


def test_an_owner_without_a_file_is_refused_and_nothing_else_goes(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owned_memory, "SharedFile", no_file)
        for _ in range(5):
            assert not room.store(BEN)
        assert room.left == []
        assert room.store(ANN), "others go on"
    assert room.store(BEN)
    assert room.left == []


def test_in_a_full_arena_one_slab_is_emptied_and_no_more(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(8):
        assert room.store(ANN)
    assert room.left == []
    monkeypatch.setattr(owned_memory, "SharedFile", no_file)
    assert not room.store(BEN)
    # One for its bytes, and what lay in one slab beside it.
    assert 1 <= len(room.left) <= 5
    left = len(room.left)
    for _ in range(5):
        assert not room.store(BEN)
    assert len(room.left) == left, "there is room, which the system does not give"


def test_an_owner_that_has_a_slab_goes_on_with_it(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        assert room.store(BEN)
    monkeypatch.setattr(owned_memory.OwnedMemory, "own", lambda *_: False)
    assert room.store(BEN), "the coldest of its own makes way"
    assert room.left == [chunk_key(9)]
