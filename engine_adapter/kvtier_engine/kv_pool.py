"""The engine's HBM tier: one preallocated pool of KV blocks.

Layout of one layer, so that consecutive blocks are one strided view and attention copies nothing::

    [K, V][kv_heads][block_count * block_tokens][head_dim]
"""

from __future__ import annotations

import mmap

import torch

from kvtier.errors import ConfigError, LayoutError
from kvtier.types import GroupKind, KVLayout, Part


class KVPool:
    """Blocks of one ``full`` KV group. Satisfies ``kvtier.interfaces.PagedPool``.

    ``capacity_bytes`` is an upper bound; the pool holds as many whole blocks as fit. All memory is
    reserved at construction and reads as zero. On a CPU it lies in huge pages where the kernel
    offers them: a fresh small page costs more than filling it. Not thread-safe: the engine orders
    its steps and KVTier's loads and stores so that no block is read while it is written.
    """

    def __init__(
        self, layout: KVLayout, *, block_tokens: int, capacity_bytes: int, device: str = "cpu"
    ) -> None:
        if len(layout.groups) != 1 or layout.groups[0].kind is not GroupKind.FULL:
            raise LayoutError("the engine's pool holds exactly one KV group of kind 'full'")
        group = layout.groups[0]
        if group.k_dim != group.v_dim:
            raise LayoutError(f"K and V differ in width: {group.k_dim} and {group.v_dim}")
        if block_tokens < 1 or layout.chunk_tokens % block_tokens:
            raise ConfigError(
                f"block_tokens = {block_tokens}; allowed: a divisor of chunk_tokens = "
                f"{layout.chunk_tokens}"
            )
        dtype: torch.dtype = getattr(torch, group.dtype)
        vector_bytes = group.k_dim * dtype.itemsize
        self._block_tokens = block_tokens
        self._bytes_per_block = len(group.layers) * 2 * group.kv_heads * block_tokens * vector_bytes
        self._block_count = capacity_bytes // self._bytes_per_block
        if self._block_count < 1:
            raise ConfigError(
                f"KV pool of {capacity_bytes} bytes is below one block of {self._bytes_per_block}"
            )
        shape = (
            len(group.layers),
            2,
            group.kv_heads,
            self._block_count * block_tokens,
            group.k_dim,
        )
        self._storage = _zeros(shape, dtype, device)
        # Attention asks for these per layer and step; views made once cost nothing there.
        self._layers = tuple(self._storage[index] for index in range(len(group.layers)))

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self._block_tokens

    @property
    def block_count(self) -> int:
        """Blocks in the pool; ids run from 0."""
        return self._block_count

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, heads, K and V."""
        return self._bytes_per_block

    @property
    def device(self) -> torch.device:
        """Where the pool lies."""
        return self._storage.device

    @property
    def stream(self) -> int:
        """The CUDA stream on which blocks are written; 0 on a CPU."""
        if self._storage.device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self._storage.device).cuda_stream)

    def layer_view(self, group: int, layer: int, part: Part) -> torch.Tensor:
        """Return a view ``[block_count, block_tokens, kv_heads, dim]`` of one layer's K or V."""
        assert group == 0, f"KV group {group} of 1"
        plane = self._layers[layer][int(part)]
        kv_heads, _, dim = plane.shape
        blocks = plane.view(kv_heads, self._block_count, self._block_tokens, dim)
        return blocks.permute(1, 2, 0, 3)

    def layer(self, index: int) -> torch.Tensor:
        """Return one layer's memory ``[2, kv_heads, block_count * block_tokens, dim]``."""
        return self._layers[index]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = 1
    for size in shape:
        count *= size
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
