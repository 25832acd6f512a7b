"""Learns a calibration from the KV that is being stored: running means of K before RoPE."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvtier.codecs.calibration import Calibration, FloatArray, Rotary
from kvtier.codecs.paged import as_our_error, move_span, pool_view
from kvtier.codecs.rotated import SINK_TOKENS
from kvtier.errors import ConfigError, LayoutError
from kvtier.interfaces import PagedPool
from kvtier.layout import head_range, stage_layer_start
from kvtier.registry import import_problem
from kvtier.types import KVGroup, KVLayout, Move, Part

if TYPE_CHECKING:
    import torch

#: Tokens after which the means no longer change what the codecs make of them.
CALIBRATION_TOKENS_DEFAULT: Final = 8192

_Doubles = npt.NDArray[np.float64]


class Calibrator:
    """Sums K before RoPE over stored chunks until it has seen enough tokens of every head.

    Sums are float64, so the means do not depend on how tokens are cut or in what order they come.
    The first tokens of a sequence are left out, as the codecs keep them exactly. Safe from any
    thread. It sees the pools of this process: where ranks are processes, none sees all heads.
    """

    def __init__(
        self,
        layout: KVLayout,
        rotaries: Sequence[Rotary],
        *,
        tokens: int = CALIBRATION_TOKENS_DEFAULT,
    ) -> None:
        """``rotaries`` has one embedding per KV group; ``ConfigError`` otherwise."""
        if len(rotaries) != len(layout.groups) or tokens < 1:
            raise ConfigError(
                f"{len(rotaries)} rotary embeddings for {len(layout.groups)} KV groups, "
                f"{tokens} tokens"
            )
        self._layout = layout
        self._rotaries = tuple(rotaries)
        self._tokens = tokens
        self._lock = threading.Lock()
        self._sums = tuple(_Sums.of(group) for group in layout.groups)
        self._result: Calibration | None = None

    def observe(self, pool: PagedPool, move: Move) -> None:
        """Take into account the K of a move that is stored; blocks for one pass over it.

        The move's blocks hold what is stored. Once there is a result, returns at once. Sections
        with a NaN or an infinity are left out: no codec stores them. Raises ``LayoutError`` where
        pool, move and layout do not fit each other, ``MissingExtraError`` without torch.
        """
        skipped = max(0, SINK_TOKENS - move.position_start - move.token_start)
        if self._result is not None or skipped >= move.token_count:
            return
        for section in range(move.first_section, move.first_section + move.section_count):
            sums = self._part(move, section)
            if (sums.counts >= self._tokens).all():
                continue
            total = self._total(pool, move, section, skipped)
            if not np.isfinite(total).all():
                continue
            with self._lock:
                sums.add(total, move.token_count - skipped)
        with self._lock:
            self._finish()

    def result(self) -> Calibration | None:
        """The calibration; None until enough tokens of every layer and head were seen."""
        return self._result

    @property
    def tokens(self) -> int:
        """Tokens of every layer and head that a result takes."""
        return self._tokens

    @property
    def tokens_seen(self) -> int:
        """Tokens seen of the layer and head of which the fewest were."""
        with self._lock:
            return self._fewest()

    def _fewest(self) -> int:
        return min(int(each.counts.min()) for each in self._sums)

    def _finish(self) -> None:
        if self._result is None and self._fewest() >= self._tokens:
            means = tuple(each.means() for each in self._sums)
            self._result = Calibration(self._layout, means, self._rotaries)

    def _part(self, move: Move, section: int) -> _Sums:
        """Views of the sums of the move's heads in one section's layers."""
        shard, heads = move.shard, move.heads
        if not 0 <= shard.group < len(self._sums):
            raise LayoutError(f"no KV group {shard.group} in what is calibrated")
        group = self._layout.groups[shard.group]
        layers = move.layout.section_layer_range(section)
        layer = stage_layer_start(self._layout, shard.group, shard.stage) + layers.start
        first = head_range(group.kv_heads, shard.head_group, self._layout.head_groups).start
        head = first + heads.shard_start
        part = self._sums[shard.group].cut(
            slice(layer, layer + len(layers)), slice(head, head + heads.count)
        )
        if part.totals.shape != (len(layers), heads.count, move.layout.k_dim):
            raise LayoutError(f"a shard that does not fit what is calibrated: {move.layout}")
        return part

    def _total(self, pool: PagedPool, move: Move, section: int, skipped: int) -> _Doubles:
        """The sum of a section's K before RoPE, ``[layers, heads, dim]``.

        A turned-back row is ``row * cosine + partner(row) * sine``; its sum over rows is that of
        two weighted sums of rows, of which only the small result changes places.
        """
        rotary = self._rotaries[move.shard.group]
        rows = _rows(pool, move, section)[:, :, skipped:]
        position = move.position_start + move.token_start + skipped
        cosine, sine = rotary.turns_back(position, rows.shape[2], rows.shape[3])
        straight, crossed = (_weighted(rows, table) for table in (cosine, rotary.partner(sine)))
        return straight + rotary.partner(crossed)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Per layer and head: how many rows, and their sum."""

    counts: npt.NDArray[np.int64]
    totals: _Doubles

    @classmethod
    def of(cls, group: KVGroup) -> _Sums:
        shape = (len(group.layers), group.kv_heads)
        return cls(np.zeros(shape, np.int64), np.zeros((*shape, group.k_dim)))

    def cut(self, layers: slice, heads: slice) -> _Sums:
        """Views of some layers and heads."""
        return _Sums(self.counts[layers, heads], self.totals[layers, heads])

    def add(self, total: _Doubles, count: int) -> None:
        np.add(self.counts, count, out=self.counts)
        np.add(self.totals, total, out=self.totals)

    def means(self) -> FloatArray:
        means: FloatArray = (self.totals / self.counts[..., None]).astype(np.float32)
        return means


def _rows(pool: PagedPool, move: Move, section: int) -> torch.Tensor:
    """K of the move's rows in one section, ``[layers, heads, tokens, dim]`` in float64."""
    try:
        from kvtier_kernels import raw, rows
    except ImportError as error:
        raise import_problem(error, "a calibration") from error
    views = [
        (pool_view(pool, move, move.pool_layer_start + layer, Part.K), None)
        for layer in move.layout.section_layer_range(section)
    ]
    with as_our_error(move), raw.on_stream(views[0][0].device, pool.stream):
        found: torch.Tensor = rows.gather(views, move_span(move))[0]
        return found.double()


def _weighted(rows: torch.Tensor, table: FloatArray) -> _Doubles:
    """Sum of rows ``[..., tokens, dim]``, each value times the table's of its token and column."""
    from torch import from_numpy

    weights = from_numpy(np.ascontiguousarray(table)).to(rows)
    found: _Doubles = rows.mul(weights).sum(dim=2).cpu().numpy()
    return found
