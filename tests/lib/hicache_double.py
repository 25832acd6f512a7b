"""A host pool laid out as SGLang's page-first MHA pool, and a storage config like its own.

Facts of SGLang 0.5.23: ``pool_host/mha.py`` (one buffer ``[K and V, slots, layers, heads, dim]``,
two pieces a page), ``hicache_storage.py`` (the fields of the config).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


class PageFirstPool:
    """Slots of K and V for all layers, a page's slots one after another."""

    layout = "page_first"

    def __init__(
        self,
        *,
        pages: int = 16,
        page_size: int = 8,
        layers: int = 2,
        heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.page_size, self.layer_num, self.head_num, self.head_dim = page_size, layers, heads, dim
        self.dtype, self.size = dtype, pages * page_size
        self.start_layer, self.end_layer = 0, layers
        self.kv_buffer = torch.zeros(2, self.size, layers, heads, dim, dtype=dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        slot_bytes = self.layer_num * self.head_num * self.head_dim * self.dtype.itemsize
        addresses = []
        for first in indices[:: self.page_size].tolist():
            k = self.kv_buffer.data_ptr() + first * slot_bytes
            addresses += [k, k + self.size * slot_bytes]
        return addresses, [self.page_size * slot_bytes] * len(addresses)

    def slots(self, *pages: int) -> torch.Tensor:
        """The host indices of pages."""
        size = self.page_size
        ranges = [torch.arange(page * size, (page + 1) * size) for page in pages]
        return torch.cat(ranges) if ranges else torch.arange(0)

    def page(self, number: int) -> torch.Tensor:
        """A copy of K and V of one page."""
        return self.kv_buffer[:, number * self.page_size : (number + 1) * self.page_size].clone()

    def fill(self, seed: int) -> None:
        """Put values into every slot that no other seed gives."""
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=generator))


@dataclass
class StorageConfig:
    """The fields of ``HiCacheStorageConfig`` that a back end may look at."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = "org/model"
    dp_rank: int = 0
    dcp_rank: int = 0
    dcp_size: int = 1
    extra_config: dict[str, Any] = field(default_factory=dict)
