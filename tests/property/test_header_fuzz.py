"""Bytes of others: whatever it is given, ``parse_header`` finds a valid header or ``FormatError``.

A checksum keeps accidents from the decoder, so most cases here carry a right one. What is accepted
must be exactly what a header with these values looks like, written out by hand in ``page_of``.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.constants import MIB
from kvtier.errors import FormatError
from kvtier.shard_format import ShardHeader, header_length, parse_header
from tests.golden.make_golden import sealed, shards

CASES_PER_SCALE = 20_000


def framed(body: bytes, header_bytes: int = 4096) -> bytes:
    """A header around any body, with the right prefix, padding and checksum."""
    prefix = struct.pack("<4sIII", b"KVTS", 1, header_bytes, len(body))
    summed = (prefix + body).ljust(header_bytes - 8, b"\0")
    return summed + struct.pack("<Q", xxhash.xxh3_64_intdigest(summed))


def page_of(header: ShardHeader) -> bytes:
    fields = {f.name: getattr(header, f.name) for f in dataclasses.fields(header)}
    fields["layout"] = dataclasses.asdict(header.layout)
    if not header.layout.sink_tokens:
        del fields["layout"]["sink_tokens"]
    fields["codec_params"] = dict(sorted(header.codec_params.items()))
    return framed(msgpack.packb(fields))


def body_of(page: bytes) -> bytes:
    (nbytes,) = struct.unpack_from("<I", page, 12)
    return page[16 : 16 + nbytes]


PAGES = [bytes(sealed(name)[:4096]) for name in sorted(shards())]
BODIES = [body_of(page) for page in PAGES]


def check(page: bytes) -> bool:
    """Parse, and return whether the page was accepted; fail for any other end than the two."""
    try:
        header = parse_header(memoryview(page))
    except FormatError:
        return False
    assert page_of(header) == page[:4096]
    for name in ("chunk", "namespace"):
        assert type(getattr(header, name)) is bytes
        assert len(getattr(header, name)) == 32
    assert (header.parent is None) == (header.position == 0)
    integers = (
        header.position,
        header.token_count,
        *header.shard,
        *header.section_offsets,
        *header.section_bytes,
        *(v for k, v in dataclasses.asdict(header.layout).items() if k != "dtype"),
    )
    # Not floats or booleans, which may equal integers.
    assert {type(value) for value in integers} == {int}
    assert type(header.has_sinks) is bool
    assert {type(value) for value in header.codec_params.values()} <= {bool, int, float, str}
    assert {(type(each), len(each)) for each in header.section_checksums} == {(bytes, 16)}
    assert len(header.section_checksums) == len(header.section_bytes) == header.layout.sections
    end = 4096
    for start, nbytes in zip(header.section_offsets, header.section_bytes, strict=True):
        assert start == end
        assert nbytes > 0
        end = -(-(start + nbytes) // 4096) * 4096
    assert end <= 2**32
    return True


def test_the_untouched_headers_are_accepted() -> None:
    assert all(check(page) for page in PAGES)
    assert all(framed(body) == page for body, page in zip(BODIES, PAGES, strict=True))


@given(st.binary(max_size=5000))
def test_random_bytes_are_refused(data: bytes) -> None:
    for page in (data, b"KVTS" + data, framed(data[:4000])):
        assert not check(page)
        with pytest.raises(FormatError):
            parse_header(memoryview(page))


@given(st.binary(max_size=64))
def test_b108_a_random_prefix_gives_a_bounded_length(data: bytes) -> None:
    for prefix in (data, b"KVTS\1\0\0\0" + data):
        try:
            length = header_length(memoryview(prefix))
        except FormatError:
            continue
        assert length in range(4096, 65537, 4096)


def mutated(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        index = rng.randrange(len(data))
        match rng.randrange(6):
            case 0:
                data[index] ^= 1 << rng.randrange(8)
            case 1:
                data[index] = rng.choice((0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xC7, 0xD9, 0xDD, 0xFF))
            case 2:
                del data[index : index + rng.randint(1, 8)]
            case 3:
                data[index:index] = rng.randbytes(rng.randint(1, 8))
            case 4:
                data[index:index] = data[index : index + rng.randint(1, 40)]
            case _:
                other = rng.choice(BODIES)
                data[index:] = other[rng.randrange(len(other)) :]
        if not data:
            return b"\xc0"
    return bytes(data[:4000])


def test_mutated_headers_are_refused_or_canonical(rng: random.Random, scale: int) -> None:
    accepted = sum(
        check(framed(mutated(rng, rng.choice(BODIES)))) for _ in range(CASES_PER_SCALE * scale)
    )
    # A flipped bit within a digest is a sound header of another chunk; most cases are nonsense.
    assert 0 < accepted < CASES_PER_SCALE * scale / 2


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a decoded body with every key or index in it."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2**16,
    2**32,
    2**63,
    2**64 - 1,
    -(2**63),
    1.0,
    4096.0,
    float("nan"),
    float("inf"),
    "",
    "raw",
    "x" * 257,
    b"",
    b"x" * 31,
    b"x" * 33,
    [],
    [[]],
    [0] * 513,
    {},
    {"a": {}},
    msgpack.ExtType(5, b""),
    msgpack.Timestamp(1, 2),
)


@pytest.mark.parametrize("body", BODIES, ids=sorted(shards()))
def test_a_hostile_value_in_any_place_is_refused_or_canonical(body: bytes) -> None:
    count = len(list(places(msgpack.unpackb(body))))
    for place in range(count):
        for value in HOSTILE:
            decoded = msgpack.unpackb(body)
            container, key = list(places(decoded))[place]
            replaced = container[key]
            container[key] = value
            accepted = check(framed(msgpack.packb(decoded)[:4000]))
            # A parameter may be of any of four types; nothing else changes its type.
            if accepted and container is not decoded["codec_params"]:
                assert type(value) is type(replaced), (key, value)


@pytest.mark.parametrize("body", BODIES, ids=sorted(shards()))
def test_a_number_of_another_type_is_refused(body: bytes) -> None:
    for convert in (float, bool, str):
        for place, (_, _) in enumerate(list(places(msgpack.unpackb(body)))):
            decoded = msgpack.unpackb(body)
            container, key = list(places(decoded))[place]
            if type(container[key]) is int and container is not decoded["codec_params"]:
                container[key] = convert(container[key])
                assert not check(framed(msgpack.packb(decoded))), key


@pytest.mark.parametrize("body", BODIES, ids=sorted(shards()))
def test_missing_extra_and_reordered_fields_are_refused(body: bytes) -> None:
    decoded: dict[str, Any] = msgpack.unpackb(body)
    changes: list[Callable[[dict[Any, Any]], object]] = [
        lambda fields: fields.update(extra=1),
        lambda fields: fields.update({b"chunk": 1}),
        lambda fields: fields.update({"Chunk": 1}),
        lambda fields: fields.update({next(iter(fields)): fields.pop(next(iter(fields)))}),
    ]
    for change in changes:
        for part in (None, "layout"):
            fields = copy.deepcopy(decoded)
            change(fields if part is None else fields[part])
            assert not check(framed(msgpack.packb(fields)))
    for name in (*decoded, *decoded["layout"]):
        fields = copy.deepcopy(decoded)
        del (fields if name in fields else fields["layout"])[name]
        assert not check(framed(msgpack.packb(fields))), name


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("section_offsets", lambda offsets: [offsets[0] + 4096, *offsets[1:]], "do not follow"),
        ("section_offsets", lambda offsets: [0, *offsets[1:]], "do not follow"),
        ("section_offsets", lambda offsets: offsets[1:], "do not follow"),
        ("section_bytes", lambda sizes: [*sizes, 1], "number of sections"),
        ("section_bytes", lambda sizes: [2**32, *sizes[1:]], r"section_bytes\[0\] is 4294967296"),
        ("section_checksums", lambda sums: sums[1:], "differ in number"),
        ("section_checksums", lambda sums: [*sums, sums[0]], "differ in number"),
        ("section_checksums", lambda sums: [sums[0][1:], *sums[1:]], r"checksums\[0\] is not 16"),
        ("shard", lambda parts: parts[1:], "shard has 2 parts"),
        ("shard", lambda parts: [*parts, 0], "shard has 4 parts"),
    ],
)
@pytest.mark.parametrize("body", BODIES, ids=sorted(shards()))
def test_lists_that_do_not_fit_together_are_refused(
    body: bytes, name: str, change: Callable[[list[Any]], list[Any]], message: str
) -> None:
    fields = msgpack.unpackb(body)
    fields[name] = change(fields[name])
    with pytest.raises(FormatError, match=message):
        parse_header(memoryview(framed(msgpack.packb(fields))))


def test_a_field_that_comes_twice_is_refused() -> None:
    body = BODIES[0]
    assert body[0] == 0x80 | 13
    assert not check(framed(bytes([0x80 | 14]) + body[1:] + msgpack.packb("codec") + b"\xa3raw"))
    assert not check(framed(bytes([0x80 | 14]) + body[1:14] + b"\xc0" + body[1:]))


def test_a_number_spelt_longer_than_needed_is_refused() -> None:
    body = BODIES[0]
    spelt = msgpack.packb("token_count") + b"\x03"
    assert body.count(spelt) == 1
    assert not check(framed(body.replace(spelt, spelt[:-1] + b"\xcc\x03")))
    assert check(framed(body.replace(spelt, spelt[:-1] + b"\x04")))


def test_more_after_the_body_is_refused() -> None:
    assert not check(framed(BODIES[0] + b"\x00"))
    (nbytes,) = struct.unpack_from("<I", PAGES[0], 12)
    longer = bytearray(PAGES[0][:-8])
    struct.pack_into("<I", longer, 12, nbytes + 1)
    summed = bytes(longer)
    assert not check(summed + struct.pack("<Q", xxhash.xxh3_64_intdigest(summed)))
    longer[4000] = 1
    struct.pack_into("<I", longer, 12, nbytes)
    summed = bytes(longer)
    assert not check(summed + struct.pack("<Q", xxhash.xxh3_64_intdigest(summed)))


BOMBS: dict[str, bytes] = {
    "array of 4 Gi": b"\xdd\xff\xff\xff\xff",
    "map of 4 Gi": b"\xdf\xff\xff\xff\xff",
    "text of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x05",
    "timestamp of no bytes": b"\xc7\x00\xff",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "nested arrays": b"\x91" * 60_000,
    "nested maps": b"\x81\xa1a" * 20_000,
    "arrays of 60,000 within each other": b"\xdd\x00\x00\xea\x60" * 12_000,
    "maps of 60,000 within each other": b"\xdf\x00\x00\xea\x60\xa1a" * 9_000,
    "arrays of 512 within each other": b"\xdc\x02\x00" * 20_000,
    "maps of 1024 within each other": b"\xde\x04\x00\xa1a" * 12_000,
    "text that is no UTF-8": b"\x81\xa2\xff\xfe\x00",
    "map with a map for a key": b"\x81\x80\x00",
    "map with numbers for keys": b"\x82\x01\x02\x03\x04",
    "never used byte": b"\xc1",
    "nothing": b"",
}


@pytest.mark.parametrize("name", BOMBS)
def test_b108_no_number_in_a_header_makes_it_allocate(name: str) -> None:
    page = memoryview(framed(BOMBS[name], 65536))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            parse_header(page)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * MIB
