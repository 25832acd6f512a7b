"""The wire under any bytes: frames, a need for more, or a ``WireError``; memory stays bounded."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from kvtier.constants import (
    WIRE_HEADER_BYTES_MAX,
    WIRE_KEY_BYTES_MAX,
    WIRE_KEYS_MAX,
    WIRE_PAYLOAD_BYTES_MAX,
    WIRE_TEXT_BYTES_MAX,
    WIRE_TOKEN_BYTES_MAX,
)
from kvtier.wire import (
    FROM_CLIENT,
    FROM_SERVER,
    PREFIX_BYTES,
    WIRE_MAGIC,
    Area,
    Contains,
    Data,
    Delete,
    Done,
    Found,
    Hello,
    Kind,
    Lease,
    Leased,
    Map,
    Mapped,
    Message,
    Read,
    Refused,
    Release,
    Status,
    Take,
    Welcome,
    Write,
    encode,
)
from kvtier.wire_fields import WireError
from kvtier.wire_parser import Frame, Parser

ALL_KINDS = FROM_CLIENT | FROM_SERVER
NUMBERS = st.integers(0, 2**32 - 1)
VERSIONS = st.integers(0, 255)
KEYS = st.binary(min_size=1, max_size=80)
KEY_ROWS = st.lists(KEYS, max_size=20).map(tuple)
TEXTS = st.text(max_size=100)
STATUSES = st.sampled_from(Status)
REGIONS = st.integers(0, 2**63 - 1)
PLACES = st.integers(0, 2**63)
SIZES = st.integers(0, WIRE_PAYLOAD_BYTES_MAX)
MESSAGES = st.one_of(
    st.builds(Hello, VERSIONS, VERSIONS, st.binary(max_size=100)),
    st.builds(Welcome, VERSIONS),
    st.builds(Refused, STATUSES, TEXTS),
    st.builds(Contains, NUMBERS, KEY_ROWS),
    st.builds(Found, NUMBERS, st.lists(st.booleans(), max_size=20).map(tuple)),
    st.builds(Read, NUMBERS, KEYS, PLACES, SIZES),
    st.builds(Data, NUMBERS, STATUSES, TEXTS),
    st.builds(Write, NUMBERS, KEYS),
    st.builds(Delete, NUMBERS, KEY_ROWS),
    st.builds(Done, NUMBERS, STATUSES, TEXTS),
    st.builds(Map, NUMBERS, st.sampled_from(Area)),
    st.builds(Mapped, NUMBERS, STATUSES, TEXTS, REGIONS, PLACES),
    st.builds(Lease, NUMBERS, KEYS),
    st.builds(Leased, NUMBERS, STATUSES, TEXTS, REGIONS, PLACES, SIZES),
    st.builds(Release, st.lists(NUMBERS, max_size=20).map(tuple)),
    st.builds(Take, NUMBERS, KEYS, REGIONS, PLACES, SIZES),
)


@st.composite
def frames(draw: st.DrawFn) -> tuple[Message, bytes]:
    """A message and its payload, if its kind has one."""
    message = draw(MESSAGES)
    has_payload = message.kind in {Kind.DATA, Kind.WRITE}
    return message, draw(st.binary(max_size=300)) if has_payload else b""


def feed(parser: Parser, data: bytes, pieces: Iterator[int]) -> list[tuple[Message, bytes]]:
    """Give a parser bytes in pieces; return what came, each payload with its frame."""
    found: list[tuple[Message, bytes]] = []
    target = bytearray()
    frame: Frame | None = None
    while True:
        while True:
            if frame is not None and not parser.payload_left:
                found.append((frame.message, bytes(target)))
                frame = None
            came = parser.next() if frame is None else None
            if came is None:
                break
            frame, target = came, bytearray(came.payload_bytes)
            if came.payload_bytes:
                parser.place(memoryview(target))
        if not data:
            return found
        space = parser.buffer()
        count = min(len(space), len(data), next(pieces))
        space[:count] = data[:count]
        parser.received(count)
        data = data[count:]


@given(st.lists(frames(), max_size=8), st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_what_is_encoded_comes_out_again_however_it_is_cut(
    sent: list[tuple[Message, bytes]], cuts: list[int]
) -> None:
    data = b"".join(encode(message, len(payload)) + payload for message, payload in sent)
    assert feed(Parser(ALL_KINDS), data, itertools.cycle(cuts)) == sent


def bounded_feed(data: bytes) -> None:
    """Feed bytes; whatever they are, only ``WireError`` may come of them."""
    parser = Parser(ALL_KINDS)
    try:
        drain(parser, data)
    except WireError:
        return


def drain(parser: Parser, data: bytes) -> None:
    """As ``feed``, with payloads that go nowhere, as a server without room has them."""
    while data:
        space = parser.buffer()
        assert 0 < len(space) <= PREFIX_BYTES + WIRE_HEADER_BYTES_MAX
        count = min(len(space), len(data))
        space[:count] = data[:count]
        parser.received(count)
        data = data[count:]
        while (frame := parser.next()) is not None:
            if frame.payload_bytes:
                parser.place(None)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_typed_error_or_need_more(data: bytes) -> None:
    bounded_feed(data)


@given(
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=200),
)
def test_any_prefix_behind_the_magic_is_a_typed_error_or_need_more(
    version: int, kind: int, reserved: int, header: int, payload: int, rest: bytes
) -> None:
    prefix = struct.pack("<4sBBHIQ", WIRE_MAGIC, version, kind, reserved, header, payload)
    bounded_feed(prefix + rest)


@given(st.sampled_from(sorted(ALL_KINDS)), st.binary(max_size=200))
def test_any_header_of_a_sound_prefix_is_a_typed_error_or_a_frame(kind: int, data: bytes) -> None:
    version = 0 if kind <= Kind.REFUSED else 1 if kind <= Kind.DONE else 2
    bounded_feed(struct.pack("<4sBBHIQ", WIRE_MAGIC, version, kind, 0, len(data), 0) + data)


@given(frames(), st.data())
def test_a_frame_with_a_spoiled_byte_is_a_typed_error_or_another_frame(
    sent: tuple[Message, bytes], data: st.DataObject
) -> None:
    message, payload = sent
    whole = bytearray(encode(message, len(payload)) + payload)
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    bounded_feed(bytes(whole))


def test_b108_a_length_is_refused_before_anything_is_allocated() -> None:
    """Lengths of gigabytes cost nothing; every limit of the wire has its place here."""
    lengths = [
        (Kind.WRITE, 1, WIRE_HEADER_BYTES_MAX + 1, 0),
        (Kind.WRITE, 1, 0xFFFFFFFF, 0),
        (Kind.WRITE, 1, 10, WIRE_PAYLOAD_BYTES_MAX + 1),
        (Kind.WRITE, 1, 10, 2**64 - 1),
        (Kind.HELLO, 0, 10, 1),
        (Kind.CONTAINS, 1, 10, 1),
    ]
    tracemalloc.start()
    for kind, version, header, payload in lengths:
        parser = Parser(ALL_KINDS)
        prefix = struct.pack("<4sBBHIQ", WIRE_MAGIC, version, kind, 0, header, payload)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            drain(parser, prefix)
        except WireError:
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < WIRE_HEADER_BYTES_MAX
        else:
            raise AssertionError(f"taken: {kind.name} {header} {payload}")
    tracemalloc.stop()


def test_fields_beyond_their_limits_are_refused() -> None:
    too_much: list[Message] = [
        Contains(1, (b"k",) * (WIRE_KEYS_MAX + 1)),
        Contains(1, (b"k" * (WIRE_KEY_BYTES_MAX + 1),)),
        Contains(1, (b"",)),
        Write(1, b"k" * (WIRE_KEY_BYTES_MAX + 1)),
        Read(1, b"k", 0, WIRE_PAYLOAD_BYTES_MAX + 1),
        Hello(1, 1, b"t" * (WIRE_TOKEN_BYTES_MAX + 1)),
        Done(1, Status.OK, "x" * (WIRE_TEXT_BYTES_MAX + 1)),
        Done(2**32, Status.OK, ""),
        Lease(1, b"k" * (WIRE_KEY_BYTES_MAX + 1)),
        Leased(1, Status.OK, "", 2**63, 0, 0),
        Leased(1, Status.OK, "", 0, 0, WIRE_PAYLOAD_BYTES_MAX + 1),
        Release((1,) * (WIRE_KEYS_MAX + 1)),
        Take(1, b"", 0, 0, 0),
        Take(1, b"k", 0, 0, WIRE_PAYLOAD_BYTES_MAX + 1),
    ]
    for message in too_much:
        try:
            drain(Parser(ALL_KINDS), encode(message))
        except WireError:
            continue
        raise AssertionError(f"taken: {type(message).__name__}")


@given(st.sampled_from(sorted(ALL_KINDS)), st.integers(0, 255))
def test_a_kind_comes_under_the_version_that_brought_it_and_no_other(
    kind: int, version: int
) -> None:
    brought = 0 if kind <= Kind.REFUSED else 1 if kind <= Kind.DONE else 2
    parser = Parser(ALL_KINDS)
    data = struct.pack("<4sBBHIQ", WIRE_MAGIC, version, kind, 0, 0, 0)
    try:
        drain(parser, data)
    except WireError as error:
        taken = "no msgpack" in str(error)  # Its header, which is empty, was looked at.
    assert taken == (version == brought)
