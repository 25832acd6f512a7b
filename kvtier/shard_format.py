"""The shard format, one for every medium: a self-describing header, then 4096-aligned sections.

::

    header     header_bytes = n * 4096
      0        magic "KVTS"
      4        format version         uint32, little-endian like the other three
      8        header_bytes           uint32
      12       body_bytes             uint32
      16       body                   msgpack map, see ``docs/reference/shard-format.md``
      ...      zero padding
      -8       xxh3-64 of everything before it, uint64
    section 0  at header_bytes, zero-padded to 4096
    section 1  ...

A header has exactly one byte form: what is read must equal what this module would have written.
xxh3 finds accidents, not forgers.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack  # type: ignore[import-untyped]
import xxhash

from kvtier.constants import (
    ALIGN_BYTES,
    DIGEST_BYTES,
    HEADER_BYTES_MAX,
    SECTIONS_MAX,
    SHARD_BYTES_MAX,
    SHARD_FORMAT_VERSION,
    SHARD_MAGIC,
)
from kvtier.errors import ChecksumError, FormatError, IdentityError, LayoutError
from kvtier.layout import INDEX_MAX, check_integer, validate_shard_layout
from kvtier.types import ChunkKey, ShardId, ShardLayout

CHECKSUM_BYTES = 16
#: Largest msgpack form of ``codec_params``, and longest text in it.
CODEC_PARAMS_BYTES_MAX = 1024
CODEC_PARAM_TEXT_BYTES_MAX = 256
POSITION_MAX = 2**32 - 1

_PREFIX = struct.Struct("<4sIII")
_HEADER_CHECKSUM = struct.Struct("<Q")
#: What a header has beside its body and zeros.
FRAME_BYTES = _PREFIX.size + _HEADER_CHECKSUM.size
# Room for everything but the sections, and for one section: offset, size and checksum in msgpack.
_HEADER_FIXED_BYTES = 2048
_HEADER_SECTION_BYTES = 32
# Of codecs and of their parameters.
_NAME = re.compile(r"[a-z0-9][a-z0-9._+-]{0,63}")


@dataclass(frozen=True, slots=True)
class ShardGeometry:
    """Where a shard's parts lie. ``section_bytes`` are unpadded; ``shard_bytes`` is the whole."""

    header_bytes: int
    section_offsets: tuple[int, ...]
    section_bytes: tuple[int, ...]
    shard_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDescription:
    """What is known of a shard before its bytes are summed.

    ``position`` is the chunk's index in its sequence and ``parent`` the key of the chunk before
    it, None exactly at position 0. ``namespace`` is the namespace digest, epoch included.
    ``token_count`` is ``layout.tokens``, or less for a tail. ``section_bytes`` are unpadded.
    """

    chunk: ChunkKey
    shard: ShardId
    parent: ChunkKey | None
    position: int
    namespace: bytes
    codec: str
    codec_params: dict[str, str | int | float | bool]
    layout: ShardLayout
    token_count: int
    has_sinks: bool
    section_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader(ShardDescription):
    """A validated header. Offsets count from the start of the shard."""

    section_offsets: tuple[int, ...]
    section_checksums: tuple[bytes, ...]


# The body is a map of exactly these fields, in this order; its layout likewise.
_HEADER_FIELDS = tuple(field.name for field in fields(ShardHeader))
_LAYOUT_FIELDS = tuple(field.name for field in fields(ShardLayout))


def shard_geometry(section_bytes: Sequence[int]) -> ShardGeometry:
    """Lay out a shard whose sections have these unpadded sizes.

    ``header_bytes`` depends on the number of sections only. Raises ``LayoutError`` beyond
    ``SECTIONS_MAX`` sections or ``SHARD_BYTES_MAX`` bytes.
    """
    count = check_integer("the number of sections", len(section_bytes), 1, SECTIONS_MAX)
    header_bytes = _align(_HEADER_FIXED_BYTES + count * _HEADER_SECTION_BYTES)
    offsets: list[int] = []
    offset = header_bytes
    for index, nbytes in enumerate(section_bytes):
        check_integer(f"section_bytes[{index}]", nbytes, 1, SHARD_BYTES_MAX - offset)
        offsets.append(offset)
        offset = _align(offset + nbytes)
        check_integer("shard_bytes", offset, 1, SHARD_BYTES_MAX)
    return ShardGeometry(header_bytes, tuple(offsets), tuple(section_bytes), offset)


def checksum(data: memoryview) -> bytes:
    """Return the xxh3-128 of contiguous bytes, big-endian. Releases the GIL."""
    return xxhash.xxh3_128_digest(data)


def seal(slot: memoryview, description: ShardDescription) -> ShardHeader:
    """Make a slot whose sections are packed ready to leave memory, and return its header.

    Sums every section in place, zeroes the padding and writes the header in front. The caller
    owns ``slot``, writable bytes of exactly ``shard_bytes``, and keeps everyone else from writing
    to it meanwhile. Blocks for the time of one read of the slot, with the GIL released.

    Raises ``FormatError`` for a description that no header can hold or for a slot of another size.
    """
    geometry = _check_description(description)
    data = slot.cast("B")
    if len(data) != geometry.shard_bytes:
        raise FormatError(f"the slot has {len(data)} bytes; the shard has {geometry.shard_bytes}")
    checksums: list[bytes] = []
    for start, nbytes in zip(geometry.section_offsets, geometry.section_bytes, strict=True):
        end = start + nbytes
        checksums.append(checksum(data[start:end]))
        data[end : _align(end)] = bytes(_align(end) - end)
    known = {field.name: getattr(description, field.name) for field in fields(ShardDescription)}
    known["section_offsets"] = geometry.section_offsets
    known["section_checksums"] = tuple(checksums)
    header = ShardHeader(**known)
    data[: geometry.header_bytes] = _encode(header, geometry)
    return header


def header_length(data: memoryview, version: int | None = None) -> int:
    """Return the length of the header that ``data`` begins with: whole pages, bounded.

    Needs the first 16 bytes. Raises ``FormatError`` for anything that is not a header of this
    format version, or of ``version``.
    """
    return _read_prefix(data, version or SHARD_FORMAT_VERSION)[0]


def frame_version(data: memoryview) -> int:
    """Return the format version that the first 16 bytes tell, or ``FormatError``."""
    if len(data) < _PREFIX.size:
        raise FormatError(f"header: {len(data)} bytes are fewer than the first {_PREFIX.size}")
    magic, version, *_ = _PREFIX.unpack_from(data)
    if magic != SHARD_MAGIC:
        raise FormatError(f"header: magic is {magic!r}, not {SHARD_MAGIC!r}")
    return int(version)


def frame(version: int, header_bytes: int, body: bytes) -> bytes:
    """Return a header of whole pages around a body: prefix, padding, checksum."""
    room = header_bytes - FRAME_BYTES
    assert len(body) <= room, f"a header body of {len(body)} bytes exceeds its bound {room}"
    prefix = _PREFIX.pack(SHARD_MAGIC, version, header_bytes, len(body))
    summed = b"".join((prefix, body, bytes(room - len(body))))
    return summed + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(summed))


def unframe(data: memoryview, version: int) -> tuple[bytes, bytes]:
    """Return the header that ``data`` begins with and its body, copied, or ``FormatError``."""
    header_bytes, body_bytes = _read_prefix(data, version)
    if len(data) < header_bytes:
        raise FormatError(f"header: {len(data)} bytes of {header_bytes}")
    page = bytes(data[:header_bytes])  # Nothing may change between a check and its use.
    summed, stored = page[: -_HEADER_CHECKSUM.size], page[-_HEADER_CHECKSUM.size :]
    if _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(summed)) != stored:
        raise FormatError("header: checksum differs")
    return page, page[_PREFIX.size : _PREFIX.size + body_bytes]


def parse_header(data: memoryview) -> ShardHeader:
    """Read and validate a header; ``data`` begins with it and may go on.

    Every field is checked before it is used, so nothing of the size of a number in ``data`` is
    allocated. Raises ``FormatError``, and nothing else, for bytes that are not a whole and sound
    header of this format version; callers that hold less than ``header_length`` read the rest.
    """
    page, body = unframe(data.cast("B"), SHARD_FORMAT_VERSION)
    header = _decode(body)
    geometry = _check_description(header)
    if geometry.section_offsets != header.section_offsets:
        raise FormatError("header: section_offsets do not follow from section_bytes")
    if len(header.section_checksums) != len(header.section_bytes):
        raise FormatError("header: section_checksums and section_bytes differ in number")
    for index, digest in enumerate(header.section_checksums):
        _check_bytes(f"section_checksums[{index}]", digest, CHECKSUM_BYTES)
    if _encode(header, geometry) != page:
        raise FormatError("header: not the canonical form")
    return header


def check_identity(
    header: ShardHeader,
    *,
    chunk: ChunkKey,
    shard: ShardId,
    namespace: bytes,
    layout: ShardLayout,
    codec: str,
) -> None:
    """Raise ``IdentityError`` that names the first field in which a sound shard is another one."""
    expected = {
        "chunk": chunk,
        "shard": shard,
        "namespace": namespace,
        "layout": layout,
        "codec": codec,
    }
    for name, value in expected.items():
        found = getattr(header, name)
        if found != value:
            raise IdentityError(f"{name} is {_shown(found)}, not {_shown(value)}")


def verify_section(slot: memoryview, header: ShardHeader, section: int) -> None:
    """Raise ``ChecksumError`` unless a section's bytes in ``slot`` are those that were sealed.

    ``slot`` begins with the shard's header; the padding between sections is not looked at.
    Blocks for the time of one read of the section, with the GIL released.
    """
    start = header.section_offsets[section]
    data = slot.cast("B")[start : start + header.section_bytes[section]]
    if len(data) != header.section_bytes[section]:
        raise ChecksumError(
            f"section {section} has {len(data)} of {header.section_bytes[section]} bytes"
        )
    if checksum(data) != header.section_checksums[section]:
        raise ChecksumError(f"section {section} differs from its checksum")


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def _read_prefix(data: memoryview, expected: int) -> tuple[int, int]:
    """Return ``header_bytes`` and ``body_bytes``, both within bounds."""
    data = data.cast("B")
    version = frame_version(data)
    if version != expected:
        raise FormatError(f"header: format version is {version}; this build reads {expected}")
    _, _, header_bytes, body_bytes = _PREFIX.unpack_from(data)
    if header_bytes % ALIGN_BYTES or not ALIGN_BYTES <= header_bytes <= HEADER_BYTES_MAX:
        raise FormatError(
            f"header: header_bytes is {header_bytes}; allowed are multiples of {ALIGN_BYTES} "
            f"up to {HEADER_BYTES_MAX}"
        )
    if body_bytes > header_bytes - FRAME_BYTES:
        raise FormatError(f"header: body_bytes is {body_bytes}, beyond the header's end")
    return header_bytes, body_bytes


def _encode(header: ShardHeader, geometry: ShardGeometry) -> bytes:
    """Return a header whose fields have been checked, padded and with its own checksum."""
    wire = {name: getattr(header, name) for name in _HEADER_FIELDS}
    # Not the header's own, which on the way in may be floats that equal the integers.
    wire["section_offsets"] = geometry.section_offsets
    wire["codec_params"] = dict(sorted(header.codec_params.items()))
    wire["layout"] = {name: getattr(header.layout, name) for name in _LAYOUT_FIELDS}
    if not header.layout.sink_tokens:
        # Version 1 began without this field: layouts that do not need it are spelled as then.
        del wire["layout"]["sink_tokens"]
    return frame(SHARD_FORMAT_VERSION, geometry.header_bytes, msgpack.packb(wire))


def _decode(body: bytes) -> ShardHeader:
    """Return the header that a msgpack body spells, its structure checked, its values not yet."""
    try:
        decoded = msgpack.unpackb(
            body,
            strict_map_key=True,
            max_str_len=CODEC_PARAM_TEXT_BYTES_MAX,
            max_bin_len=DIGEST_BYTES,
            max_array_len=SECTIONS_MAX,
            max_map_len=CODEC_PARAMS_BYTES_MAX,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError(f"header: not the msgpack of a header: {error}") from error
    wire = _checked_map("body", decoded, _HEADER_FIELDS)
    if isinstance(wire["layout"], dict):
        wire["layout"].setdefault("sink_tokens", 0)
    wire["layout"] = ShardLayout(**_checked_map("layout", wire["layout"], _LAYOUT_FIELDS))
    for name in ("shard", "section_offsets", "section_bytes", "section_checksums"):
        if not isinstance(wire[name], list):
            raise FormatError(f"header: {name} is not a list")
        wire[name] = tuple(wire[name])
    if len(wire["shard"]) != len(ShardId._fields):
        raise FormatError(f"header: shard has {len(wire['shard'])} parts")
    wire["shard"] = ShardId(*wire["shard"])
    return ShardHeader(**wire)


def _checked_map(name: str, value: Any, names: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"header: {name} is not a map")
    differing = sorted(value.keys() ^ set(names), key=repr)
    if differing:
        raise FormatError(f"header: {name} has missing or unknown fields: {differing}")
    return value


def _check_bytes(name: str, value: object, length: int) -> None:
    if not isinstance(value, bytes) or len(value) != length:
        raise FormatError(f"header: {name} is not {length} bytes")


def _check_description(description: ShardDescription) -> ShardGeometry:
    """Check every field's type, bound and fit with the others; return what follows from them."""
    _check_bytes("chunk", description.chunk, DIGEST_BYTES)
    _check_bytes("namespace", description.namespace, DIGEST_BYTES)
    if not _is_name(description.codec):
        raise FormatError(f"header: codec is {description.codec!r}, not the name of a codec")
    _check_codec_params(description.codec_params)
    try:
        check_integer("position", description.position, 0, POSITION_MAX)
        for name, value in zip(ShardId._fields, description.shard, strict=True):
            check_integer(name, value, 0, INDEX_MAX)
        validate_shard_layout(description.layout)
        check_integer("token_count", description.token_count, 1, description.layout.tokens)
        sections = description.layout.sections
        check_integer("the number of sections", len(description.section_bytes), sections, sections)
        geometry = shard_geometry(description.section_bytes)
    except LayoutError as error:
        raise FormatError(f"header: {error}") from error
    if description.position == 0 and description.parent is not None:
        raise FormatError("header: position is 0, but there is a parent")
    if description.position > 0:
        _check_bytes("parent", description.parent, DIGEST_BYTES)
    if not isinstance(description.has_sinks, bool):
        raise FormatError(f"header: has_sinks is {description.has_sinks!r}, not a boolean")
    if description.has_sinks and description.position > 0:
        raise FormatError("header: has_sinks is set, but sinks lie at position 0 only")
    return geometry


def _check_codec_params(params: object) -> None:
    if not isinstance(params, dict):
        raise FormatError("header: codec_params is not a map")
    for name, value in params.items():
        if not _is_name(name):
            raise FormatError(f"header: codec_params holds {name!r}, not a parameter's name")
        if not _is_param(value):
            raise FormatError(
                f"header: codec_params[{name!r}] is {value!r}; allowed are booleans, 64-bit "
                f"integers, finite floats and text up to {CODEC_PARAM_TEXT_BYTES_MAX} bytes"
            )
    nbytes = len(msgpack.packb(params))
    if nbytes > CODEC_PARAMS_BYTES_MAX:
        raise FormatError(
            f"header: codec_params take {nbytes} bytes; allowed are {CODEC_PARAMS_BYTES_MAX}"
        )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_param(value: object) -> bool:
    match value:
        case bool():
            return True
        case int():
            return -(2**63) <= value < 2**63
        case float():
            return math.isfinite(value)
        case str():
            try:
                return len(value.encode()) <= CODEC_PARAM_TEXT_BYTES_MAX
            except UnicodeEncodeError:
                return False
    return False
