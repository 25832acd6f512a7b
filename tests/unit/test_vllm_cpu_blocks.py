"""Blocks of vLLM's attention on a CPU: seen to be packed as expected, or opaque."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvtier.types import Part
from kvtier_adapters.vllm.cpu_blocks import (
    CPU_BACKEND,
    Writer,
    split_block,
    transposes_keys,
    vllm_transposes_keys_boundary,
)
from kvtier_adapters.vllm.geometry import Geometry, LayerGroup
from kvtier_adapters.vllm.pool import VllmPool, open_pool

TOKENS, HEADS, DIM = 32, 3, 16


def slots(cache: torch.Tensor) -> torch.Tensor:
    """A head's blocks as flat rows: ``[blocks, heads, values]``."""
    return cache.view(cache.shape[0], cache.shape[1], -1)


def write_by(place: Callable[[int, int], int], *, cast: torch.dtype | None = None) -> Writer:
    """A writer that puts K of a block's token and dimension where ``place`` says, V in rows."""

    def write(
        keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, where: torch.Tensor
    ) -> None:
        rows = slots(cache)
        for index, slot in enumerate(where.tolist()):
            block, token = divmod(slot, TOKENS)
            spots = torch.tensor([place(token, dim) for dim in range(DIM)])
            rows[block][:, spots] = keys[index].to(cast or keys.dtype).to(cache.dtype)
            start = TOKENS * DIM + token * DIM
            rows[block][:, start : start + DIM] = values[index]

    return write


def transposed(token: int, dim: int) -> int:
    return dim * TOKENS + token


def tried(write: Writer, dtype: torch.dtype = torch.float32) -> bool:
    return transposes_keys(write, dtype, TOKENS, HEADS, DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_writer_that_transposes_k_is_known(dtype: torch.dtype) -> None:
    assert tried(write_by(transposed), dtype)


@pytest.mark.parametrize(
    "place",
    [
        lambda token, dim: token * DIM + dim,
        # Sixteen tokens at a time, and pairs of values side by side.
        lambda token, dim: (token // 16 * DIM + dim) * 16 + token % 16,
        lambda token, dim: (dim // 2 * TOKENS + token) * 2 + dim % 2,
    ],
    ids=["rows", "tiles", "pairs"],
)
def test_other_packings_are_not(place: Callable[[int, int], int]) -> None:
    assert not tried(write_by(place))


def test_a_writer_that_rounds_or_writes_elsewhere_is_not() -> None:
    assert not tried(write_by(transposed, cast=torch.float8_e4m3fn))

    def write(
        keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, where: torch.Tensor
    ) -> None:
        write_by(transposed)(keys, values, cache, where)
        slots(cache)[0, 0, 0] = 1

    assert not tried(write)


def test_without_vllm_nothing_is_known() -> None:
    # The tests' own environment has none; with one, tests/engines says what it does.
    assert not vllm_transposes_keys_boundary(torch.float32, 31, HEADS, DIM)


def geometry(*, opaque: bool) -> Geometry:
    return Geometry(
        groups=(LayerGroup(("layers.0.attn",), (0,)),),
        kv_heads=HEADS,
        rank_heads=HEADS,
        head_dim=DIM,
        dtype="float32",
        block_tokens=TOKENS,
        block_count=4,
        tp_size=1,
        opaque=opaque,
        cache_dtype="auto",
        transposed=not opaque,
    )


def test_the_pool_shows_what_such_a_writer_wrote() -> None:
    layer = torch.zeros(4, HEADS, TOKENS, 2 * DIM)
    keys, values = torch.randn(2, TOKENS, HEADS, DIM)
    write_by(transposed)(keys, values, layer, torch.arange(TOKENS) + 2 * TOKENS)
    name = {"layers.0.attn": CPU_BACKEND}
    pool = open_pool(geometry(opaque=False), {"layers.0.attn": layer}, name)
    assert isinstance(pool, VllmPool)
    assert torch.equal(pool.layer_view(0, 0, Part.K)[2], keys)
    assert torch.equal(pool.layer_view(0, 0, Part.V)[2], values)
    # Both are views: what is loaded lands in vLLM's memory.
    pool.layer_view(0, 0, Part.K)[2] = 0
    assert not slots(layer)[2][:, : TOKENS * DIM].any()


def test_only_the_attention_that_was_tried_is_taken() -> None:
    layer = torch.zeros(4, HEADS, TOKENS, 2 * DIM)
    named = {"layers.0.attn": "FLASH_ATTN"}
    caches = {"layers.0.attn": layer}
    assert "FLASH_ATTN" in str(open_pool(geometry(opaque=False), caches, named))
    assert isinstance(open_pool(geometry(opaque=True), caches, named), VllmPool)


def test_heads_that_do_not_lie_in_one_piece_cannot_be_split() -> None:
    interleaved = torch.zeros(4, TOKENS, HEADS, 2 * DIM).permute(0, 2, 1, 3)
    with pytest.raises(RuntimeError):
        split_block(interleaved, DIM)
