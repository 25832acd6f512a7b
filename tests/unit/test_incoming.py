"""A shard out of a remote, sealed or encoded as the object says: the right one, or nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest

from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import FormatError, IdentityError, ShardError
from kvtier.shard_format import shard_geometry
from kvtier.tiers.arrival import Expected
from kvtier.tiers.decoding import ByteCodecs
from kvtier.tiers.remote import incoming as incoming_module
from kvtier.tiers.remote.incoming import Incoming, OtherCodecError, Part
from kvtier.tiers.scratch import Scratch
from kvtier.types import ChunkKey
from tests.lib.toy_shard import EXPECTED, GEOMETRY, shard_and_stored

SECTIONS = 3


@pytest.fixture(autouse=True)
def small_steps() -> Iterator[None]:
    """A step for each section."""
    with mock.patch.object(incoming_module, "REMOTE_STEP_BYTES", 1):
        yield


def objects() -> dict[str, bytes]:
    """The same shard, sealed and encoded."""
    shard, encoded = shard_and_stored(ZstdCodec())
    return {"sealed": bytes(shard), "encoded": bytes(encoded)}


OBJECTS = objects()


class Reader:
    """Reads an object as a fetch does, with so many reads begun ahead of the one that is taken."""

    def __init__(self, data: bytes, *, shrinks: bool, what: Expected = EXPECTED) -> None:
        self.data = data
        self.slot = bytearray(b"\xee") * GEOMETRY.shard_bytes
        self.scratch = Scratch()
        self.incoming = Incoming(
            memoryview(self.slot), what, ByteCodecs(), self.scratch, shrinks=shrinks
        )
        self.out: list[Part] = []
        self.sections: list[int] = []

    def run(self, ahead: int) -> None:
        left = list(self.incoming.steps)
        while left or self.out:
            while left and len(self.out) < ahead and not (self.incoming.waits and left[0].start):
                part = self.incoming.begin(left.pop(0))
                if part is not None:
                    self.out.append(part)
            if self.out:
                self.take()

    def take(self) -> None:
        part = self.out.pop(0)
        there = self.data[part.step.start : part.step.start + len(part.into)]
        part.into[: len(there)] = there
        self.sections.append(self.incoming.take(part, len(there)))


@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 8])
@pytest.mark.parametrize("kind", OBJECTS)
def test_what_lies_in_the_slot_is_the_sealed_shard(kind: str, ahead: int, *, shrinks: bool) -> None:
    reader = Reader(OBJECTS[kind], shrinks=shrinks)
    reader.run(ahead)
    assert reader.incoming.whole
    assert bytes(reader.slot) == OBJECTS["sealed"]
    assert sorted(reader.sections) == reader.sections
    encoded = len(OBJECTS["encoded"]) if kind == "encoded" else None
    assert reader.incoming.stored_bytes == encoded


def test_nothing_is_decoded_while_a_read_may_still_write_to_the_slot() -> None:
    reader = Reader(OBJECTS["encoded"], shrinks=False)
    reader.out = [part for step in reader.incoming.steps if (part := reader.incoming.begin(step))]
    late = reader.out[-1]
    for _ in range(SECTIONS - 1):
        reader.take()
    assert reader.sections == [0] * (SECTIONS - 1)
    late.into[:] = b"\xdd" * len(late.into)
    reader.take()
    assert reader.incoming.whole
    assert bytes(reader.slot) == OBJECTS["sealed"]


def test_where_objects_shrink_nothing_is_read_behind_their_end() -> None:
    reader = Reader(OBJECTS["encoded"], shrinks=True)
    first, *later = reader.incoming.steps
    part = reader.incoming.begin(first)
    assert part is not None
    reader.out = [part]
    reader.take()
    parts = [part for step in later if (part := reader.incoming.begin(step))]
    ends = [part.step.start + len(part.into) for part in parts]
    assert not any(part.in_slot for part in parts)
    assert max(ends) == len(OBJECTS["encoded"])
    assert all(reader.incoming.needs(part) for part in parts)


def test_steps_behind_the_first_wait_only_where_objects_shrink() -> None:
    waits = [Reader(OBJECTS["sealed"], shrinks=shrinks).incoming.waits for shrinks in (False, True)]
    assert waits == [False, True]


def test_sections_come_one_after_the_other_where_it_is_known_to_be_encoded() -> None:
    reader = Reader(OBJECTS["encoded"], shrinks=True)
    reader.run(ahead=1)
    assert reader.sections[0] >= 1
    assert reader.sections[-1] == SECTIONS


@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("kind", OBJECTS)
def test_b78_an_object_that_ends_early_is_no_shard(
    rng: random.Random, kind: str, *, shrinks: bool
) -> None:
    reader = Reader(OBJECTS[kind][: rng.randrange(len(OBJECTS[kind]))], shrinks=shrinks)
    with pytest.raises(FormatError):
        reader.run(ahead=4)
    assert not reader.incoming.whole


@pytest.mark.parametrize("part", ["prefix", "header", "first section", "last section"])
def test_b78_a_bit_that_flips_anywhere_is_no_shard(rng: random.Random, part: str) -> None:
    data = bytearray(OBJECTS["encoded"])
    header = 4096
    ranges = {
        "prefix": range(16),
        "header": range(16, header),
        "first section": range(header, header + 2048),
        "last section": range(len(data) * 2 // 3, len(data) * 5 // 6),
    }
    place = rng.choice(ranges[part])
    data[place] ^= 1 << rng.randrange(8)
    reader = Reader(bytes(data), shrinks=rng.random() < 0.5)
    with pytest.raises(ShardError):
        reader.run(ahead=rng.choice((1, 4)))


@pytest.mark.parametrize("kind", OBJECTS)
def test_another_codec_is_told_apart_from_another_chunk(kind: str) -> None:
    reader = Reader(OBJECTS[kind], shrinks=False, what=replace(EXPECTED, codec="int8"))
    with pytest.raises(OtherCodecError) as told:
        reader.run(ahead=4)
    assert told.value.codec == "raw"
    other = replace(EXPECTED, chunk=ChunkKey(b"d" * 32), codec="int8")
    reader = Reader(OBJECTS[kind], shrinks=False, what=other)
    with pytest.raises(IdentityError) as wrong:
        reader.run(ahead=4)
    assert not isinstance(wrong.value, OtherCodecError)


def test_no_memory_is_taken_for_what_is_not_the_shard() -> None:
    """A length that was read decides about nothing before it is known to fit the slot."""
    larger = replace(EXPECTED, geometry=shard_geometry([GEOMETRY.section_bytes[0] // 2] * 3))
    reader = Reader(OBJECTS["encoded"], shrinks=False, what=larger)
    with pytest.raises(IdentityError):
        reader.run(ahead=1)
    reader.incoming.end()
    assert reader.scratch.idle_bytes == 0


def test_scratch_memory_is_given_back_once() -> None:
    reader = Reader(OBJECTS["encoded"], shrinks=True)
    reader.run(ahead=2)
    assert reader.scratch.idle_bytes == 0
    reader.incoming.end()
    held = reader.scratch.idle_bytes
    assert held >= len(OBJECTS["encoded"])
    reader.incoming.end()
    assert reader.scratch.idle_bytes == held
