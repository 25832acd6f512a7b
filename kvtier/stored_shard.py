"""How a byte codec keeps a shard below DRAM: format version 2, a shard of version 1 in fewer bytes.

::

    header     n * 4096 bytes, framed as version 1's; its body is a msgpack map:
                 byte_codec         name of what encoded the sections
                 stored_bytes       length of the whole, a multiple of 4096
                 section_bytes      encoded size of each section
                 section_checksums  xxh3-128 of each encoded section
                 shard              the body of the shard's own header, as version 1 has it
    section 0  at the header's end, encoded by itself
    section 1  right behind it ...
               zeros up to stored_bytes

An encoded section is verified before it is decoded, and what comes of it against the shard's own
checksum: what is decoded is the sealed shard again, every byte of it. Sizes are rounded up to a
64th of the shard, so that an index sees few different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack  # type: ignore[import-untyped]

from kvtier.constants import (
    ALIGN_BYTES,
    CODEC_NAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    SECTIONS_MAX,
    SHARD_FORMAT_VERSION,
    STORED_FORMAT_VERSION,
)
from kvtier.errors import ChecksumError, CodecError, FormatError
from kvtier.interfaces import ByteCodec
from kvtier.shard_format import (
    CHECKSUM_BYTES,
    FRAME_BYTES,
    ShardHeader,
    checksum,
    frame,
    frame_version,
    header_length,
    parse_header,
    shard_geometry,
    unframe,
    verify_section,
)
from kvtier.types import DTYPE_BYTES

#: Sizes are whole numbers of these parts of a shard; more than so many of them are not worth it.
STEPS: Final = 64
STEPS_WORTH_MAX: Final = 60

_FIELDS: Final = ("byte_codec", "stored_bytes", "section_bytes", "section_checksums", "shard")
# On top of the shard's own header: names and numbers, then a size and a checksum per section.
_FIXED_BYTES: Final = 2048 + 512
_SECTION_BYTES: Final = 32 + 32
#: What no codec's own header exceeds: an encoded section is at most so much larger.
_OVERHEAD_BYTES_MAX: Final = 4096


class Encoding(NamedTuple):
    """What a byte codec made of a shard's sections. ``end``: where the last one ends."""

    byte_codec: str
    section_bytes: tuple[int, ...]
    section_checksums: tuple[bytes, ...]
    end: int


@dataclass(frozen=True, slots=True)
class StoredHeader:
    """A validated header of version 2. ``page`` is the shard's own header, as it was sealed."""

    header: ShardHeader
    page: bytes
    encoding: Encoding
    header_bytes: int
    stored_bytes: int

    def span(self, section: int) -> slice:
        """Where an encoded section lies."""
        start = self.header_bytes + sum(self.encoding.section_bytes[:section])
        return slice(start, start + self.encoding.section_bytes[section])


def stored_header_bytes(sections: int) -> int:
    """Return the length of the header of a shard with so many sections."""
    return _align(_FIXED_BYTES + sections * _SECTION_BYTES)


def stored_bytes_max(header: ShardHeader, codec: ByteCodec) -> int:
    """Return how much room ``encode_sections`` needs for a shard."""
    encoded = sum(codec.encoded_bytes_max(nbytes) for nbytes in header.section_bytes)
    return _align(stored_header_bytes(len(header.section_bytes)) + encoded)


def stored_sizes(shards: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return the lengths that a chunk's shards get; None: all are kept as they are.

    ``shards`` has each one's sealed bytes and where its encoding ends. All are rounded up to the
    same share, one that is not smaller then is kept as it is; a 16th of the chunk is saved, or
    nothing.
    """
    shares = [-(-end * STEPS // whole) for whole, end in shards]
    worth = max((share for share in shares if share <= STEPS_WORTH_MAX), default=0)
    sizes = [
        min(whole, _align(-(-whole * worth // STEPS))) if share <= worth else whole
        for share, (whole, _) in zip(shares, shards, strict=True)
    ]
    total = sum(whole for whole, _ in shards)
    return sizes if sum(sizes) * STEPS <= total * STEPS_WORTH_MAX else None


def encode_sections(
    shard: memoryview, header: ShardHeader, codec: ByteCodec, into: memoryview
) -> Encoding:
    """Encode a sealed shard's sections into ``into``, behind where the header comes.

    ``into`` is the caller's, ``stored_bytes_max`` long or more. Blocks, the GIL released for most
    of it. ``write_header`` makes it whole.
    """
    values = _value_bytes(header)
    position = stored_header_bytes(len(header.section_bytes))
    sizes: list[int] = []
    checksums: list[bytes] = []
    for start, nbytes in zip(header.section_offsets, header.section_bytes, strict=True):
        room = into[position : position + codec.encoded_bytes_max(nbytes)]
        size = codec.encode(shard[start : start + nbytes], values, room)
        sizes.append(size)
        checksums.append(checksum(room[:size]))
        position += size
    return Encoding(codec.name, tuple(sizes), tuple(checksums), position)


def write_header(
    shard: memoryview, encoding: Encoding, into: memoryview, stored_bytes: int
) -> memoryview:
    """Write the header and the zeros at the end; return the stored shard, part of ``into``.

    ``shard`` is the sealed one that was encoded.
    """
    sealed = shard[: header_length(shard)]
    _, body = unframe(sealed, SHARD_FORMAT_VERSION)
    page = _page(encoding, stored_bytes, body)
    into[: len(page)] = page
    into[encoding.end : stored_bytes] = bytes(stored_bytes - encoding.end)
    return into[:stored_bytes]


def encode_shard(
    shard: memoryview, header: ShardHeader, codec: ByteCodec, into: memoryview
) -> memoryview | None:
    """Return a sealed shard as it is stored, part of ``into``; None: it is stored as it is.

    As ``encode_sections``, for a medium that takes shard by shard.
    """
    encoding = encode_sections(shard, header, codec, into)
    sizes = stored_sizes([(len(shard), encoding.end)])
    return None if sizes is None else write_header(shard, encoding, into, sizes[0])


def first_bytes(data: memoryview) -> tuple[int, bool]:
    """Return the header's length and whether the shard is encoded; needs the first 16 bytes.

    Raises ``FormatError`` for what begins like neither.
    """
    encoded = frame_version(data) == STORED_FORMAT_VERSION
    return header_length(data, STORED_FORMAT_VERSION if encoded else None), encoded


def parse_stored(data: memoryview) -> StoredHeader:
    """Read and validate the header of an encoded shard; ``data`` begins with it and may go on.

    As ``parse_header``: nothing of a size that was read is allocated, and nothing but
    ``FormatError`` is raised.
    """
    page, body = unframe(data, STORED_FORMAT_VERSION)
    wire = _unpack(body)
    sealed = _sealed_page(len(wire["section_bytes"]), wire["shard"])
    header = parse_header(memoryview(sealed))
    encoding = _encoding(wire, header)
    stored_bytes = wire["stored_bytes"]
    whole = shard_geometry(header.section_bytes).shard_bytes
    if type(stored_bytes) is not int or not encoding.end <= stored_bytes <= whole:
        raise FormatError(f"header: stored_bytes is {stored_bytes!r}")
    if stored_bytes % ALIGN_BYTES or _page(encoding, stored_bytes, wire["shard"]) != page:
        raise FormatError("header: not the canonical form")
    return StoredHeader(header, sealed, encoding, len(page), stored_bytes)


def verify_stored(data: memoryview, stored: StoredHeader, section: int) -> memoryview:
    """Return an encoded section of ``data`` once it is verified, else raise ``ChecksumError``."""
    encoded = data[stored.span(section)]
    if checksum(encoded) != stored.encoding.section_checksums[section]:
        raise ChecksumError(f"encoded section {section} differs from its checksum")
    return encoded


def decode_section(
    data: memoryview, stored: StoredHeader, section: int, codec: ByteCodec, shard: memoryview
) -> None:
    """Verify a section of ``data``, decode it to where it lies in ``shard``, verify that.

    ``shard`` is the caller's slot, as long as the sealed shard. Blocks, the GIL released for most
    of it. Raises ``ShardError``; what lies there is then undefined.
    """
    encoded = verify_stored(data, stored, section)
    header = stored.header
    start = header.section_offsets[section]
    end = start + header.section_bytes[section]
    try:
        codec.decode(encoded, shard[start:end])
    except CodecError as error:
        raise ChecksumError(f"encoded section {section} cannot be decoded: {error}") from error
    verify_section(shard, header, section)
    shard[end : _align(end)] = bytes(_align(end) - end)


def _value_bytes(header: ShardHeader) -> int:
    """How wide the floats of a section are; what a codec has packed is bytes of any meaning."""
    nbytes = DTYPE_BYTES[header.layout.dtype] if header.codec == "raw" else 1
    return nbytes if nbytes in {2, 4} else 1


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _page(encoding: Encoding, stored_bytes: int, body: bytes) -> bytes:
    wire = {
        "byte_codec": encoding.byte_codec,
        "stored_bytes": stored_bytes,
        "section_bytes": encoding.section_bytes,
        "section_checksums": encoding.section_checksums,
        "shard": body,
    }
    length = stored_header_bytes(len(encoding.section_bytes))
    return frame(STORED_FORMAT_VERSION, length, msgpack.packb(wire))


def _unpack(body: bytes) -> dict[str, Any]:
    """Return the fields of a body, their structure checked, their values not yet."""
    try:
        wire = msgpack.unpackb(
            body,
            strict_map_key=True,
            max_str_len=CODEC_NAME_BYTES_MAX,
            max_bin_len=HEADER_BYTES_MAX,
            max_array_len=SECTIONS_MAX,
            max_map_len=len(_FIELDS),
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError(f"header: not the msgpack of a header: {error}") from error
    if not isinstance(wire, dict) or tuple(wire) != _FIELDS:
        raise FormatError("header: not the fields of an encoded shard")
    sizes, checksums = wire["section_bytes"], wire["section_checksums"]
    if not isinstance(sizes, list) or not isinstance(checksums, list) or not sizes:
        raise FormatError("header: section_bytes and section_checksums are not lists")
    if not isinstance(wire["shard"], bytes) or not isinstance(wire["byte_codec"], str):
        raise FormatError("header: byte_codec is no text, or shard no bytes")
    return wire


def _sealed_page(sections: int, body: bytes) -> bytes:
    """The shard's own header, whose length follows from the number of sections alone."""
    header_bytes = shard_geometry([1] * sections).header_bytes
    if len(body) > header_bytes - FRAME_BYTES:
        raise FormatError(f"header: a body of {len(body)} bytes in it")
    return frame(SHARD_FORMAT_VERSION, header_bytes, body)


def _encoding(wire: dict[str, Any], header: ShardHeader) -> Encoding:
    sizes, checksums = tuple(wire["section_bytes"]), tuple(wire["section_checksums"])
    if not len(sizes) == len(checksums) == len(header.section_bytes):
        raise FormatError("header: sections, sizes and checksums differ in number")
    for nbytes, digest, decoded in zip(sizes, checksums, header.section_bytes, strict=True):
        if type(nbytes) is not int or not 0 < nbytes <= decoded + _OVERHEAD_BYTES_MAX:
            raise FormatError(f"header: a section of {nbytes!r} encoded bytes")
        if not isinstance(digest, bytes) or len(digest) != CHECKSUM_BYTES:
            raise FormatError(f"header: a section's checksum is not {CHECKSUM_BYTES} bytes")
    end = stored_header_bytes(len(sizes)) + sum(sizes)
    return Encoding(wire["byte_codec"], sizes, checksums, end)
