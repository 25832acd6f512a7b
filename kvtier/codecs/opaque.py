"""The codec of payloads that mean nothing to KVTier: a copy between one buffer and one slot.

A payload is laid out as a shard whose layers are its sections, of which only the last may be
shorter. Its true size stands in the codec's name, ``opaque-123456``, and so in every index and
header: what lies anywhere under another size is known for that before a byte is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import numpy as np

from kvtier.codecs.sections import aligned_bytes
from kvtier.constants import ALIGN_BYTES, OPAQUE_BYTES_MAX, OPAQUE_SECTION_BYTES, SECTIONS_MAX
from kvtier.errors import CodecError, LayoutError
from kvtier.interfaces import PagedPool
from kvtier.types import (
    CodecTraits,
    Direction,
    GroupKind,
    KVGroup,
    KVLayout,
    Move,
    Part,
    ShardLayout,
)

_NAME: Final = re.compile(r"opaque-([1-9][0-9]{0,15})")


def opaque_codec(name: str) -> OpaqueCodec | None:
    """Return the codec that a name in a header or an index means; None: another kind of codec."""
    match = _NAME.fullmatch(name)
    nbytes = int(match[1]) if match else 0
    return OpaqueCodec(nbytes) if 1 <= nbytes <= OPAQUE_BYTES_MAX else None


def opaque_layout(nbytes: int) -> KVLayout:
    """Return the layout of a payload: one token, one head, as many layers as it has sections.

    Raises ``LayoutError`` for a payload of no bytes or of more than ``OPAQUE_BYTES_MAX``.
    """
    if not 1 <= nbytes <= OPAQUE_BYTES_MAX:
        raise LayoutError(f"a payload has {nbytes} bytes; allowed are 1 to {OPAQUE_BYTES_MAX}")
    return _layout(-(-nbytes // OPAQUE_SECTION_BYTES))


@lru_cache(maxsize=SECTIONS_MAX)
def _layout(sections: int) -> KVLayout:
    group = KVGroup(
        GroupKind.LATENT,
        layers=tuple(range(sections)),
        kv_heads=1,
        k_dim=OPAQUE_SECTION_BYTES,
        v_dim=0,
        dtype="uint8",
    )
    return KVLayout((group,), chunk_tokens=1, section_layers=1)


class Pieces:
    """Where a payload lies in a caller's memory: contiguous bytes, one piece after another."""

    def __init__(self, *pieces: memoryview) -> None:
        self._pieces = pieces
        self.nbytes = sum(map(len, pieces))

    @property
    def readonly(self) -> bool:
        """Tell whether any of it cannot be written to."""
        return any(piece.readonly for piece in self._pieces)

    def cut(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes ``start .. end``, in as many parts as they lie in."""
        for piece in self._pieces:
            if start < len(piece) and end > 0:
                yield piece[max(start, 0) : end]
            start, end = start - len(piece), end - len(piece)


class BufferPool:
    """The callers' buffers by number, as the pool of the worker that copies them.

    Safe from any thread. A buffer stays the caller's; it is touched from ``add`` until ``remove``.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Pieces] = {}

    def add(self, number: int, buffer: Pieces) -> None:
        """Name a buffer by a number that no other one has."""
        self._buffers[number] = buffer

    def remove(self, number: int) -> None:
        """Forget a buffer, if it is known."""
        self._buffers.pop(number, None)

    def buffer(self, number: int) -> Pieces:
        """Return a buffer. Raises ``CodecError`` for one that is not known."""
        buffer = self._buffers.get(number)
        if buffer is None:
            raise CodecError(f"buffer {number} is not known (any more)")
        return buffer

    @property
    def block_tokens(self) -> int:
        """A buffer is one block of one token."""
        return 1

    @property
    def block_count(self) -> int:
        """Buffers that are known now."""
        return len(self._buffers)

    @property
    def stream(self) -> int:
        """None: host memory."""
        return 0

    def layer_view(self, group: int, layer: int, part: Part) -> object:
        """Return no memory: a buffer has no layers to be seen by anybody else."""
        del group, layer, part
        return memoryview(b"")


class OpaqueCodec:
    """Copies payloads of one size, section by section, with the GIL released."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @property
    def name(self) -> str:
        """``opaque-`` and the payload's size in bytes."""
        return f"opaque-{self._nbytes}"

    @property
    def layout(self) -> KVLayout:
        """The one layout of payloads of this size."""
        return opaque_layout(self._nbytes)

    @property
    def traits(self) -> CodecTraits:
        """Exact."""
        return CodecTraits(exact=True)

    def section_bytes(self, layout: ShardLayout, section: int) -> int:
        """Every section is full but the last one. Raises ``CodecError`` for another layout."""
        if layout.sections != -(-self._nbytes // OPAQUE_SECTION_BYTES):
            raise CodecError(f"{layout.sections} sections do not make {self._nbytes} bytes")
        return min(OPAQUE_SECTION_BYTES, self._nbytes - section * OPAQUE_SECTION_BYTES)

    def pack(self, pool: PagedPool, move: Move, payload: memoryview) -> None:
        """Copy the move's sections from its buffer."""
        for piece, slot in self._parts(pool, move, payload):
            _copy(piece, slot)

    def unpack(self, payload: memoryview, pool: PagedPool, move: Move) -> None:
        """Copy the move's sections into its buffer."""
        for piece, slot in self._parts(pool, move, payload):
            _copy(slot, piece)

    def _parts(
        self, pool: PagedPool, move: Move, payload: memoryview
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """The pieces of the move's share of the buffer, each with its place in the slot."""
        assert isinstance(pool, BufferPool), "opaque payloads lie in buffers"
        (number,) = move.block_ids
        buffer = pool.buffer(number)
        if buffer.nbytes != self._nbytes:
            raise CodecError(f"a buffer of {buffer.nbytes} bytes for a payload of {self._nbytes}")
        start = move.first_section * OPAQUE_SECTION_BYTES
        end = start + move.section_count * OPAQUE_SECTION_BYTES
        for piece in buffer.cut(start, end):
            yield piece, payload[start : start + len(piece)]
            start += len(piece)


def copy_out(slot: memoryview, buffer: Pieces) -> None:
    """Copy the whole payload that a slot holds into a buffer of its size, the GIL released."""
    # All sections but the last are whole pages, so behind the header it lies in one piece.
    start = len(slot) - aligned_bytes(buffer.nbytes)
    for piece in buffer.cut(0, buffer.nbytes):
        _copy(slot[start : start + len(piece)], piece)
        start += len(piece)


def move_payload(direction: Direction, arena: memoryview, pool: BufferPool, move: Move) -> None:
    """Make one move of a plan. Raises ``CodecError`` for a buffer of another size."""
    codec = opaque_codec(move.codec)
    assert codec is not None, "a plan for a payload"
    start = move.slot.offset + move.payload_offset
    payload = arena[start : move.slot.offset + move.slot.nbytes]
    if direction is Direction.STORE:
        codec.pack(pool, move, payload)
    else:
        codec.unpack(payload, pool, move)


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source) <= ALIGN_BYTES:  # Quicker than to ask for anything.
        target[:] = source
        return
    # Slices of memoryviews would keep the GIL.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
