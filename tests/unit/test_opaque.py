"""The codec that copies: names, layouts, sections, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from kvtier.cache.planner import chunk_shape, load_moves, store_moves
from kvtier.codecs.known import KnownCodecs
from kvtier.codecs.opaque import BufferPool, OpaqueCodec, Pieces, opaque_codec, opaque_layout
from kvtier.constants import OPAQUE_BYTES_MAX, OPAQUE_SECTION_BYTES
from kvtier.errors import CodecError
from kvtier.shard_format import shard_geometry
from kvtier.types import Blocks, Fidelity, Move, Placement, ShardLayout, Slot

PLACE = Placement()


def moves_of(nbytes: int, sections: range | None = None) -> tuple[Move, Move]:
    """A store's and a load's move of a payload, whose slot begins at 0."""
    codec = OpaqueCodec(nbytes)
    layout = codec.layout
    shape = chunk_shape(layout, codec)
    (shard,) = shape.layouts
    slots = {shard: Slot(0, shape.sizes[shard])}
    blocks = Blocks(0, ((7,),), 1)
    (store,) = store_moves(
        layout, shape, {shard: PLACE}, chunk=0, blocks=blocks, slots=slots.__getitem__
    )
    some = range(shape.layouts[shard].sections) if sections is None else sections
    (load,) = load_moves(
        layout,
        shape,
        [PLACE],
        chunk=0,
        groups=frozenset({0}),
        end_token=layout.chunk_tokens,
        blocks=blocks,
        slots=slots.__getitem__,
        sections=lambda _: some,
    )
    return store, load


@pytest.mark.parametrize(
    "nbytes",
    [1, 4095, 4097, OPAQUE_SECTION_BYTES, OPAQUE_SECTION_BYTES + 1, 3 * OPAQUE_SECTION_BYTES - 7],
)
def test_a_payload_comes_back_section_by_section(nbytes: int) -> None:
    data = bytes(range(256)) * (nbytes // 256 + 1)
    codec, pool = OpaqueCodec(nbytes), BufferPool()
    store, load = moves_of(nbytes)
    payload = memoryview(bytearray(b"\xee" * (store.slot.nbytes - store.payload_offset)))
    pool.add(7, Pieces(memoryview(data[:nbytes])))
    codec.pack(pool, store, payload)
    assert payload[:nbytes] == data[:nbytes]
    assert set(bytes(payload[nbytes:])) <= {0xEE}, "it wrote behind the payload"
    into = bytearray(nbytes)
    pool.add(7, Pieces(memoryview(into)))
    for section in range(load.section_count):
        before = bytes(into)
        codec.unpack(payload, pool, moves_of(nbytes, range(section, section + 1))[1])
        start, end = section * OPAQUE_SECTION_BYTES, (section + 1) * OPAQUE_SECTION_BYTES
        assert into[start:end] == data[start : min(end, nbytes)]
        assert into[:start] == data[:start]
        assert into[end:] == before[end:]


def test_a_cut_of_pieces_is_the_cut_of_their_bytes() -> None:
    data = bytes(range(100))
    bounds = [0, 1, 1, 40, 99, 100]
    views = [memoryview(data)[start:end] for start, end in pairwise(bounds)]
    pieces = Pieces(*views)
    assert pieces.nbytes == len(data)
    for start in range(len(data)):
        for end in range(start, len(data) + 2):
            assert b"".join(pieces.cut(start, end)) == data[start:end]


def test_the_name_says_the_size_and_nothing_else_does() -> None:
    codecs = KnownCodecs()
    for nbytes in (1, 123_456, OPAQUE_BYTES_MAX):
        codec = opaque_codec(f"opaque-{nbytes}")
        assert codec is not None
        assert codec.name == codecs.get(codec.name).name == f"opaque-{nbytes}"
        assert codecs.readable(codec.name, Fidelity.EXACT)
        sizes = [codec.section_bytes(_shard(nbytes), n) for n in range(_shard(nbytes).sections)]
        assert sum(sizes) == nbytes
        shard_geometry(sizes)
    for wrong in ("opaque", "opaque-", "opaque-0", "opaque-01", "opaque--1", "opaque-1 ", "raw"):
        assert opaque_codec(wrong) is None
        if wrong != "raw":
            assert not codecs.readable(wrong, Fidelity.LOSSY)
    assert not codecs.readable(f"opaque-{OPAQUE_BYTES_MAX + 1}", Fidelity.LOSSY)


def _shard(nbytes: int) -> ShardLayout:
    (shape,) = chunk_shape(opaque_layout(nbytes), OpaqueCodec(nbytes)).layouts.values()
    return shape


def test_another_layout_buffer_or_size_is_refused() -> None:
    codec, pool = OpaqueCodec(5000), BufferPool()
    store, load = moves_of(5000)
    payload = memoryview(bytearray(store.slot.nbytes))
    with pytest.raises(CodecError, match="not known"):
        codec.pack(pool, store, payload)
    pool.add(7, Pieces(memoryview(bytearray(4999))))
    with pytest.raises(CodecError, match="4999 bytes for a payload of 5000"):
        codec.unpack(payload, pool, load)
    pool.remove(7)
    pool.remove(7)
    assert pool.block_count == 0
    with pytest.raises(CodecError, match="do not make 5000 bytes"):
        codec.section_bytes(replace(load.layout, layers=2), 0)
