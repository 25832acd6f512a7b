"""Streams of the cache server's wire to begin a search with: right ones, wrong ones, found ones."""

from __future__ import annotations

import json
import random
import struct
from typing import Final

import msgpack  # type: ignore[import-untyped]

from kvtier.constants import (
    WIRE_HEADER_BYTES_MAX,
    WIRE_KEY_BYTES_MAX,
    WIRE_KEYS_MAX,
    WIRE_PAYLOAD_BYTES_MAX,
    WIRE_TOKEN_BYTES_MAX,
)
from kvtier.wire import (
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
    version_of,
)
from tests.tidy.sources import ROOT

#: Every message of both versions, byte for byte as it was when its version was made.
GOLDEN: Final[dict[str, str]] = json.loads((ROOT / "tests/golden/wire.json").read_text())
#: What searches have found: a stream for each way through the code that they know of.
FOUND_PATH: Final = ROOT / "tests/property/wire_found.json"
FOUND: Final[list[str]] = json.loads(FOUND_PATH.read_text())
KEY: Final = b"fuzzed key"
BODY: Final = bytes(range(256)) * 3


def frame(kind: int, header: object, payload: bytes = b"", announced: int | None = None) -> bytes:
    """A sound prefix before any header at all."""
    data = header if isinstance(header, bytes) else msgpack.packb(header)
    nbytes = len(payload) if announced is None else announced
    version = version_of(Kind(kind))
    return struct.pack("<4sBBHIQ", WIRE_MAGIC, version, kind, 0, len(data), nbytes) + data + payload


def _all(*messages: Message) -> bytes:
    return b"".join(map(encode, messages))


_WRITE = encode(Write(1, KEY), len(BODY)) + BODY
#: As a client goes about it, from its hello on.
CLIENT: Final[dict[str, bytes]] = {
    "version 1": _all(Hello(1, 1, b""), Contains(0, (KEY,)))
    + _WRITE
    + _all(Read(2, KEY, 0, len(BODY)), Read(3, KEY, 5, 2**20), Delete(4, (KEY, b"none"))),
    "version 2": _all(Hello(2, 2, b""), Map(0, Area.STAGING), Take(1, KEY, 1, 0, 100))
    + _WRITE
    + _all(Lease(2, KEY), Map(3, Area.OBJECTS), Release((2,)), Lease(4, b"none")),
    "either version": _all(Hello(1, 2, b""), Contains(0, tuple(bytes([n]) for n in range(200)))),
    "many at once": _all(Hello(1, 2, b""), *(Read(n, KEY, n, 2**20) for n in range(300))),
    "writers of one key": encode(Hello(1, 1, b"")) + _WRITE * 8,
    "nothing in it": _all(Hello(1, 1, b""), Write(1, KEY), Read(2, KEY, 0, 0), Delete(3, ())),
    "a lease twice": _all(Hello(2, 2, b"")) + _WRITE + _all(Lease(7, KEY), Lease(7, KEY)),
    "a release of nothing": _all(Hello(2, 2, b""), Release((9,)), Release(())),
    "many maps": _all(Hello(2, 2, b""), *(Map(n, Area.STAGING) for n in range(40))),
    "hello again": _all(Hello(1, 1, b""), Hello(1, 1, b"")),
    "no hello": _WRITE,
    "a token": _all(Hello(1, 2, b"t" * WIRE_TOKEN_BYTES_MAX)),
    "versions the wrong way round": _all(Hello(255, 0, b"")),
    "farther than anything": _all(
        Hello(1, 2, b""),
        Read(1, KEY, 2**63, WIRE_PAYLOAD_BYTES_MAX),
        Lease(1, b"k" * WIRE_KEY_BYTES_MAX),
        Take(2, KEY, 2**63 - 1, 2**63, WIRE_PAYLOAD_BYTES_MAX),
    ),
    "a payload that does not come": encode(Hello(1, 1, b""))
    + encode(Write(1, KEY), WIRE_PAYLOAD_BYTES_MAX)
    + BODY,
}
#: As a server answers.
SERVER: Final[dict[str, bytes]] = {
    "answers": _all(Welcome(2), Found(0, (True, False)), Done(1, Status.OK, ""))
    + encode(Data(2, Status.OK, ""), len(BODY))
    + BODY
    + _all(Data(3, Status.LATE, "späť"), Mapped(4, Status.OK, "", 2**63 - 1, 2**40))
    + _all(Leased(5, Status.OK, "", 0, 2**63, WIRE_PAYLOAD_BYTES_MAX))
    + _all(Refused(Status.UNAVAILABLE, "x" * 1024)),
}
#: What no honest peer sends.
WRONG: Final[dict[str, bytes]] = {
    "http": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c403") + bytes(64),
    "zeros": bytes(PREFIX_BYTES),
    "the magic alone": WIRE_MAGIC,
    "a map": frame(Kind.HELLO, {1: 2}),
    "an extension": frame(Kind.HELLO, msgpack.ExtType(5, b"x" * 50)),
    "a date": frame(Kind.HELLO, [msgpack.Timestamp(1), 1, b""]),
    "text that is none": frame(Kind.REFUSED, b"\x92\x02\xa4\xff\xfe\xfd\xfc"),
    "numbers of other kinds": frame(Kind.READ, [1.0, KEY, True, None]),
    "numbers beyond": frame(Kind.READ, [2**32, KEY, -1, 2**64 - 1]),
    "text where bytes belong": frame(Kind.WRITE, [1, "key"], b"x"),
    "too few": frame(Kind.READ, [1, KEY]),
    "too many": frame(Kind.READ, [1, KEY, 0, 1, 1]),
    "too many keys": frame(Kind.CONTAINS, [1, [b"k"] * (WIRE_KEYS_MAX + 1)]),
    "lists in lists": frame(Kind.CONTAINS, b"\x91" * WIRE_HEADER_BYTES_MAX),
    "lists that promise more": frame(Kind.CONTAINS, b"\xdc\x04\x00" * 21_845),
    "a hello of such lists": frame(Kind.HELLO, b"\xdc\x04\x00" * 21_845),
    "lists that promise too much": frame(Kind.CONTAINS, b"\xdd\xff\xff\xff\xff" * 100),
    "bytes that promise too much": frame(Kind.HELLO, b"\x93\x01\x01\xc6\xff\xff\xff\xff"),
    "something behind the header": frame(Kind.MAP, msgpack.packb([1, 0]) + b"\x01"),
    "an empty header": frame(Kind.HELLO, b""),
    "a header that is half there": frame(Kind.HELLO, b"\x93\x01"),
    "a payload where none belongs": frame(Kind.READ, [1, KEY, 0, 1], b"x"),
    "a status that there is not": frame(Kind.DONE, [1, 6, ""]),
    "an area that there is not": frame(Kind.MAP, [1, 2]),
    "a long header": struct.pack("<4sBBHIQ", WIRE_MAGIC, 1, Kind.WRITE, 0, 2**32 - 1, 0),
    "a long payload": struct.pack("<4sBBHIQ", WIRE_MAGIC, 1, Kind.WRITE, 0, 14, 2**64 - 1),
}
CORPUS: Final[list[bytes]] = [
    *map(bytes.fromhex, GOLDEN.values()),
    *CLIENT.values(),
    *SERVER.values(),
    *WRONG.values(),
    *map(bytes.fromhex, FOUND),
]

_NUMBERS: Final = (0, 1, 0x7F, 0x80, 0xFF, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_HEADER_AT: Final = 8
_PAYLOAD_AT: Final = 12


def mutated(draws: random.Random, data: bytes) -> bytes:
    """A stream with something of another one, something changed, doubled, lost or cut."""
    made = bytearray(data)
    for _ in range(draws.choice((1, 1, 2, 4, 8))):
        at = draws.randrange(len(made) + 1)
        kind = draws.randrange(7)
        if kind == 0:
            made[at : at + 1] = draws.randbytes(1)
        elif kind == 1:
            made[at : at + draws.randrange(20)] = b""
        elif kind == 2:
            made[at:at] = made[at : at + draws.randrange(1, 60)]
        elif kind == 3:
            width = draws.choice((1, 2, 4, 8))
            number = draws.choice(_NUMBERS) % 256**width
            ends = number.to_bytes(width, "little"), number.to_bytes(width, "big")
            made[at : at + width] = draws.choice(ends)
        elif kind == 4:
            other = draws.choice(CORPUS)
            made[at:] = other[draws.randrange(len(other) + 1) :]
        elif kind == 5:
            _set_length(draws, made)
        else:
            made[at:at] = draws.choice(CORPUS)[:4096]
    return bytes(made)


def _set_length(draws: random.Random, made: bytearray) -> None:
    """Have a prefix announce another length of header or payload."""
    start = made.find(WIRE_MAGIC, draws.randrange(len(made) + 1))
    if start < 0 or len(made) < start + PREFIX_BYTES:
        return
    form, at, limit = draws.choice(
        (("<I", _HEADER_AT, WIRE_HEADER_BYTES_MAX), ("<Q", _PAYLOAD_AT, WIRE_PAYLOAD_BYTES_MAX))
    )
    lengths = (0, 1, 100, limit, limit + 1, 256 ** struct.calcsize(form) - 1)
    struct.pack_into(form, made, start + at, draws.choice(lengths))
