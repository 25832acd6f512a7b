"""How objects are cut into values: pure arithmetic, compared with plain slices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.constants import MIB
from kvtier.errors import ConnectorDataError
from kvtier_connectors.redis.objects import (
    HEADER_BYTES,
    OBJECT_BYTES_MAX,
    PART_BYTES,
    Header,
    decode_header,
    encode_header,
    key_of,
    object_name,
    part_names,
    part_ranges,
)


@given(
    nbytes=st.integers(1, 300),
    part_bytes=st.integers(1, 100),
    offset=st.integers(0, 350),
    count=st.integers(0, 350),
)
def test_ranges_of_parts_make_up_the_slice(
    nbytes: int, part_bytes: int, offset: int, count: int
) -> None:
    data = bytes(n % 251 for n in range(nbytes))
    header = Header(nbytes, part_bytes, bytes(16))
    parts = [data[start : start + part_bytes] for start in range(0, nbytes, part_bytes)]
    assert len(parts) == header.parts
    buffer = bytearray()
    for part in part_ranges(header, offset, count):
        assert part.target == len(buffer)
        assert part.is_whole == (part.stop - part.start == len(parts[part.number]))
        buffer += parts[part.number][part.start : part.stop]
    assert buffer == data[offset : offset + count]


def test_a_part_with_what_redis_puts_around_it_fits_into_whole_pages_below_1_mib() -> None:
    """One byte more than 1 MiB takes 1.25 MiB of a server's memory (jemalloc's size classes)."""
    string_head_bytes, line_end_bytes = 9 + 1, 2
    assert PART_BYTES + string_head_bytes + line_end_bytes <= MIB
    assert PART_BYTES % 4096 == 0, "parts are read to whole pages"


@given(st.binary(max_size=50), st.binary(max_size=8))
def test_names_lead_back_to_their_keys(key: bytes, text: bytes) -> None:
    prefix = text.replace(b"{", b"").replace(b"}", b"")
    name = object_name(prefix, key)
    assert key_of(prefix, name) == key
    assert name.count(b"{") == 1
    assert name.find(b"}") > name.find(b"{") + 1, "a cluster hashes only what is there"
    header = Header(3 * PART_BYTES, PART_BYTES, b"g" * 16)
    parts = part_names(name, header)
    assert len(set(parts)) == 3
    assert all(key_of(prefix, part) is None for part in parts)


@given(st.binary(max_size=20))
def test_what_is_not_ours_has_no_key(name: bytes) -> None:
    key = key_of(b"p:", name)
    assert key is None or object_name(b"p:", key) == name.lower()


def test_headers_come_back() -> None:
    header = Header(12345, PART_BYTES, bytes(range(16)))
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decode_header(data + b"more") == header


@pytest.mark.parametrize(
    "data",
    [
        b"",
        encode_header(Header(1, 0, b""))[:-1],
        b"x" * HEADER_BYTES,
        encode_header(Header(OBJECT_BYTES_MAX + 1, PART_BYTES, b"")),
        encode_header(Header(1 << 30, 0, b"")),
        encode_header(Header(1 << 30, 1, b"")),
    ],
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(ConnectorDataError):
        decode_header(data)
