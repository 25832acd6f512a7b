"""What is encoded ahead of its write: pinned, few at a time, parents first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from kvtier.cache.below.ahead import Ahead, Dirty, Outgoing
from kvtier.cache.below.encoder import ChunkEncoder, EncodedChunk
from kvtier.cache.executor import Executor
from kvtier.cache.shapes import Shapes
from kvtier.codecs.known import KnownCodecs
from kvtier.codecs.zstd import ZstdCodec
from kvtier.constants import MIB, WRITES_INFLIGHT_MAX
from kvtier.errors import CodecError
from kvtier.policies.lru import LRU
from kvtier.testing.clock import FakeClock
from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.arena import Arena
from kvtier.tiers.dram import DramTier
from kvtier.types import Entry, GroupKind, KVGroup, KVLayout

GROUP = KVGroup(GroupKind.FULL, (0, 1), kv_heads=2, k_dim=64, v_dim=64, dtype="float32")
LAYOUT = KVLayout((GROUP,), chunk_tokens=16)


class ByHand:
    """An executor whose work ends when the test says so."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def ahead(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self._jobs.append((work, done))

    def end(self, number: int, fault: CodecError | None = None) -> None:
        work, done = self._jobs[number]
        done(fault or work())


class Lab:
    """A few chunks in DRAM, each the child of the one before, on their way out."""

    def __init__(self) -> None:
        self.arena = Arena(4 * MIB, slab_bytes=MIB)
        self.dram = DramTier(self.arena, LRU, FakeClock(), lambda _: None)
        self.executor = ByHand()
        self.shapes = Shapes(KnownCodecs())
        self.failed: list[Outgoing | None] = []
        encoder = ChunkEncoder(ZstdCodec())
        by_hand = cast("Executor", self.executor)
        self.ahead = Ahead(self.dram, by_hand, threading.Lock(), self.shapes, encoder)

    def encode(self, number: int) -> Dirty:
        shape = self.shapes.of(LAYOUT, number, "raw")
        parent = chunk_key(number - 1) if number else None
        entry = Entry(chunk_key(number), parent, shape.chunk_bytes, number)
        if self.dram.index.get(entry.key) is None:
            record = self.dram.reserve(entry, b"n" * 32, "raw", shape.sizes)
            assert record is not None
            self.dram.commit(record)
        dirty = Dirty(entry, LAYOUT, number, None)
        self.ahead.encode(dirty, self.failed.append)
        return dirty

    def first(self) -> Dirty | None:
        outgoing = self.ahead.first
        return outgoing.dirty if outgoing is not None else None

    def pins(self) -> int:
        return self.dram.index.pinned_count


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.arena.close()


def test_parents_go_first_whatever_is_encoded_first(lab: Lab) -> None:
    """A parent that is tried again is encoded after its child."""
    child, parent = lab.encode(1), lab.encode(0)
    lab.executor.end(0)
    assert lab.first() is None, "the child waits"
    lab.executor.end(1)
    assert lab.first() is parent
    outgoing = lab.ahead.first
    assert outgoing is not None
    lab.ahead.take(outgoing)
    assert lab.first() is child
    assert lab.failed == [None, None]


def test_what_is_encoded_is_pinned_until_it_is_released(lab: Lab) -> None:
    dirty = lab.encode(0)
    assert (lab.pins(), dirty.entry.key in lab.ahead) == (1, True)
    lab.executor.end(0)
    outgoing = lab.ahead.first
    assert outgoing is not None
    assert isinstance(outgoing.encoded, EncodedChunk)
    assert sum(outgoing.encoded.sizes.values()) < dirty.entry.nbytes
    lab.ahead.take(outgoing)
    assert (lab.pins(), len(lab.ahead)) == (1, 0)
    lab.ahead.release(outgoing)
    assert lab.pins() == 0


def test_what_cannot_be_encoded_is_the_callers(lab: Lab) -> None:
    dirty = lab.encode(0)
    lab.executor.end(0, CodecError("on purpose"))
    (outgoing,) = lab.failed
    assert outgoing is not None
    assert outgoing.dirty is dirty
    assert (len(lab.ahead), lab.first(), lab.pins()) == (0, None, 1)
    lab.ahead.release(outgoing)
    assert lab.pins() == 0


def test_few_are_encoded_at_a_time(lab: Lab) -> None:
    for number in range(WRITES_INFLIGHT_MAX):
        assert not lab.ahead.full
        lab.encode(number)
    assert lab.ahead.full


def test_sizes_are_expected_as_they_were(lab: Lab) -> None:
    assert lab.ahead.expected_bytes(1000) == 1000
    dirty = lab.encode(0)
    lab.executor.end(0)
    outgoing = lab.ahead.first
    assert outgoing is not None
    assert outgoing.encoded is not None
    stored = sum(outgoing.encoded.sizes.values())
    assert lab.ahead.expected_bytes(dirty.entry.nbytes) == stored
