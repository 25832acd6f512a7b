"""One KV gives the same shard whichever engine's pool it lies in, and comes back in any other's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from kvtier.codecs.known import KnownCodecs
from kvtier.codecs.sections import section_offset
from kvtier.interfaces import PagedPool
from kvtier.types import (
    GroupKind,
    HeadSlice,
    KVGroup,
    KVLayout,
    Move,
    Part,
    ShardId,
    ShardLayout,
    Slot,
)
from kvtier_adapters.vllm.cpu_blocks import CPU_BACKEND
from kvtier_adapters.vllm.geometry import Geometry, LayerGroup
from kvtier_adapters.vllm.pool import VllmPool, open_pool
from kvtier_engine.kv_pool import KVPool

LAYERS, HEADS, DIM, CHUNK = 2, 3, 32, 128
GROUP = KVGroup(GroupKind.FULL, tuple(range(LAYERS)), HEADS, DIM, DIM, "float32")
SHARD = ShardLayout(LAYERS, HEADS, DIM, DIM, "float32", CHUNK)
NAMES = tuple(f"layers.{layer}.attn" for layer in range(LAYERS))


def vllm_pool(block_tokens: int, *, transposed: bool = False, rows_first: bool = False) -> VllmPool:
    """vLLM's pool: of a GPU, heads or tokens outside, or of a CPU."""
    blocks = 2 * CHUNK // block_tokens
    geometry = Geometry(
        groups=(LayerGroup(NAMES, tuple(range(LAYERS))),),
        kv_heads=HEADS,
        rank_heads=HEADS,
        head_dim=DIM,
        dtype="float32",
        block_tokens=block_tokens,
        block_count=blocks,
        tp_size=1,
        opaque=False,
        cache_dtype="auto",
        transposed=transposed,
    )
    layers = [torch.zeros(blocks, HEADS, block_tokens, 2 * DIM) for _ in NAMES]
    if rows_first:
        layers = [
            torch.zeros(blocks, block_tokens, HEADS, 2 * DIM).permute(0, 2, 1, 3) for _ in NAMES
        ]
    backend = CPU_BACKEND if transposed else "FLASH_ATTN"
    caches = dict(zip(NAMES, layers, strict=True))
    pool = open_pool(geometry, caches, dict.fromkeys(NAMES, backend))
    assert isinstance(pool, VllmPool)
    return pool


def serve_pool(block_tokens: int) -> KVPool:
    layout = KVLayout((GROUP,), chunk_tokens=CHUNK)
    nbytes = LAYERS * 2 * HEADS * 2 * CHUNK * DIM * 4
    return KVPool(layout, block_tokens=block_tokens, capacity_bytes=nbytes)


POOLS: Final[dict[str, Callable[[], PagedPool]]] = {
    "kvtier-serve, 16": lambda: serve_pool(16),
    "vLLM, 16": lambda: vllm_pool(16),
    "vLLM, 64, tokens outside": lambda: vllm_pool(64, rows_first=True),
    "vLLM on a CPU, 32": lambda: vllm_pool(32, transposed=True),
    "vLLM on a CPU, 128": lambda: vllm_pool(128, transposed=True),
}


def blocks_of(pool: PagedPool) -> tuple[int, ...]:
    """Blocks for a chunk, in no order."""
    count = CHUNK // pool.block_tokens
    return tuple((3 * index + 1) % (2 * count) for index in range(count))


def seen(pool: PagedPool, layer: int, part: Part) -> Any:
    return pool.layer_view(0, layer, part)


def rows(pool: PagedPool) -> torch.Tensor:
    """A chunk's KV as a pool holds it: ``[layers, K and V, tokens, heads, dim]``."""
    ids = list(blocks_of(pool))
    return torch.stack(
        [
            torch.stack([seen(pool, layer, part)[ids].flatten(0, 1) for part in Part])
            for layer in range(LAYERS)
        ]
    )


def fill(pool: PagedPool, computed: torch.Tensor) -> None:
    for layer, part in itertools.product(range(LAYERS), Part):
        view = seen(pool, layer, part)
        for index, block in enumerate(blocks_of(pool)):
            start = index * pool.block_tokens
            view[block] = computed[layer, int(part), start : start + pool.block_tokens]


def move(codec: str, pool: PagedPool) -> Move:
    ids = blocks_of(pool)
    heads = HeadSlice(0, 0, HEADS)
    slot = Slot(0, 1 << 20)
    where = ShardId(0, 0, 0)
    return Move(0, codec, where, SHARD, slot, 0, 0, SHARD.sections, heads, 0, 0, CHUNK, ids)


@pytest.mark.parametrize("codec", ["raw", "lossless", "fp8", "int4-g128", "int8"])
def test_every_engine_makes_and_reads_the_same_shards(codec: str) -> None:
    coder = KnownCodecs().get(codec)
    last = SHARD.sections - 1
    size = section_offset(coder, SHARD, last) + coder.section_bytes(SHARD, last)
    computed = torch.randn(LAYERS, 2, CHUNK, HEADS, DIM)
    if codec == "lossless":
        computed = computed.bfloat16().float()
    shards, found = [], []
    for make in POOLS.values():
        pool = make()
        assert len(set(blocks_of(pool))) == CHUNK // pool.block_tokens
        fill(pool, computed)
        assert torch.equal(rows(pool), computed)
        payload = bytearray(size)
        coder.pack(pool, move(codec, pool), memoryview(payload))
        shards.append(bytes(payload))
    assert len(set(shards)) == 1
    for make in POOLS.values():
        pool = make()
        coder.unpack(memoryview(shards[0]), pool, move(codec, pool))
        found.append(rows(pool))
    assert all(torch.equal(each, found[0]) for each in found)
    if coder.traits.exact:
        assert torch.equal(found[0], computed)
    else:
        assert 0 < (found[0] - computed).abs().max() < 1
