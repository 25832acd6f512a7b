"""Small pools for the tests of the rotated op."""

from __future__ import annotations

import torch

from kvtier_kernels import raw
from kvtier_kernels.rotated import Engine
from kvtier_kernels.rotated_format import Code, Format
from tests.lib.interpreted import choose_interpreter

choose_interpreter()


def triton_kernels() -> Engine:
    """The kernels for a GPU; without one they run in Triton's interpreter."""
    from kvtier_kernels.rotated import triton

    return triton


def gaussian(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def form(dtype: torch.dtype, code: Code, k_dim: int = 64, v_dim: int = 64) -> Format:
    return Format(k_dim, v_dim, code, code, dtype.itemsize)


def views(
    dtype: torch.dtype, *, heads: int = 1, k_dim: int = 64, v_dim: int = 64, layers: int = 1
) -> list[raw.LayerViews]:
    """A pool of 12 blocks of 4 tokens."""
    made: list[raw.LayerViews] = []
    for layer in range(layers):
        k_view = gaussian(12, 4, heads, k_dim, seed=layer).to(dtype)
        v_view = gaussian(12, 4, heads, v_dim, seed=layer + 50).to(dtype) if v_dim else None
        made.append((k_view, v_view))
    return made


def span_of(tokens: int, *, heads: int = 1) -> raw.Span:
    """All rows of a plane, in scattered blocks."""
    blocks = (7, 2, 9, 0, 4, 11, 1, 5, 3, 8, 6, 10)[: -(-tokens // 4)]
    return raw.Span(tokens, 0, tokens, heads, 0, heads, 0, blocks)
