"""The cache server's wire: frames to bytes and back. Pure: no I/O, no clock, no threads.

A frame is a fixed prefix, a small msgpack header and, for some kinds, a raw payload behind it::

    offset  size  field
         0     4  magic "KVTW"
         4     1  version that brought this kind; 0: the handshake's, which every version reads
         5     1  kind
         6     2  reserved, 0
         8     4  header bytes     H, at most WIRE_HEADER_BYTES_MAX    little-endian
        12     8  payload bytes    P, at most WIRE_PAYLOAD_BYTES_MAX   little-endian
        20     H  header: a msgpack array of the message's fields, in their order
      20+H     P  payload

A client sends ``Hello`` and gets ``Welcome`` or ``Refused``. Then it asks as much as it likes
without waiting; each answer names the request that it answers, in any order. Everything that
arrives is checked against limits before anything is allocated for it, and nothing is executed.

Version 2 is spoken on Unix sockets where both sides share memory: a ``Lease`` is answered by where
the object lies in a file that the client maps, and holds it there until its ``Release``; ``Take``
stores what the client has put into a file that it shares with the server. Files are handed over
by ``Map``, as the descriptor that comes with the answer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter, call
from typing import Any, ClassVar, Final, cast

import msgpack  # type: ignore[import-untyped]

from kvtier.constants import (
    WIRE_HEADER_BYTES_MAX,
    WIRE_KEY_BYTES_MAX,
    WIRE_KEYS_MAX,
    WIRE_PAYLOAD_BYTES_MAX,
    WIRE_TEXT_BYTES_MAX,
    WIRE_TOKEN_BYTES_MAX,
)
from kvtier.wire_fields import (
    Check,
    WireError,
    binary,
    boolean,
    integer,
    row,
    shown,
    text,
)

WIRE_MAGIC: Final = b"KVTW"
#: The greatest version, and the greatest without shared memory.
WIRE_VERSION: Final = 2
WIRE_VERSION_SOCKET: Final = 1
PREFIX: Final = struct.Struct("<4sBBHIQ")
PREFIX_BYTES: Final = PREFIX.size
# Looked up once: each takes as long as what it does.
_pack_prefix: Final = PREFIX.pack
_pack: Final = msgpack.Packer().pack
_unpack: Final = msgpack.unpackb
_UINT32_MAX: Final = 2**32 - 1
_BINARY_BYTES_MAX: Final = max(WIRE_TOKEN_BYTES_MAX, WIRE_KEY_BYTES_MAX)


class Kind(IntEnum):
    """What a frame says. Numbers are for ever."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    CONTAINS = 4
    FOUND = 5
    READ = 6
    DATA = 7
    WRITE = 8
    DELETE = 9
    DONE = 10
    MAP = 11
    MAPPED = 12
    LEASE = 13
    LEASED = 14
    RELEASE = 15
    TAKE = 16


_HANDSHAKE: Final = frozenset({Kind.HELLO, Kind.WELCOME, Kind.REFUSED})
_SHARED: Final = frozenset(
    {Kind.MAP, Kind.MAPPED, Kind.LEASE, Kind.LEASED, Kind.RELEASE, Kind.TAKE}
)
#: What may come from a server, and from a client.
FROM_SERVER: Final = frozenset(
    {Kind.WELCOME, Kind.REFUSED, Kind.FOUND, Kind.DATA, Kind.DONE, Kind.MAPPED, Kind.LEASED}
)
FROM_CLIENT: Final = frozenset(Kind) - FROM_SERVER
WITH_PAYLOAD: Final = frozenset({Kind.DATA, Kind.WRITE})
_WITH_ROW: Final = frozenset({Kind.CONTAINS, Kind.FOUND, Kind.DELETE, Kind.RELEASE})


_VERSIONS: Final = {
    kind: 0 if kind in _HANDSHAKE else WIRE_VERSION if kind in _SHARED else WIRE_VERSION_SOCKET
    for kind in Kind
}


def version_of(kind: Kind) -> int:
    """Return the version that brought a kind, which stands in its frames; 0: the handshake's."""
    return _VERSIONS[kind]


class Status(IntEnum):
    """One key's outcome. Numbers are for ever."""

    OK = 0
    ABSENT = 1
    REFUSED = 2
    UNAVAILABLE = 3
    LATE = 4
    CORRUPT = 5


# Nobody changes a message. They are not frozen, because that takes four times as long to make.


@dataclass(slots=True)
class Hello:
    """A client's first frame: the versions that it speaks, and its token, empty for none."""

    kind: ClassVar = Kind.HELLO
    version_min: int
    version_max: int
    token: bytes

    def __repr__(self) -> str:
        return f"Hello({self.version_min}, {self.version_max}, token hidden)"


@dataclass(slots=True)
class Welcome:
    """The server's answer: the version to speak from now on."""

    kind: ClassVar = Kind.WELCOME
    version: int


@dataclass(slots=True)
class Refused:
    """Why the server ends the connection; its last frame. ``status`` says how it counts."""

    kind: ClassVar = Kind.REFUSED
    status: Status
    text: str


@dataclass(slots=True)
class Contains:
    """Which of these keys have an object?"""

    kind: ClassVar = Kind.CONTAINS
    request: int
    keys: tuple[bytes, ...]


@dataclass(slots=True)
class Found:
    """The answer to ``Contains``, one for each key in its order."""

    kind: ClassVar = Kind.FOUND
    request: int
    found: tuple[bool, ...]


@dataclass(slots=True)
class Read:
    """Give me bytes ``offset .. offset + nbytes`` of an object."""

    kind: ClassVar = Kind.READ
    request: int
    key: bytes
    offset: int
    nbytes: int


@dataclass(slots=True)
class Data:
    """The answer to ``Read``. Its payload is what there is of the range; none unless ``OK``."""

    kind: ClassVar = Kind.DATA
    request: int
    status: Status
    text: str


@dataclass(slots=True)
class Write:
    """Keep the payload as the whole object of this key, in place of what is there."""

    kind: ClassVar = Kind.WRITE
    request: int
    key: bytes


@dataclass(slots=True)
class Delete:
    """Forget the objects of these keys."""

    kind: ClassVar = Kind.DELETE
    request: int
    keys: tuple[bytes, ...]


@dataclass(slots=True)
class Done:
    """The answer to ``Write`` and ``Delete``."""

    kind: ClassVar = Kind.DONE
    request: int
    status: Status
    text: str


class Area(IntEnum):
    """Which file a client asks for. Numbers are for ever."""

    OBJECTS = 0
    STAGING = 1


@dataclass(slots=True)
class Map:
    """Hand me a file: that of my objects, to read; or a new one of my own, to write."""

    kind: ClassVar = Kind.MAP
    request: int
    area: Area


@dataclass(slots=True)
class Mapped:
    """The answer to ``Map``. If ``OK``, the file's descriptor comes with the frame's first byte.

    ``region`` names the file, ``nbytes`` is its length. A staging area ends with the connection.
    """

    kind: ClassVar = Kind.MAPPED
    request: int
    status: Status
    text: str
    region: int
    nbytes: int


@dataclass(slots=True)
class Lease:
    """Hold the object of this key where it is, for me to read there; until its ``Release``."""

    kind: ClassVar = Kind.LEASE
    request: int
    key: bytes


@dataclass(slots=True)
class Leased:
    """The answer to ``Lease``: where the object lies; it stays so while the connection does."""

    kind: ClassVar = Kind.LEASED
    request: int
    status: Status
    text: str
    region: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Release:
    """End leases, by the numbers of their requests. There is no answer."""

    kind: ClassVar = Kind.RELEASE
    requests: tuple[int, ...]


@dataclass(slots=True)
class Take:
    """Keep a part of my staging area as the whole object of this key: as ``Write``."""

    kind: ClassVar = Kind.TAKE
    request: int
    key: bytes
    region: int
    offset: int
    nbytes: int


Request = Contains | Read | Write | Delete | Map | Lease | Take
Answer = Found | Data | Done | Mapped | Leased
Message = Hello | Welcome | Refused | Request | Answer | Release


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Return prefix and header; the payload is sent behind them.

    The caller keeps to the limits; one that is passed is an ``AssertionError``.
    """
    kind = message.kind
    header: bytes = _pack(_VALUES[kind](message))
    assert len(header) <= WIRE_HEADER_BYTES_MAX, "a header that nobody takes"
    assert payload_bytes <= WIRE_PAYLOAD_BYTES_MAX, "a payload that nobody takes"
    assert not payload_bytes or kind in WITH_PAYLOAD, "a payload where none belongs"
    prefix = _pack_prefix(WIRE_MAGIC, _VERSIONS[kind], kind, 0, len(header), payload_bytes)
    return prefix + header


def decode(kind: Kind, header: bytes | memoryview) -> Message:
    """Return the message of a header. Raises ``WireError``."""
    message, checks = _FIELDS[kind]
    try:
        values = _unpack(
            header,
            max_str_len=WIRE_TEXT_BYTES_MAX,
            max_bin_len=_BINARY_BYTES_MAX,
            # A list is made as long as it says before it is filled, and lists may hold lists.
            max_array_len=WIRE_KEYS_MAX if kind in _WITH_ROW else len(checks),
            max_map_len=0,
            max_ext_len=0,
        )
    # What its reader raises for bytes that are no msgpack; a text that is no UTF-8 included.
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"a {kind.name} header that is no msgpack: {error}") from error
    if not isinstance(values, list) or len(values) != len(checks):
        raise WireError(f"a {kind.name} header that is no list of {len(checks)}")
    return message(*map(call, checks, values))


def _status(value: Any) -> Status:
    if type(value) is not int or value not in _STATUSES:
        raise WireError(f"a status is {shown(value)}")
    return _STATUSES[value]


def _area(value: Any) -> Area:
    if type(value) is not int or not 0 <= value <= max(Area):
        raise WireError(f"an area is {shown(value)}")
    return Area(value)


def _values_of(message: type[Message]) -> Callable[[Message], Any]:
    """Return what reads the fields of a kind of message, in their order."""
    first, *more = (each.name for each in fields(message))
    if more:
        return attrgetter(first, *more)
    return lambda one: (getattr(one, first),)


#: An enumeration's own lookup takes as long as the rest of a small header.
_STATUSES: Final = {int(status): status for status in Status}
_REQUEST: Final = integer(0, _UINT32_MAX)
_KEY: Final = binary(1, WIRE_KEY_BYTES_MAX)
_VERSION: Final = integer(0, 255)
_REGION: Final = integer(0, 2**63 - 1)
_OFFSET: Final = integer(0, 2**63)
_BYTES: Final = integer(0, WIRE_PAYLOAD_BYTES_MAX)
_FIELDS: Final[dict[Kind, tuple[Callable[..., Message], tuple[Check, ...]]]] = {
    Kind.HELLO: (Hello, (_VERSION, _VERSION, binary(0, WIRE_TOKEN_BYTES_MAX))),
    Kind.WELCOME: (Welcome, (_VERSION,)),
    Kind.REFUSED: (Refused, (_status, text)),
    Kind.CONTAINS: (Contains, (_REQUEST, row(_KEY))),
    Kind.FOUND: (Found, (_REQUEST, row(boolean))),
    Kind.READ: (Read, (_REQUEST, _KEY, _OFFSET, _BYTES)),
    Kind.DATA: (Data, (_REQUEST, _status, text)),
    Kind.WRITE: (Write, (_REQUEST, _KEY)),
    Kind.DELETE: (Delete, (_REQUEST, row(_KEY))),
    Kind.DONE: (Done, (_REQUEST, _status, text)),
    Kind.MAP: (Map, (_REQUEST, _area)),
    Kind.MAPPED: (Mapped, (_REQUEST, _status, text, _REGION, _OFFSET)),
    Kind.LEASE: (Lease, (_REQUEST, _KEY)),
    Kind.LEASED: (Leased, (_REQUEST, _status, text, _REGION, _OFFSET, _BYTES)),
    Kind.RELEASE: (Release, (row(_REQUEST),)),
    Kind.TAKE: (Take, (_REQUEST, _KEY, _REGION, _OFFSET, _BYTES)),
}
#: What ``encode`` packs. ``dataclasses.astuple`` copies every value, and takes far longer.
_VALUES: Final = {
    kind: _values_of(cast(type[Message], message)) for kind, (message, _) in _FIELDS.items()
}
