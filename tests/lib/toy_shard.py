"""A shard of three small sections, sealed and as a byte codec encodes it."""

from __future__ import annotations

import numpy as np

from kvtier.codecs.zstd import ZstdCodec
from kvtier.shard_format import ShardDescription, seal, shard_geometry
from kvtier.stored_shard import encode_shard, stored_bytes_max
from kvtier.tiers.arrival import Expected
from kvtier.types import ChunkKey, ShardId, ShardLayout

LAYOUT = ShardLayout(
    layers=3, kv_heads=1, k_dim=64, v_dim=64, dtype="float32", tokens=64, section_layers=1
)
GEOMETRY = shard_geometry([2 * 64 * 64 * 4] * 3)
DESCRIPTION = ShardDescription(
    chunk=ChunkKey(b"c" * 32),
    shard=ShardId(0, 0, 0),
    parent=None,
    position=0,
    namespace=b"n" * 32,
    codec="raw",
    codec_params={},
    layout=LAYOUT,
    token_count=64,
    has_sinks=False,
    section_bytes=GEOMETRY.section_bytes,
)
EXPECTED = Expected(
    chunk=DESCRIPTION.chunk,
    shard=DESCRIPTION.shard,
    namespace=DESCRIPTION.namespace,
    codec="raw",
    layout=LAYOUT,
    geometry=GEOMETRY,
)


def shard_and_stored(codec: ZstdCodec) -> tuple[bytearray, bytearray]:
    """Return the sealed shard, and what is stored of it."""
    shard = bytearray(GEOMETRY.shard_bytes)
    draws = np.random.default_rng(1)
    for start, nbytes in zip(GEOMETRY.section_offsets, GEOMETRY.section_bytes, strict=True):
        shard[start : start + nbytes] = draws.standard_normal(nbytes // 4).astype("<f4").tobytes()
    header = seal(memoryview(shard), DESCRIPTION)
    into = memoryview(bytearray(stored_bytes_max(header, codec)))
    data = encode_shard(memoryview(shard), header, codec, into)
    assert data is not None
    return shard, bytearray(data)
