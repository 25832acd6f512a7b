"""Any shard that can be described is sealed, read back, and verified; any damage is found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ChecksumError, FormatError
from kvtier.shard_format import (
    ShardDescription,
    header_length,
    parse_header,
    seal,
    shard_geometry,
    verify_section,
)
from kvtier.types import DTYPE_BYTES, ChunkKey, ShardId, ShardLayout

DIGESTS = st.binary(min_size=32, max_size=32)
NAMES = st.from_regex(r"[a-z0-9][a-z0-9._+-]{0,63}", fullmatch=True)
PARAMS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=60),
)


@st.composite
def descriptions(draw: st.DrawFn) -> ShardDescription:
    layers = draw(st.integers(1, 70))
    section_layers = draw(st.integers(1, 70))
    tokens = draw(st.integers(1, 65536))
    position = draw(st.one_of(st.just(0), st.integers(0, 2**32 - 1)))
    sections = -(-layers // section_layers)
    sizes = st.integers(1, 9000)
    return ShardDescription(
        chunk=ChunkKey(draw(DIGESTS)),
        shard=ShardId(*draw(st.tuples(*[st.integers(0, 65535)] * 3))),
        parent=ChunkKey(draw(DIGESTS)) if position else None,
        position=position,
        namespace=draw(DIGESTS),
        codec=draw(NAMES),
        codec_params=draw(st.dictionaries(NAMES, PARAMS, max_size=3)),
        layout=ShardLayout(
            layers=layers,
            kv_heads=draw(st.integers(1, 65535)),
            k_dim=draw(st.integers(1, 2**32 - 1)),
            v_dim=draw(st.integers(0, 2**32 - 1)),
            dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
            tokens=tokens,
            section_layers=section_layers,
            sink_tokens=draw(st.integers(0, min(tokens, 8))),
        ),
        token_count=draw(st.integers(1, tokens)),
        has_sinks=position == 0 and draw(st.booleans()),
        section_bytes=tuple(draw(st.lists(sizes, min_size=sections, max_size=sections))),
    )


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=512))
def test_sections_lie_in_order_aligned_and_apart(sizes: list[int]) -> None:
    geometry = shard_geometry(sizes)
    end = geometry.header_bytes
    for start, nbytes in zip(geometry.section_offsets, geometry.section_bytes, strict=True):
        assert start % 4096 == 0
        assert 0 <= start - end < 4096
        end = start + nbytes
    assert geometry.section_bytes == tuple(sizes)
    assert geometry.shard_bytes % 4096 == 0
    assert 0 <= geometry.shard_bytes - end < 4096


@given(descriptions(), st.integers(0, 2**32), st.booleans())
def test_what_is_sealed_is_read_back_and_verified(
    description: ShardDescription, seed: int, first_page_only: bool
) -> None:
    geometry = shard_geometry(description.section_bytes)
    slot = bytearray(random.Random(seed).randbytes(geometry.shard_bytes))
    packed = bytes(slot)
    header = seal(memoryview(slot), description)

    data = memoryview(bytes(slot))
    needed = header_length(data[:4096])
    assert needed == geometry.header_bytes
    found = parse_header(data[:needed] if first_page_only else data)
    assert found == header
    assert found.codec_params == description.codec_params
    covered = geometry.header_bytes
    for section, (start, nbytes) in enumerate(
        zip(found.section_offsets, found.section_bytes, strict=True)
    ):
        assert not any(slot[covered:start])
        assert slot[start : start + nbytes] == packed[start : start + nbytes]
        verify_section(data, found, section)
        covered = start + nbytes
    assert not any(slot[covered:])


@given(descriptions(), st.integers(0, 2**32))
def test_b78_one_flipped_bit_is_found_wherever_it_counts(
    description: ShardDescription, seed: int
) -> None:
    slot = bytearray(shard_geometry(description.section_bytes).shard_bytes)
    header = seal(memoryview(slot), description)
    rng = random.Random(seed)
    for section, (start, nbytes) in enumerate(
        zip(header.section_offsets, header.section_bytes, strict=True)
    ):
        index = start + rng.randrange(nbytes)
        slot[index] ^= 1 << rng.randrange(8)
        with pytest.raises(ChecksumError):
            verify_section(memoryview(slot), header, section)
    slot[rng.randrange(header_length(memoryview(slot)))] ^= 1 << rng.randrange(8)
    with pytest.raises(FormatError):
        parse_header(memoryview(slot))
