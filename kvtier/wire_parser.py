"""Bytes of the cache server's wire to frames, as they come. Pure: no I/O, no clock, no threads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, NamedTuple

from kvtier.constants import WIRE_HEADER_BYTES_MAX, WIRE_PAYLOAD_BYTES_MAX
from kvtier.wire import (
    PREFIX,
    PREFIX_BYTES,
    WIRE_MAGIC,
    WIRE_VERSION,
    WITH_PAYLOAD,
    Kind,
    Message,
    decode,
    version_of,
)
from kvtier.wire_fields import WireError, WireVersionError

_BUFFER_BYTES: Final = 4096
#: Where the bytes go that nobody wants; nobody reads them.
_NOWHERE: Final = memoryview(bytearray(WIRE_HEADER_BYTES_MAX))
#: What the prefix of each kind says: the kind itself, its version, the most bytes of payload.
_KINDS: Final = {
    int(kind): (kind, version_of(kind), WIRE_PAYLOAD_BYTES_MAX if kind in WITH_PAYLOAD else 0)
    for kind in Kind
}
#: No prefix is right for it, whatever it says.
_NO_KIND: Final = (Kind.HELLO, -1, 0)
_unpack_prefix: Final = PREFIX.unpack_from
#: How others begin: a server of HTTP, and an alert and a hello of TLS.
_KNOWN: Final = {
    b"HTTP": ", as HTTP does: perhaps this is the address of --http",
    b"\x15\x03": ", as TLS does: connect to kvtiers://",
    b"\x16\x03": ", as TLS does: connect to kvtier://",
}


class Frame(NamedTuple):
    """A message that has arrived, and how many bytes of payload follow it."""

    message: Message
    payload_bytes: int


class Parser:
    """Turns one side's bytes into frames, within a buffer of bounded size.

    Most headers are short and most connections idle, so it is small but while a long one comes.
    The owner fills what ``buffer`` gives and says so with ``received``, then takes frames with
    ``next`` until there is none. Behind a frame with a payload it says with ``place`` where that
    belongs, before it goes on; most of it is then received there without a copy.
    """

    def __init__(self, accepts: Collection[Kind]) -> None:
        """Take frames of these kinds, until told otherwise; any other is an error."""
        self._accepts = accepts
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._left = 0
        self._placed = True

    def accept(self, kinds: Collection[Kind]) -> None:
        """Take frames of these kinds from the next one on."""
        self._accepts = kinds

    @property
    def busy(self) -> bool:
        """True in the middle of a frame or its payload."""
        return self._left > 0 or self._end > self._start

    def buffer(self) -> memoryview:
        """Return where the next bytes are to be received: at least one of them."""
        if self._left and self._placed:
            if self._target is not None:
                return self._target[self._filled :]
            return _NOWHERE[: self._left]
        if not self._end:
            return self._buffer
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
            if have:
                self._check_beginning(have)
            return None
        prefix = _unpack_prefix(self._buffer, self._start)
        magic, version, number, reserved, header_bytes, payload_bytes = prefix
        kind, version_right, payload_bytes_max = _KINDS.get(number, _NO_KIND)
        if (
            magic != WIRE_MAGIC
            or number not in self._accepts
            or version != version_right
            or reserved
            or header_bytes > WIRE_HEADER_BYTES_MAX
            or payload_bytes > payload_bytes_max
        ):
            raise _fault(prefix, self._accepts)
        if have < PREFIX_BYTES + header_bytes:
            self._make_room(PREFIX_BYTES + header_bytes)
            return None
        start = self._start + PREFIX_BYTES
        message = decode(kind, self._buffer[start : start + header_bytes])
        self._start = start + header_bytes
        self._left = payload_bytes
        self._placed = not payload_bytes
        if self._start == self._end:
            self._reuse()
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
            self._reuse()

    def discard(self) -> None:
        """Write no more to the target: the rest of the payload goes nowhere."""
        self._target = None

    def _reuse(self) -> None:
        """Begin at the start again, as everything was taken, and need no more than usual."""
        self._start = self._end = 0
        if len(self._buffer) > _BUFFER_BYTES:
            self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def _make_room(self, nbytes: int) -> None:
        """Have room for a frame of so many bytes, of which some are there."""
        if nbytes > len(self._buffer):
            held = self._end - self._start
            buffer = memoryview(bytearray(nbytes))
            buffer[:held] = self._buffer[self._start : self._end]
            self._buffer, self._start, self._end = buffer, 0, held

    def _move_down(self) -> None:
        held = self._end - self._start
        self._buffer[:held] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, held

    def _check_beginning(self, have: int) -> None:
        """Tell what is no frame by its first bytes, so that nobody waits for more of it."""
        beginning = bytes(self._buffer[self._start : self._start + min(have, len(WIRE_MAGIC))])
        if not WIRE_MAGIC.startswith(beginning):
            raise WireError(_foreign(beginning))


def _foreign(beginning: bytes) -> str:
    """Return what is said of bytes that are none of this wire's, with what they likely are."""
    likely = next((what for known, what in _KNOWN.items() if beginning.startswith(known)), "")
    return f"not KVTier's wire: it begins with {beginning!r}{likely}"


def _fault(prefix: tuple[Any, ...], accepts: Collection[Kind]) -> WireError:
    """Return what is wrong with a prefix in which something is."""
    magic, version, number, reserved, header_bytes, payload_bytes = prefix
    if magic != WIRE_MAGIC:
        return WireError(_foreign(magic))
    if version > WIRE_VERSION:
        return WireVersionError(f"version {version} of the wire; spoken here is {WIRE_VERSION}")
    if number not in accepts:
        return WireError(f"a frame of kind {number}, which may not come from this side")
    kind, version_right, payload_bytes_max = _KINDS[number]
    if version != version_right or reserved:
        return WireError(f"a {kind.name} frame of version {version} with {reserved} reserved")
    if header_bytes > WIRE_HEADER_BYTES_MAX:
        return WireError(f"a header of {header_bytes} bytes; allowed are {WIRE_HEADER_BYTES_MAX}")
    return WireError(
        f"a {kind.name} payload of {payload_bytes} bytes; allowed are {payload_bytes_max}"
    )
