"""How vLLM's attention on a CPU keeps K and V in a block: tried out, never assumed.

Its writer packs as the machine's instructions like it. Of several packings one is known here::

    a block of a head   [ K: dim rows of tokens | V: tokens rows of dim ]

Whether this vLLM on this machine has that one is seen by writing numbers with vLLM's own writer
and reading them back from where they should lie.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvtier.vllm")

#: The attention whose writer is tried.
CPU_BACKEND: Final = "CPU_ATTN"
_BLOCKS: Final = 3

#: Writes K and V ``[tokens, kv_heads, dim]`` into the slots of a cache
#: ``[blocks, kv_heads, tokens, 2 * dim]``.
Writer = Callable[
    ["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"],
    None,
]


def split_block(layer: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of K and V, each ``[blocks, tokens, kv_heads, dim]``, of a layer so packed.

    ``layer`` is ``[blocks, kv_heads, tokens, 2 * dim]``. Raises ``RuntimeError`` where a head's
    block does not lie in one piece.
    """
    blocks, heads, tokens, _ = layer.shape
    keys = layer.view(blocks, heads, 2, dim, tokens)[:, :, 0].permute(0, 3, 1, 2)
    values = layer.view(blocks, heads, 2, tokens, dim)[:, :, 1].permute(0, 2, 1, 3)
    return keys, values


def transposes_keys(
    write: Writer, dtype: torch.dtype, block_tokens: int, heads: int, dim: int
) -> bool:
    """Tell whether ``write`` packs blocks as ``split_block`` reads them, bit for bit.

    Every element has been somewhere else in one of the patterns; what belongs to no slot that was
    written must stay as it was.
    """
    import torch

    slots = torch.arange(block_tokens, (_BLOCKS - 1) * block_tokens + block_tokens // 2)
    shape = (len(slots), heads, dim)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        # Whole numbers up to 255 are exact in every dtype of KV with 8 bits of significand.
        keys, values = (
            torch.randint(-255, 256, shape, generator=generator).to(dtype) for _ in range(2)
        )
        cache = torch.full((_BLOCKS, heads, block_tokens, 2 * dim), 257.0).to(dtype)
        expected = cache.clone()
        for view, rows in zip(split_block(expected, dim), (keys, values), strict=True):
            for slot, row in zip(slots.tolist(), rows, strict=True):
                view[slot // block_tokens, slot % block_tokens] = row
        write(keys, values, cache, slots)
        if not torch.equal(cache, expected):
            return False
    return True


def vllm_transposes_keys_boundary(
    dtype: torch.dtype, block_tokens: int, heads: int, dim: int
) -> bool:
    """Tell whether this vLLM on this machine packs so; what cannot be tried does not."""
    try:
        return transposes_keys(
            _vllm_writer(dtype, block_tokens, dim), dtype, block_tokens, heads, dim
        )
    except Exception as error:  # Whatever vLLM says: then blocks are bytes that mean nothing.
        _log.info("how vLLM packs KV on this CPU could not be tried: %s", error)
        return False


def _vllm_writer(dtype: torch.dtype, block_tokens: int, dim: int) -> Writer:
    from vllm import _custom_ops
    from vllm.v1.attention.backends import cpu_attn

    isa = cpu_attn._get_attn_isa(dtype, block_tokens, dim, "auto")  # noqa: SLF001

    def write(
        keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        blocks, heads, tokens, _ = cache.shape
        halves = cache.view(blocks, heads, 2 * tokens, dim).chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa)

    return write
