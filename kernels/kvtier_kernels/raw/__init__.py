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

from kvtier_kernels.raw import reference

__all__ = ["LayerViews", "Span", "pack", "unpack"]

#: K and V of one layer, each ``[block_count, block_tokens, kv_heads, dim]``; V is None (latent).
LayerViews = tuple[torch.Tensor, torch.Tensor | None]

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
    on ``stream`` and are waited for. Raises ``ValueError`` for views, spans or sizes that do not
    fit each other, before anything is written.
    """
    if target.readonly:
        raise ValueError("the target is read-only")
    planes = _check(layers, span, target)
    with _on_stream(layers[0][0].device, stream):
        reference.pack(layers, span, planes)


def unpack(source: memoryview, layers: Sequence[LayerViews], span: Span, stream: int = 0) -> None:
    """Copy the span's rows from ``source``, one section's planes, into the pool; no other byte.

    ``source`` may be read-only. Else as ``pack``, whose exact inverse this is.
    """
    planes = _check(layers, span, source)
    if len(set(span.block_ids)) < len(span.block_ids):
        raise ValueError("a block is named twice")
    with _on_stream(layers[0][0].device, stream):
        reference.unpack(planes, layers, span)


def _check(layers: Sequence[LayerViews], span: Span, section: memoryview) -> torch.Tensor:
    """Raise ``ValueError`` unless all fits together; return the section as a uint8 tensor."""
    if not layers:
        raise ValueError("no layers")
    parts = [part for layer in layers for part in layer if part is not None]
    first = parts[0]
    for part in parts:
        _check_view(part, first, span)
    block_count, block_tokens = first.shape[:2]
    _check_rows(span, block_tokens)
    if not all(0 <= block < block_count for block in span.block_ids):
        raise ValueError(f"a block id lies outside 0 .. {block_count - 1}: {span.block_ids}")
    row_bytes = sum(part.shape[3] for part in parts) * first.element_size()
    section_bytes = span.kv_heads * span.tokens * row_bytes
    if not section.c_contiguous or section.nbytes != section_bytes:
        raise ValueError(f"a contiguous section has {section_bytes} bytes, not {section.nbytes}")
    return torch.frombuffer(section, dtype=torch.uint8)


def _check_view(part: torch.Tensor, first: torch.Tensor, span: Span) -> None:
    if part.dim() != 4 or part.shape[:3] != first.shape[:3]:
        raise ValueError(f"views differ in shape: {tuple(part.shape)}, {tuple(first.shape)}")
    if part.dtype != first.dtype or part.device != first.device:
        raise ValueError("views differ in dtype or device")
    if part.shape[3] < 1 or (part.shape[3] > 1 and part.stride(3) != 1):
        raise ValueError(f"the last dimension is not dense: strides {part.stride()}")
    if not 0 <= span.pool_head_start <= part.shape[2] - span.head_count:
        raise ValueError(f"the pool has {part.shape[2]} heads: {span}")


def _check_rows(span: Span, block_tokens: int) -> None:
    if span.token_count < 1 or not 0 <= span.token_start <= span.tokens - span.token_count:
        raise ValueError(f"the rows lie outside the plane: {span}")
    if span.head_count < 1 or not 0 <= span.head_start <= span.kv_heads - span.head_count:
        raise ValueError(f"the heads lie outside the section: {span}")
    skipped = span.token_start % block_tokens
    needed = -(-(skipped + span.token_count) // block_tokens)
    if len(span.block_ids) != needed:
        raise ValueError(f"the rows fill {needed} blocks, not {len(span.block_ids)}: {span}")


def _on_stream(device: torch.device, stream: int) -> AbstractContextManager[object]:
    """Run what follows on the pool's stream; leaving the context waits for it."""
    if device.type != "cuda":
        return nullcontext()
    return reference.cuda_stream(device, stream)
