"""Whether a calibrated codec does on a model's KV what it should: measured on what is stored.

Codes for normally distributed values lose a known share of the energy of what they are given, the
centred and rotated rows. A layer that loses clearly more is not so distributed, and as int4 it
would cost more quality than was measured; such a model is stored as ``int6``.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.codecs.calibration import Calibration
from kvtier.codecs.paged import as_our_error, move_span, pool_view
from kvtier.codecs.rotated import SINK_TOKENS
from kvtier.interfaces import PagedPool
from kvtier.layout import head_range, stage_layer_start
from kvtier.registry import import_problem
from kvtier.types import Move, Part
from kvtier_kernels.rotated_format import LM4, Format

if TYPE_CHECKING:
    import torch

#: Signal to noise of Gaussian values in Lloyd-Max codes of 4 bits, in dB.
CODES_DB: Final = 20.2
#: A layer is weak if it misses what is expected by more than this.
MISSED_DB_MAX: Final = 1.0
#: Tokens of every layer that are looked at.
ASSAY_TOKENS: Final = 512

_TINY: Final = 1e-30


class Assay:
    """Packs stored KV as ``int4`` would, layer by layer, and compares. Safe from any thread."""

    def __init__(self, calibration: Calibration, *, tokens: int = ASSAY_TOKENS) -> None:
        self._calibration = calibration
        self._tokens = tokens
        self._lock = threading.Lock()
        # By group and layer within it: tokens times heads, then energy and error of K and of V.
        self._seen = [
            np.zeros((len(group.layers), 1 + 2 * len(Part))) for group in calibration.layout.groups
        ]

    def observe(self, pool: PagedPool, move: Move) -> None:
        """Take a stored move into account; blocks while it is packed where the pool lies.

        The move's blocks hold what is stored. Sections with a NaN or an infinity are left out.
        Raises ``LayoutError`` where pool and move do not fit each other, ``MissingExtraError``
        without torch.
        """
        skipped = max(0, SINK_TOKENS - move.position_start - move.token_start)
        if skipped >= move.token_count:
            return
        group = move.shard.group
        start = stage_layer_start(self._calibration.layout, group, move.shard.stage)
        for section in range(move.first_section, move.first_section + move.section_count):
            for layer in move.layout.section_layer_range(section):
                if self._enough(group, start + layer):
                    continue
                figures = self._figures(pool, move, layer, start + layer, skipped)
                if np.isfinite(figures).all():
                    with self._lock:
                        self._seen[group][start + layer] += figures

    @property
    def weak_layers(self) -> tuple[int, ...] | None:
        """The model's layers that miss what is expected, ascending; None until all were seen."""
        with self._lock:
            weak: list[int] = []
            for index, group in enumerate(self._calibration.layout.groups):
                if not all(self._enough(index, layer) for layer in range(len(group.layers))):
                    return None
                weak += [
                    layer
                    for layer, row in zip(group.layers, self._seen[index], strict=True)
                    if _misses(row)
                ]
            return tuple(sorted(weak))

    def _enough(self, group: int, layer: int) -> bool:
        heads = self._calibration.layout.groups[group].kv_heads
        return bool(self._seen[group][layer, 0] >= self._tokens * heads)

    def _figures(
        self, pool: PagedPool, move: Move, layer: int, index: int, skipped: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Tokens times heads, and energy and error of each part, of one layer of a move."""
        raw, views = _views(pool, move, layer)
        pieces = Format(move.layout.k_dim, move.layout.v_dim, LM4, LM4, 4).pieces
        figures = np.zeros(1 + 2 * len(Part))
        # On the pool's device: a CPU's threads would take the cores from an engine that computes.
        with as_our_error(move), raw.on_stream(views[0].device, pool.stream):
            rows = _gathered(views, move)
            figures[0] = rows[0].shape[0] * (rows[0].shape[1] - skipped)
            for part, values in enumerate(rows):
                centred = values[:, skipped:].float()
                if part == Part.K:
                    centred = centred - self._turned_mean(move, index, skipped).to(centred)
                for piece in pieces:
                    if piece.part == part:
                        columns = centred[..., piece.start : piece.start + piece.dim]
                        figures[1 + 2 * part : 3 + 2 * part] += _loss(columns)
        return figures

    def _turned_mean(self, move: Move, index: int, skipped: int) -> torch.Tensor:
        """The calibrated mean of a layer as it lies under K, ``[heads, tokens, dim]``."""
        from torch import from_numpy

        group = move.shard.group
        kv_heads = self._calibration.layout.groups[group].kv_heads
        heads = head_range(kv_heads, move.shard.head_group, self._calibration.layout.head_groups)
        first = heads.start + move.heads.shard_start
        mean = self._calibration.means[group][index, first : first + move.heads.count]
        rotary = self._calibration.rotaries[group]
        position = move.position_start + move.token_start + skipped
        count = move.token_count - skipped
        cosine, sine = rotary.turns(position, count, mean.shape[1])
        turned = mean[:, None] * cosine + rotary.partner(mean)[:, None] * sine
        return from_numpy(np.ascontiguousarray(turned, np.float32))


def _misses(row: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> bool:
    """Tell whether K or V of a layer loses clearly more than Gaussian values do."""
    energy, error = row[1::2], row[2::2]
    least_db = CODES_DB - MISSED_DB_MAX
    return any(
        10.0 * math.log10(max(signal, _TINY) / max(noise, _TINY)) < least_db
        for signal, noise in zip(energy, error, strict=True)
        if signal > 0.0
    )


def _views(pool: PagedPool, move: Move, layer: int) -> tuple[Any, list[torch.Tensor]]:
    """The kernels' package, and views of K, and of V where there is one, of one layer."""
    try:
        from kvtier_kernels import raw
    except ImportError as error:
        raise import_problem(error, "a calibration") from error
    parts = [Part.K, Part.V] if move.layout.v_dim else [Part.K]
    return raw, [pool_view(pool, move, move.pool_layer_start + layer, part) for part in parts]


def _gathered(views: list[torch.Tensor], move: Move) -> list[torch.Tensor]:
    """The move's rows of one layer, ``[heads, tokens, dim]`` for each part."""
    from kvtier_kernels import rows

    both = (views[0], views[1] if len(views) > 1 else None)
    return [part[0] for part in rows.gather([both], move_span(move))]


def _loss(values: torch.Tensor) -> tuple[float, float]:
    """Energy of rows, and of what is missing after 4 bits a value."""
    from torch import stack

    from kvtier_kernels.rotated import reference

    rows = values.reshape(-1, values.shape[-1])
    back = reference.decode(reference.encode(rows, LM4), rows.shape[1], LM4)
    sums = [values.double().square().sum() for values in (rows, back - rows)]
    energy, error = stack(sums).tolist()
    return energy, error
