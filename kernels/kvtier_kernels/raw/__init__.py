"""Gather paged KV blocks into packed planes and back, byte for byte, with checks at the door.

A section is a run of layers, its planes one after the other without a gap::

    [layer][kv_head][K, V][tokens][dim]
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kvtier_kernels.raw import host, reference
from kvtier_kernels.raw.views import LayerViews, PoolLayers
from kvtier_kernels.transfer.stripes import Shape, Stripe

__all__ = [
    "LayerViews",
    "PoolLayers",
    "Span",
    "check_span",
    "on_stream",
    "pack",
    "stripes",
    "unpack",
]

# torch warns once per process when it wraps a read-only buffer, which ``unpack`` only reads.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Span:
    """Which rows of which planes move.

    A plane has ``tokens`` rows and a section ``kv_heads`` heads per layer; rows ``token_start ..
    token_start + token_count`` of heads ``head_start .. head_start + head_count`` move. In the
    pool those heads start at ``pool_head_start``, and ``block_ids`` cover exactly those rows,
    where row 0 of the plane is the first token of a block.
    """

    tokens: int
    token_start: int
    token_count: int
    kv_heads: int
    head_start: int
    head_count: int
    pool_head_start: int
    block_ids: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """True when every row of every head moves."""
        return self.token_count == self.tokens and self.head_count == self.kv_heads


def pack(layers: Sequence[LayerViews], span: Span, target: memoryview, stream: int = 0) -> None:
    """Copy the span's rows from the pool into ``target``, one section's planes; no other byte.

    ``target`` is writable, contiguous and exactly as long as the section. On CUDA the copies run
    on ``stream`` and are waited for. Layers that many calls share are checked only once where
    they come as ``PoolLayers``. Raises ``ValueError`` for views, spans or sizes that do not fit
    each other, before anything is written.
    """
    if target.readonly:
        raise ValueError("the target is read-only")
    checked = _checked(layers, span)
    planes = _section(checked, span, target)
    moved = host.items(checked, span)
    if moved is not None:
        host.pack(moved, planes)
        return
    with on_stream(checked.device, stream):
        reference.pack(checked, span, planes)


def unpack(source: memoryview, layers: Sequence[LayerViews], span: Span, stream: int = 0) -> None:
    """Copy the span's rows from ``source``, one section's planes, into the pool; no other byte.

    ``source`` may be read-only. Else as ``pack``, whose exact inverse this is.
    """
    checked = _checked(layers, span)
    planes = _section(checked, span, source)
    if len(set(span.block_ids)) < len(span.block_ids):
        raise ValueError("a block is named twice")
    moved = host.items(checked, span)
    if moved is not None:
        host.unpack(planes, moved)
        return
    with on_stream(checked.device, stream):
        reference.unpack(planes, checked, span)


def stripes(shape: Shape) -> list[Stripe]:
    """What kernels move of a section: of K, and of V if there is one."""
    from kvtier_kernels.raw import triton

    return triton.stripes(shape)


def check_span(layers: Sequence[LayerViews], span: Span) -> None:
    """Raise ``ValueError`` unless the views fit each other, and the span the views."""
    _checked(layers, span)


def _checked(layers: Sequence[LayerViews], span: Span) -> PoolLayers:
    checked = layers if isinstance(layers, PoolLayers) else PoolLayers(layers)
    if not 0 <= span.pool_head_start <= checked.kv_heads - span.head_count:
        raise ValueError(f"the pool has {checked.kv_heads} heads: {span}")
    _check_rows(span, checked.block_tokens)
    if not all(0 <= block < checked.block_count for block in span.block_ids):
        last = checked.block_count - 1
        raise ValueError(f"a block id lies outside 0 .. {last}: {span.block_ids}")
    return checked


def _section(layers: PoolLayers, span: Span, section: memoryview) -> torch.Tensor:
    """The section as a uint8 tensor; ``ValueError`` unless it is contiguous and of its length."""
    section_bytes = len(layers) * span.kv_heads * span.tokens * layers.token_bytes
    if not section.c_contiguous or section.nbytes != section_bytes:
        raise ValueError(f"a contiguous section has {section_bytes} bytes, not {section.nbytes}")
    return torch.frombuffer(section, dtype=torch.uint8)


def _check_rows(span: Span, block_tokens: int) -> None:
    if span.token_count < 1 or not 0 <= span.token_start <= span.tokens - span.token_count:
        raise ValueError(f"the rows lie outside the plane: {span}")
    if span.head_count < 1 or not 0 <= span.head_start <= span.kv_heads - span.head_count:
        raise ValueError(f"the heads lie outside the section: {span}")
    skipped = span.token_start % block_tokens
    needed = -(-(skipped + span.token_count) // block_tokens)
    if len(span.block_ids) != needed:
        raise ValueError(f"the rows fill {needed} blocks, not {len(span.block_ids)}: {span}")


def on_stream(device: torch.device, stream: int) -> AbstractContextManager[object]:
    """Run what follows on the pool's stream; leaving the context waits for it."""
    if device.type != "cuda":
        return nullcontext()
    return reference.cuda_stream(device, stream)
