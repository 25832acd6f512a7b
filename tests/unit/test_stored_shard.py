"""Encoded shards: what is decoded is the sealed shard again, and nothing else is ever taken."""

from __future__ import annotations

import random
from dataclasses import replace

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codecs.zstd import ZstdCodec
from kvtier.constants import CODEC_NAME_BYTES_MAX, SECTIONS_MAX, STORED_FORMAT_VERSION
from kvtier.errors import ChecksumError, FormatError, ShardError
from kvtier.interfaces import ByteCodec
from kvtier.shard_format import (
    ShardDescription,
    ShardHeader,
    checksum,
    frame,
    parse_header,
    seal,
    shard_geometry,
    unframe,
)
from kvtier.stored_shard import (
    STEPS,
    decode_section,
    encode_shard,
    first_bytes,
    parse_stored,
    stored_bytes_max,
    stored_header_bytes,
    stored_sizes,
    verify_stored,
)
from kvtier.types import ChunkKey, ShardId, ShardLayout

CODEC = ZstdCodec()
LAYOUT = ShardLayout(layers=6, kv_heads=2, k_dim=32, v_dim=32, dtype="bfloat16", tokens=64)


def described(layout: ShardLayout = LAYOUT, codec: str = "raw") -> ShardDescription:
    sizes = [
        layout.kv_heads * layout.tokens * (layout.k_dim + layout.v_dim) * 2 * len(layers)
        for layers in (layout.section_layer_range(s) for s in range(layout.sections))
    ]
    return ShardDescription(
        chunk=ChunkKey(b"c" * 32),
        shard=ShardId(0, 1, 2),
        parent=ChunkKey(b"p" * 32),
        position=7,
        namespace=b"n" * 32,
        codec=codec,
        codec_params={},
        layout=layout,
        token_count=layout.tokens,
        has_sinks=False,
        section_bytes=tuple(sizes),
    )


def sealed(description: ShardDescription, seed: int = 1) -> tuple[bytearray, ShardHeader]:
    """A shard of normally distributed values."""
    geometry = shard_geometry(description.section_bytes)
    slot = bytearray(b"\xee") * geometry.shard_bytes
    draws = np.random.default_rng(seed)
    for start, nbytes in zip(geometry.section_offsets, geometry.section_bytes, strict=True):
        bits = draws.standard_normal(-(-nbytes // 2)).astype("<f4").view("<u4")
        slot[start : start + nbytes] = (bits >> 16).astype("<u2").tobytes()[:nbytes]
    return slot, seal(memoryview(slot), description)


def stored(description: ShardDescription) -> tuple[bytearray, bytearray]:
    """A sealed shard, and the same as it is stored."""
    shard, header = sealed(description)
    into = memoryview(bytearray(b"\xdd") * stored_bytes_max(header, CODEC))
    encoded = encode_shard(memoryview(shard), header, CODEC, into)
    assert encoded is not None
    return shard, bytearray(encoded)


def decoded(data: bytearray, codec: ByteCodec = CODEC) -> bytearray:
    found = parse_stored(memoryview(data))
    shard = bytearray(b"\xcc") * shard_geometry(found.header.section_bytes).shard_bytes
    shard[: len(found.page)] = found.page
    for section in range(len(found.encoding.section_bytes)):
        decode_section(memoryview(data), found, section, codec, memoryview(shard))
    return shard


@pytest.mark.parametrize("section_layers", [1, 4, 6])
def test_what_is_decoded_is_the_sealed_shard(section_layers: int) -> None:
    shard, data = stored(described(replace(LAYOUT, section_layers=section_layers)))
    assert decoded(data) == shard
    assert len(shard) / len(data) > 1.3


def test_a_header_of_either_version_says_which_it_is() -> None:
    shard, data = stored(described())
    assert first_bytes(memoryview(shard)[:16]) == (4096, False)
    assert first_bytes(memoryview(data)[:16]) == (4096, True)
    assert parse_stored(memoryview(data)).header == parse_header(memoryview(shard))
    assert parse_stored(memoryview(data)).stored_bytes == len(data)
    with pytest.raises(FormatError, match="version is 2"):
        parse_header(memoryview(data))
    with pytest.raises(FormatError, match="version is 1"):
        parse_stored(memoryview(shard))


def test_what_a_codec_has_packed_is_bytes_of_any_meaning() -> None:
    """The codec's own header says how wide its values are."""
    for codec, width in (("raw", 2), ("int8", 1)):
        _, data = stored(described(codec=codec))
        assert data[4096:4102] == b"KVZB\x01" + bytes([width])


def test_noise_is_stored_as_it_is(rng: random.Random) -> None:
    description = described()
    shard, _ = sealed(description)
    shard[4096:] = rng.randbytes(len(shard) - 4096)
    header = seal(memoryview(shard), description)
    into = memoryview(bytearray(stored_bytes_max(header, CODEC)))
    assert encode_shard(memoryview(shard), header, CODEC, into) is None


SHARDS = st.tuples(st.integers(2, 500), st.floats(0.01, 1.2))


@given(
    shards=st.lists(st.tuples(st.integers(2, 500), st.floats(0.01, 1.2)), min_size=1, max_size=9)
)
def test_sizes_are_few_whole_pages_and_worth_it(shards: list[tuple[int, float]]) -> None:
    asked = [(4096 * pages, max(1, int(4096 * pages * share))) for pages, share in shards]
    sizes = stored_sizes(asked)
    whole = sum(nbytes for nbytes, _ in asked)
    if sizes is None:
        return
    pairs = list(zip(sizes, asked, strict=True))
    assert all(end <= size <= total or size == total for size, (total, end) in pairs)
    assert all(size % 4096 == 0 for size in sizes)
    assert sum(sizes) <= whole * 60 // STEPS
    kinds = {tuple(stored_sizes([(each, end) for each, _ in asked]) or ()) for end in (1, 50, 99)}
    assert len(kinds) <= STEPS


def test_the_longest_header_fits() -> None:
    layout = replace(LAYOUT, layers=SECTIONS_MAX, section_layers=1, tokens=8, k_dim=256, v_dim=256)
    description = replace(
        described(layout),
        codec_params={f"p{i:02}" + "x" * 40: "y" * 40 for i in range(11)},
    )
    shard, data = stored(description)
    assert len(parse_stored(memoryview(data)).page) < stored_header_bytes(SECTIONS_MAX) <= 65536
    assert decoded(data) == shard


def test_b78_a_flipped_bit_is_never_data(rng: random.Random) -> None:
    shard, data = stored(described())
    end = parse_stored(memoryview(data)).encoding.end
    bits = [*range(0, 8 * 4096, 97), *rng.sample(range(8 * 4096, 8 * end), 300)]
    for bit in bits:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ShardError):
            decoded(flipped)
    padding = bytearray(data)
    padding[-1] ^= 1
    assert decoded(padding) == shard, "of zeros at the end nothing is used"


def test_b66_what_is_cut_short_is_never_data() -> None:
    _, data = stored(described())
    end = parse_stored(memoryview(data)).encoding.end
    for length in (0, 15, 4095, 4096, 5000, end - 1):
        with pytest.raises(ShardError):
            decoded(data[:length])


def forged(data: bytearray, **changes: object) -> bytearray:
    """The same shard with other fields in a sound frame."""
    page, body = unframe(memoryview(data), STORED_FORMAT_VERSION)
    other = msgpack.packb(msgpack.unpackb(body) | changes)
    length = len(page) if len(other) < 4000 else 2 * len(page)
    return bytearray(frame(STORED_FORMAT_VERSION, length, other)) + data[len(page) :]


@pytest.mark.parametrize(
    "changes",
    [
        {"byte_codec": 3},
        {"byte_codec": "z" * (CODEC_NAME_BYTES_MAX + 1)},
        {"stored_bytes": 2**60},
        {"stored_bytes": 4096},
        {"stored_bytes": -4096},
        {"stored_bytes": 5000},
        {"stored_bytes": True},
        {"section_bytes": []},
        {"section_bytes": [1]},
        {"section_bytes": [2**40, 1]},
        {"section_bytes": [0, 1]},
        {"section_bytes": [1.0, 2.0]},
        {"section_bytes": 5},
        {"section_checksums": [b"x" * 16]},
        {"section_checksums": [b"x", b"y"]},
        {"section_checksums": ["x" * 16, "y" * 16]},
        {"shard": b""},
        {"shard": b"x" * 4000},
        {"shard": b"x" * 4090},
        {"shard": "text"},
        {"more": 1},
    ],
)
def test_b108_a_header_that_others_wrote_is_refused(changes: dict[str, object]) -> None:
    _, data = stored(described())
    with pytest.raises(FormatError):
        parse_stored(memoryview(forged(data, **changes)))


def test_b78_a_section_is_exactly_as_long_as_was_sealed() -> None:
    """Sums that fit do not help what decodes to another length."""
    _, data = stored(described())
    found = parse_stored(memoryview(data))
    into = memoryview(bytearray(4096))
    small = CODEC.encode(memoryview(bytes(64)), 2, into)
    sizes = (small, *found.encoding.section_bytes[1:])
    sums = (checksum(into[:small]), *found.encoding.section_checksums[1:])
    other = forged(data, section_bytes=sizes, section_checksums=sums)
    other[4096 : 4096 + small] = into[:small]
    with pytest.raises(ChecksumError, match="cannot be decoded"):
        decoded(other)


class Liar(ZstdCodec):
    """Decodes to something else."""

    def decode(self, source: memoryview, into: memoryview) -> None:
        super().decode(source, into)
        into[0] ^= 1


def test_what_is_decoded_is_verified_too() -> None:
    _, data = stored(described())
    verify_stored(memoryview(data), parse_stored(memoryview(data)), 0)
    with pytest.raises(ChecksumError, match=r"^section 0 differs"):
        decoded(data, Liar())


def test_what_is_stored_is_verified_without_decoding() -> None:
    _, data = stored(described())
    found = parse_stored(memoryview(data))
    data[found.span(1).start] ^= 1
    verify_stored(memoryview(data), found, 0)
    with pytest.raises(ChecksumError, match="encoded section 1 differs"):
        verify_stored(memoryview(data), found, 1)
