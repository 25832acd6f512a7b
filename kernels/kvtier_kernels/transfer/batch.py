"""Many shards of one kind as one table of jobs.

A *unit* is one section of one shard; units come section by section, so that the first layers of
all shards are done before the second ones. What is the same for all shards of a kind is worked out
once, as a ``Pattern``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvtier_kernels.transfer.stripes import (
    AREAS_MAX,
    BLOCKS,
    COSINE,
    FIRST,
    SINE,
    Cut,
    PoolForm,
    Stripe,
    Table,
    job_rows,
)

#: K and V of one layer.
LayerViews = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class SectionPlace:
    """One section: where it lies in a shard's payload, its stripes and its layers in the pool.

    What lies between it and ``end``, where the next one may begin, is zero.
    """

    offset: int
    nbytes: int
    end: int
    stripes: tuple[Stripe, ...]
    layers: tuple[LayerViews, ...]

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """What of it no stripe writes."""
        return self.stripes[0].pads


@dataclass(frozen=True, slots=True)
class Strip:
    """One stripe over all sections of a shard: the table's rows for each section."""

    stripe: Stripe
    form: PoolForm
    rows: tuple[Table, ...]


@dataclass(frozen=True)
class Pattern:
    """A kind of shard: its sections, of which the same rows move. Views stay where they are."""

    sections: tuple[SectionPlace, ...]
    cut: Cut

    def span_bytes(self, sections: range) -> int:
        """Bytes from the start of some sections that follow each other to their end."""
        first, last = self.sections[sections[0]], self.sections[sections[-1]]
        return last.offset + last.nbytes - first.offset

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """One for each stripe; a section's last layers may be fewer than another's."""
        made: list[Strip] = []
        for nth, stripe in enumerate(self.sections[0].stripes):
            if not stripe.count(self.cut):
                continue
            by_section = [
                [view for layer in place.layers if (view := layer[stripe.part]) is not None]
                for place in self.sections
            ]
            rows = tuple(
                job_rows(place.stripes[nth], views, self.cut)
                for place, views in zip(self.sections, by_section, strict=True)
            )
            form = PoolForm.of(stripe, [view for views in by_section for view in views])
            made.append(Strip(stripe, form, rows))
        return tuple(made)


@dataclass(frozen=True)
class Batch:
    """Shards of one pattern that move together.

    ``payloads`` are theirs, from section 0 on, and ``addresses`` where these begin. ``blocks`` has
    a row of block ids for each, ``turns`` the cosines and sines of its rows (on the device), if the
    stripes are centred.
    """

    pattern: Pattern
    payloads: Sequence[memoryview]
    addresses: Table
    blocks: Table
    turns: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def table(self, strip: Strip, units: Sequence[tuple[int, int]], bases: Sequence[int]) -> Table:
        """The jobs of some units, whose sections lie at ``bases``."""
        counts = [len(strip.rows[section]) for section, _ in units]
        table = np.concatenate([strip.rows[section] for section, _ in units])
        shards = np.repeat(np.array([shard for _, shard in units]), counts)
        areas = len(strip.stripe.areas)
        table[:, FIRST : FIRST + areas] += np.repeat(np.array(bases, np.int64), counts)[:, None]
        table[:, BLOCKS] = shards * self.blocks.shape[1]
        if self.turns and strip.stripe.means is not None:
            turns = np.array([[turn.data_ptr() for turn in pair] for pair in self.turns], np.int64)
            turn = self.turns[0][0]
            start = self.pattern.cut.row_start * turn.shape[1] * turn.element_size()
            table[:, COSINE] = turns[shards, 0] + start
            table[:, SINE] = turns[shards, 1] + start
        return table

    def bytes_of(self, shard: int, sections: range) -> memoryview:
        """The host's bytes of some sections of a shard, one after the other."""
        start = self.pattern.sections[sections[0]].offset
        return self.payloads[shard][start : start + self.pattern.span_bytes(sections)]

    def zero_pads(self) -> None:
        """Set what no stripe writes to zero in the host's memory, in sections and behind them."""
        places = self.pattern.sections
        pads = [(p.offset + start, p.offset + end) for p in places for start, end in p.pads]
        pads += [(p.offset + p.nbytes, p.end) for p in places]
        for start, end in pads:
            zeros = bytes(end - start)
            for payload in self.payloads:
                payload[start:end] = zeros


assert AREAS_MAX == BLOCKS - FIRST, "the areas' columns lie together"
