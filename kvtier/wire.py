"""The cache server's wire: frames to bytes and back. Pure: no I/O, no clock, no threads.

A frame is a fixed prefix, a small msgpack header and, for some kinds, a raw payload behind it::

    offset  size  field
         0     4  magic "KVTW"
         4     1  version; 0 in the frames of the handshake, which every version reads
         5     1  kind
         6     2  reserved, 0
         8     4  header bytes     H, at most WIRE_HEADER_BYTES_MAX    little-endian
        12     8  payload bytes    P, at most WIRE_PAYLOAD_BYTES_MAX   little-endian
        20     H  header: a msgpack array of the message's fields, in their order
      20+H     P  payload

A client sends ``Hello`` and gets ``Welcome`` or ``Refused``. Then it asks as much as it likes
without waiting; each answer names the request that it answers, in any order. Everything that
arrives is checked against limits before anything is allocated for it, and nothing is executed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any, ClassVar, Final

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
    WireVersionError,
    binary,
    boolean,
    integer,
    row,
    shown,
    text,
)

WIRE_MAGIC: Final = b"KVTW"
WIRE_VERSION: Final = 1
_HANDSHAKE_VERSION: Final = 0
_PREFIX: Final = struct.Struct("<4sBBHIQ")
PREFIX_BYTES: Final = _PREFIX.size
_UINT32_MAX: Final = 2**32 - 1


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


#: What may come from a client, and from a server.
FROM_CLIENT: Final = frozenset({Kind.HELLO, Kind.CONTAINS, Kind.READ, Kind.WRITE, Kind.DELETE})
FROM_SERVER: Final = frozenset({Kind.WELCOME, Kind.REFUSED, Kind.FOUND, Kind.DATA, Kind.DONE})
_HANDSHAKE: Final = frozenset({Kind.HELLO, Kind.WELCOME, Kind.REFUSED})
_WITH_PAYLOAD: Final = frozenset({Kind.DATA, Kind.WRITE})


class Status(IntEnum):
    """One key's outcome. Numbers are for ever."""

    OK = 0
    ABSENT = 1
    REFUSED = 2
    UNAVAILABLE = 3
    LATE = 4
    CORRUPT = 5


@dataclass(frozen=True, slots=True)
class Hello:
    """A client's first frame: the versions that it speaks, and its token, empty for none."""

    kind: ClassVar = Kind.HELLO
    version_min: int
    version_max: int
    token: bytes

    def __repr__(self) -> str:
        return f"Hello({self.version_min}, {self.version_max}, token hidden)"


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's answer: the version to speak from now on."""

    kind: ClassVar = Kind.WELCOME
    version: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the server ends the connection; its last frame. ``status`` says how it counts."""

    kind: ClassVar = Kind.REFUSED
    status: Status
    text: str


@dataclass(frozen=True, slots=True)
class Contains:
    """Which of these keys have an object?"""

    kind: ClassVar = Kind.CONTAINS
    request: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to ``Contains``, one for each key in its order."""

    kind: ClassVar = Kind.FOUND
    request: int
    found: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Give me bytes ``offset .. offset + nbytes`` of an object."""

    kind: ClassVar = Kind.READ
    request: int
    key: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Data:
    """The answer to ``Read``. Its payload is what there is of the range; none unless ``OK``."""

    kind: ClassVar = Kind.DATA
    request: int
    status: Status
    text: str


@dataclass(frozen=True, slots=True)
class Write:
    """Keep the payload as the whole object of this key, in place of what is there."""

    kind: ClassVar = Kind.WRITE
    request: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Forget the objects of these keys."""

    kind: ClassVar = Kind.DELETE
    request: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to ``Write`` and ``Delete``."""

    kind: ClassVar = Kind.DONE
    request: int
    status: Status
    text: str


Message = Hello | Welcome | Refused | Contains | Found | Read | Data | Write | Delete | Done


@dataclass(frozen=True, slots=True)
class Frame:
    """A message that has arrived, and how many bytes of payload follow it."""

    message: Message
    payload_bytes: int


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Return prefix and header; the payload is sent behind them.

    The caller keeps to the limits; one that is passed is an ``AssertionError``.
    """
    header: bytes = msgpack.packb(astuple(message))
    assert len(header) <= WIRE_HEADER_BYTES_MAX, "a header that nobody takes"
    assert payload_bytes <= WIRE_PAYLOAD_BYTES_MAX, "a payload that nobody takes"
    assert not payload_bytes or message.kind in _WITH_PAYLOAD, "a payload where none belongs"
    version = _HANDSHAKE_VERSION if message.kind in _HANDSHAKE else WIRE_VERSION
    prefix = _PREFIX.pack(WIRE_MAGIC, version, message.kind, 0, len(header), payload_bytes)
    return prefix + header


class Parser:
    """Turns one side's bytes into frames, within a buffer of fixed size.

    The owner fills what ``buffer`` gives and says so with ``received``, then takes frames with
    ``next`` until there is none. Behind a frame with a payload it says with ``place`` where that
    belongs, before it goes on; most of it is then received there without a copy.
    """

    def __init__(self, accepts: Collection[Kind]) -> None:
        """Take frames of these kinds; any other is an error."""
        self._accepts = accepts
        self._buffer = memoryview(bytearray(PREFIX_BYTES + WIRE_HEADER_BYTES_MAX))
        self._start = self._end = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._left = 0
        self._placed = True

    @property
    def busy(self) -> bool:
        """True in the middle of a frame or its payload."""
        return self._left > 0 or self._end > self._start

    def buffer(self) -> memoryview:
        """Return where the next bytes are to be received: at least one of them."""
        if self._left and self._placed:
            if self._target is not None:
                return self._target[self._filled :]
            return self._buffer[: self._left]  # Nobody wants them.
        if self._end == len(self._buffer):
            self._move_down()
        free = self._buffer[self._end :]
        assert len(free), "frames are not taken"
        return free

    def received(self, nbytes: int) -> None:
        """Take note that so many bytes lie in what ``buffer`` gave last."""
        if self._left and self._placed:
            self._filled += nbytes
            self._left -= nbytes
        else:
            self._end += nbytes

    def next(self) -> Frame | None:
        """Return the next frame; None: more bytes are needed. Raises ``WireError``, for good.

        None too while a payload has not arrived: see ``payload_left``.
        """
        if self._left:
            return None
        self._target = None
        have = self._end - self._start
        if have < PREFIX_BYTES:
            self._check_beginning(have)
            return None
        prefix = _PREFIX.unpack_from(self._buffer, self._start)
        kind, header_bytes, payload_bytes = _checked_prefix(prefix, self._accepts)
        if have < PREFIX_BYTES + header_bytes:
            return None
        start = self._start + PREFIX_BYTES
        message = decode(kind, self._buffer[start : start + header_bytes])
        self._start = start + header_bytes
        self._left = payload_bytes
        self._placed = not payload_bytes
        if self._start == self._end:
            self._start = self._end = 0
        return Frame(message, payload_bytes)

    @property
    def payload_left(self) -> int:
        """Bytes of the present frame's payload that have not arrived."""
        return self._left

    def place(self, target: memoryview | None) -> None:
        """Say where the payload of the frame belongs: ``target``, exactly as long; None: nowhere.

        ``target`` is written to until ``payload_left`` is 0 or ``discard`` is called.
        """
        assert not self._placed, "no payload to place"
        assert target is None or len(target) == self._left, "a target of another size"
        self._target = target
        self._placed = True
        here = min(self._end - self._start, self._left)
        if target is not None:
            target[:here] = self._buffer[self._start : self._start + here]
        self._start += here
        self._filled = here
        self._left -= here
        if self._start == self._end:
            self._start = self._end = 0

    def discard(self) -> None:
        """Write no more to the target: the rest of the payload goes nowhere."""
        self._target = None

    def _move_down(self) -> None:
        held = self._end - self._start
        self._buffer[:held] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, held

    def _check_beginning(self, have: int) -> None:
        """Tell what is no frame by its first bytes, so that nobody waits for more of it."""
        beginning = bytes(self._buffer[self._start : self._start + min(have, len(WIRE_MAGIC))])
        if not WIRE_MAGIC.startswith(beginning):
            raise WireError(f"not KVTier's wire: it begins with {beginning!r}")


def _checked_prefix(prefix: tuple[Any, ...], accepts: Collection[Kind]) -> tuple[Kind, int, int]:
    magic, version, number, reserved, header_bytes, payload_bytes = prefix
    if magic != WIRE_MAGIC:
        raise WireError(f"not KVTier's wire: it begins with {magic!r}")
    if version not in {_HANDSHAKE_VERSION, WIRE_VERSION}:
        raise WireVersionError(f"version {version} of the wire; spoken here is {WIRE_VERSION}")
    if number not in accepts:
        raise WireError(f"a frame of kind {number}, which may not come from this side")
    kind = Kind(number)
    if (kind in _HANDSHAKE) != (version == _HANDSHAKE_VERSION) or reserved:
        raise WireError(f"a {kind.name} frame of version {version} with {reserved} reserved")
    if header_bytes > WIRE_HEADER_BYTES_MAX:
        raise WireError(f"a header of {header_bytes} bytes; allowed are {WIRE_HEADER_BYTES_MAX}")
    most = WIRE_PAYLOAD_BYTES_MAX if kind in _WITH_PAYLOAD else 0
    if payload_bytes > most:
        raise WireError(f"a {kind.name} payload of {payload_bytes} bytes; allowed are {most}")
    return kind, header_bytes, payload_bytes


def decode(kind: Kind, header: bytes | memoryview) -> Message:
    """Return the message of a header. Raises ``WireError``."""
    message, checks = _FIELDS[kind]
    try:
        values = msgpack.unpackb(
            header,
            max_str_len=WIRE_TEXT_BYTES_MAX,
            max_bin_len=max(WIRE_TOKEN_BYTES_MAX, WIRE_KEY_BYTES_MAX),
            max_array_len=WIRE_KEYS_MAX,
            max_map_len=0,
            max_ext_len=0,
        )
    # What its reader raises for bytes that are no msgpack; a text that is no UTF-8 included.
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"a {kind.name} header that is no msgpack: {error}") from error
    if not isinstance(values, list) or len(values) != len(checks):
        raise WireError(f"a {kind.name} header that is no list of {len(checks)}")
    return message(*(check(value) for check, value in zip(checks, values, strict=True)))


def _status(value: Any) -> Status:
    if type(value) is not int or not 0 <= value <= max(Status):
        raise WireError(f"a status is {shown(value)}")
    return Status(value)


_REQUEST: Final = integer(0, _UINT32_MAX)
_KEY: Final = binary(1, WIRE_KEY_BYTES_MAX)
_VERSION: Final = integer(0, 255)
_FIELDS: Final[dict[Kind, tuple[Callable[..., Message], tuple[Check, ...]]]] = {
    Kind.HELLO: (Hello, (_VERSION, _VERSION, binary(0, WIRE_TOKEN_BYTES_MAX))),
    Kind.WELCOME: (Welcome, (_VERSION,)),
    Kind.REFUSED: (Refused, (_status, text)),
    Kind.CONTAINS: (Contains, (_REQUEST, row(_KEY))),
    Kind.FOUND: (Found, (_REQUEST, row(boolean))),
    Kind.READ: (Read, (_REQUEST, _KEY, integer(0, 2**63), integer(0, WIRE_PAYLOAD_BYTES_MAX))),
    Kind.DATA: (Data, (_REQUEST, _status, text)),
    Kind.WRITE: (Write, (_REQUEST, _KEY)),
    Kind.DELETE: (Delete, (_REQUEST, row(_KEY))),
    Kind.DONE: (Done, (_REQUEST, _status, text)),
}
