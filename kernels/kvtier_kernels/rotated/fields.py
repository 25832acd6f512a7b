"""Packed bytes as fields of rows, and rows moved between a section and room of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kvtier_kernels.raw import Span
from kvtier_kernels.rotated_format import Area, Format, Section


@dataclass(frozen=True, slots=True)
class Packed:
    """A section's bytes (flat, uint8): of a whole section, or of just the rows that move."""

    data: torch.Tensor
    section: Section

    def field(self, area: Area) -> torch.Tensor:
        """View one field: ``[layers, kv_heads, rows, row_bytes]``."""
        return self.data.as_strided(
            (self.section.layers, self.section.kv_heads, area.rows, area.row_bytes),
            (self.section.kv_heads * area.head_step, area.head_step, area.row_bytes, 1),
            int(self.data.storage_offset()) + area.offset,
        )

    def zero_pads(self) -> None:
        """Set to zero what lies between the areas."""
        for start, end in self.section.pads:
            self.data[start:end] = 0


def room(form: Format, section: Section, span: Span, device: torch.device) -> Packed:
    """Room on ``device`` for the rows of ``span`` alone."""
    sinks = sink_count(section.sink_tokens, span)
    few = form.section(section.layers, span.head_count, span.token_count, sinks)
    return Packed(torch.empty(few.nbytes, dtype=torch.uint8, device=device), few)


def matching(few: Packed, whole: Packed, span: Span) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what moves: rows of ``room``'s, and the same rows of the section."""
    heads = slice(span.head_start, span.head_start + span.head_count)
    for own, area in zip(few.section.areas, whole.section.areas, strict=True):
        rows = slice(span.token_start, span.token_start + own.rows)
        yield few.field(own), whole.field(area)[:, heads, rows]


def sink_count(sink_tokens: int, span: Span) -> int:
    """How many of the span's rows are sink tokens: its first ones."""
    return max(0, min(sink_tokens - span.token_start, span.token_count))


def sink_span(sink_tokens: int, span: Span, block_tokens: int) -> Span:
    """The span of its sink tokens alone; there must be some."""
    count = sink_count(sink_tokens, span)
    blocks = -(-(span.token_start % block_tokens + count) // block_tokens)
    return replace(span, token_count=count, block_ids=span.block_ids[:blocks])
