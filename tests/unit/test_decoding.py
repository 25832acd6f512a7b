"""Encoded shards on their way into memory: the right one, section by section, or nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import ChecksumError, FormatError, IdentityError, RegistryError
from kvtier.shard_format import shard_geometry
from kvtier.stored_shard import parse_stored
from kvtier.tiers.arrival import Expected
from kvtier.tiers.decoding import ByteCodecs, DecodedArrival
from kvtier.types import ChunkKey, ShardId
from tests.lib.toy_shard import EXPECTED, GEOMETRY, shard_and_stored


class Renamed(ZstdCodec):
    """A codec of a later version."""

    @property
    def name(self) -> str:
        return "zstd-of-tomorrow"


def expected(data: bytearray) -> Expected:
    return replace(EXPECTED, stored_bytes=len(data))


def arrival(data: bytearray, what: Expected) -> tuple[DecodedArrival, bytearray]:
    slot = bytearray(b"\xee") * GEOMETRY.shard_bytes
    return DecodedArrival(memoryview(data), memoryview(slot), what, ByteCodecs()), slot


def test_sections_are_decoded_as_they_come() -> None:
    shard, data = shard_and_stored(ZstdCodec())
    coming, slot = arrival(data, expected(data))
    ends = [parse_stored(memoryview(data)).span(section).stop for section in range(3)]
    assert expected(data).encoded
    assert coming.take(4096) == 0
    assert coming.take(ends[0] - 1) == 0
    assert coming.take(ends[0]) == 1
    assert slot[: GEOMETRY.section_offsets[1]] == shard[: GEOMETRY.section_offsets[1]]
    assert slot[GEOMETRY.section_offsets[1] :] == b"\xee" * (2 * GEOMETRY.section_bytes[0])
    assert coming.take(len(data)) == 3
    assert slot == shard


@pytest.mark.parametrize(
    "other",
    [
        {"chunk": ChunkKey(b"d" * 32)},
        {"shard": ShardId(0, 0, 1)},
        {"namespace": b"m" * 32},
        {"codec": "int8"},
        {"geometry": shard_geometry([4096] * 3)},
    ],
)
def test_a_sound_shard_of_another_place_is_refused(other: dict[str, object]) -> None:
    _, data = shard_and_stored(ZstdCodec())
    what = replace(expected(data), **other)  # type: ignore[arg-type]
    coming, slot = arrival(data, what)
    with pytest.raises(IdentityError):
        coming.take(len(data))
    assert not any(byte != 0xEE for byte in slot), "nothing was written"


def test_b66_another_length_than_was_written_is_refused() -> None:
    _, data = shard_and_stored(ZstdCodec())
    longer = data + bytes(4096)
    coming, _ = arrival(longer, expected(longer))
    with pytest.raises(FormatError, match="bytes, not"):
        coming.take(len(longer))


def test_b78_a_flipped_section_is_refused_and_those_before_are_not() -> None:
    _, data = shard_and_stored(ZstdCodec())
    found = parse_stored(memoryview(data))
    data[found.span(1).start] ^= 1
    coming, _ = arrival(data, expected(data))
    assert coming.take(found.span(0).stop) == 1
    with pytest.raises(ChecksumError):
        coming.take(len(data))


def test_a_byte_codec_that_is_not_installed_is_told_by_name() -> None:
    _, data = shard_and_stored(Renamed())
    coming, _ = arrival(data, expected(data))
    with pytest.raises(RegistryError, match="zstd-of-tomorrow"):
        coming.take(len(data))
