"""Sections, the pools that hold them in any physical order, and the rows that move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from kvtier_kernels import raw

POISON = 0xEE
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8]
DIMS = st.integers(1, 9)
ORDERS = ["bth", "bht", "hbt", "htb", "tbh", "thb"]


@dataclass(frozen=True)
class Case:
    """A section, the pool that holds it and the rows that move."""

    dtype: torch.dtype
    layers: int
    pool_heads: int
    k_dim: int
    v_dim: int
    block_tokens: int
    block_count: int
    order: str
    span: raw.Span
    seed: int
    stacked: bool = False

    def views(self, device: str, *, poisoned: bool = False) -> list[raw.LayerViews]:
        """The pool's layers in this case's physical order, random bytes or poison.

        ``stacked`` layers lie in one allocation, evenly spaced; else each K and V has its own.
        """
        plane = self.block_count * self.block_tokens * self.pool_heads * self.dtype.itemsize
        ends = [plane * self.k_dim, plane * (self.k_dim + self.v_dim)]
        generator = torch.Generator().manual_seed(self.seed)
        memory = torch.randint(0, 256, (self.layers, ends[1]), generator=generator)
        memory = torch.full_like(memory, POISON) if poisoned else memory
        memory = memory.to(torch.uint8).to(device)
        sizes = {"b": self.block_count, "t": self.block_tokens, "h": self.pool_heads}
        shape = [sizes[axis] for axis in self.order]

        def view(data: torch.Tensor, dim: int) -> torch.Tensor:
            data = data if self.stacked else data.clone()
            typed = data.view(self.dtype).view(*shape, dim)
            return typed.permute(*(self.order.index(axis) for axis in "bth"), 3)

        return [
            (
                view(row[: ends[0]], self.k_dim),
                view(row[ends[0] :], self.v_dim) if self.v_dim else None,
            )
            for row in memory
        ]

    @property
    def section_bytes(self) -> int:
        row_bytes = (self.k_dim + self.v_dim) * self.dtype.itemsize
        return self.layers * self.span.kv_heads * self.span.tokens * row_bytes


@st.composite
def cases(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = tuple(DTYPES),
    dims: st.SearchStrategy[int] = DIMS,
) -> Case:
    block_tokens = draw(st.integers(1, 6))
    block_count = draw(st.integers(8, 40))
    tokens = draw(st.integers(1, 30))
    start = draw(st.integers(0, tokens - 1))
    count = draw(st.integers(1, tokens - start))
    needed = (start + count - 1) // block_tokens - start // block_tokens + 1
    block_count = max(block_count, needed)
    blocks = draw(st.permutations(range(block_count)))[:needed]
    if draw(st.booleans()):
        first = draw(st.integers(0, block_count - needed))
        blocks = list(range(first, first + needed))
    kv_heads, pool_heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    head_count = draw(st.integers(1, min(kv_heads, pool_heads)))
    span = raw.Span(
        tokens=tokens,
        token_start=start,
        token_count=count,
        kv_heads=kv_heads,
        head_start=draw(st.integers(0, kv_heads - head_count)),
        head_count=head_count,
        pool_head_start=draw(st.integers(0, pool_heads - head_count)),
        block_ids=tuple(blocks),
    )
    return Case(
        dtype=draw(st.sampled_from(dtypes)),
        layers=draw(st.integers(1, 3)),
        pool_heads=pool_heads,
        k_dim=(k_dim := draw(dims)),
        # As wide as K, as it mostly is, or anything else.
        v_dim=draw(st.one_of(st.just(k_dim), st.just(0), dims)),
        block_tokens=block_tokens,
        block_count=block_count,
        order=draw(st.sampled_from(ORDERS)),
        span=span,
        seed=draw(st.integers(0, 2**16)),
        stacked=draw(st.booleans()),
    )
