"""How an object lies in Redis. Pure.

::

    PREFIX{HEXKEY}                  header + data      an object of at most 64 KiB
    PREFIX{HEXKEY}                  header             a larger one, whose parts are
    PREFIX{HEXKEY}:GENERATION:N     1020 KiB of data   part N; the last one may be shorter

    header   magic "KVTR" · version 1 · 3 zero bytes · part_bytes u32, 0 for no parts ·
             nbytes u64 · generation 16 bytes                                     (big-endian, 36)

Redis has no transaction over several large values, so parts are named by a generation, drawn anew
for each write, and the header that names it is written last: whoever has read a header finds the
parts that belong to it, or misses. The braces make a cluster keep all of it on one node.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvtier.constants import KIB, MIB
from kvtier.errors import ConnectorDataError

#: With what Redis puts around it just below 1 MiB: its allocator would make 1.25 MiB of more. A
#: part of twice the size leaves the processor's caches before a server has stored it.
PART_BYTES: Final = MIB - 4 * KIB
#: Nobody writes smaller ones; a header that promises them would take all memory for their names.
PART_BYTES_MIN: Final = 512 * KIB
INLINE_BYTES_MAX: Final = 64 * KIB
OBJECT_BYTES_MAX: Final = 1 << 40
GENERATION_BYTES: Final = 16

_HEADER: Final = struct.Struct(">4sB3xIQ16s")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"KVTR"
_VERSION: Final = 1
# Stands for the empty key: a cluster looks between the braces only where there is something.
_NO_KEY: Final = b"-"


class Header(NamedTuple):
    """Size of the object and of its parts; ``part_bytes == 0`` means that the data follows."""

    nbytes: int
    part_bytes: int
    generation: bytes

    @property
    def parts(self) -> int:
        """How many values hold the data beside the header."""
        return -(-self.nbytes // self.part_bytes) if self.part_bytes else 0


class PartRange(NamedTuple):
    """Bytes ``start .. stop`` of part ``number``, and where they belong in the reader's buffer."""

    number: int
    start: int
    stop: int
    target: int
    is_whole: bool


def encode_header(header: Header) -> bytes:
    """Return the 36 bytes that name a generation."""
    return _HEADER.pack(_MAGIC, _VERSION, header.part_bytes, header.nbytes, header.generation)


def decode_header(data: bytes) -> Header:
    """Return what the first bytes of a value say.

    Raises ``ConnectorDataError`` for what ``encode_header`` did not make.
    """
    if len(data) < HEADER_BYTES:
        raise ConnectorDataError(f"a value of {len(data)} bytes where a header belongs")
    magic, version, part_bytes, nbytes, generation = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ConnectorDataError("a value that KVTier did not write, or another version of it")
    if nbytes > (OBJECT_BYTES_MAX if part_bytes else INLINE_BYTES_MAX):
        raise ConnectorDataError(f"a header that promises {nbytes} bytes")
    if 0 < part_bytes < PART_BYTES_MIN:
        raise ConnectorDataError(f"a header that promises parts of {part_bytes} bytes")
    return Header(nbytes, part_bytes, generation)


def object_name(prefix: bytes, key: bytes) -> bytes:
    """Return the name under which the header lies."""
    return b"%b{%b}" % (prefix, key.hex().encode() or _NO_KEY)


def key_of(prefix: bytes, name: bytes) -> bytes | None:
    """Return the key whose header has that name; None for a part or anything else."""
    if not (name.startswith(prefix + b"{") and name.endswith(b"}")):
        return None
    text = name[len(prefix) + 1 : -1]
    try:
        return b"" if text == _NO_KEY else bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return None


def part_name(name: bytes, generation: bytes, index: int) -> bytes:
    """Return the name of one part."""
    return b"%b:%b:%d" % (name, generation.hex().encode(), index)


def part_names(name: bytes, header: Header) -> list[bytes]:
    """Return the names of all parts that a header speaks of."""
    stem = part_name(name, header.generation, 0)[:-1]
    return [b"%b%d" % (stem, index) for index in range(header.parts)]


def part_ranges(header: Header, offset: int, nbytes: int) -> Iterator[PartRange]:
    """Cut bytes ``offset .. offset + nbytes``, as far as the object reaches, into its parts."""
    end = min(offset + nbytes, header.nbytes)
    position = offset
    while position < end:
        number, start = divmod(position, header.part_bytes)
        size = min(header.part_bytes, header.nbytes - number * header.part_bytes)
        stop = min(size, start + end - position)
        yield PartRange(number, start, stop, position - offset, stop - start == size)
        position += stop - start
