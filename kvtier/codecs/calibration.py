"""What the centred codecs know of a model: the mean of K before RoPE, and the rotary embedding.

Of K's energy before RoPE, about three quarters are one constant vector per layer and head. It is
learned from the first tokens of a model's traffic, sink tokens left out, and then never changes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.layout import head_range, stage_layer_start
from kvtier.types import KVGroup, KVLayout, ShardId, ShardLayout

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary embedding: pair i turns by ``position * inverse_frequencies[i]``.

    Its columns begin at ``start``. Pairs are (i, i + half) of them, or (2i, 2i + 1) if
    ``interleaved``. ``scaling`` multiplies cosine and sine (YaRN's attention factor).
    """

    inverse_frequencies: tuple[float, ...]
    start: int = 0
    interleaved: bool = False
    scaling: float = 1.0

    def columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first and the second column of each pair."""
        pairs = np.arange(len(self.inverse_frequencies), dtype=np.int64)
        if self.interleaved:
            return self.start + 2 * pairs, self.start + 2 * pairs + 1
        return self.start + pairs, self.start + len(pairs) + pairs

    def partner(self, rows: FloatArray) -> FloatArray:
        """Rows ``[..., dim]`` with the columns of each pair exchanged."""
        first, second = self.columns()
        exchanged = rows.copy()
        exchanged[..., first], exchanged[..., second] = rows[..., second], rows[..., first]
        return exchanged

    def turns(self, position_start: int, tokens: int, dim: int) -> tuple[FloatArray, FloatArray]:
        """Cosine and signed sine per column, ``[tokens, dim]``: a row turned is ``row * cosine +
        partner(row) * sine``. Computed in float64, so that all hosts round to the same float32.
        """
        positions = np.arange(position_start, position_start + tokens, dtype=np.float64)
        angles = positions[:, None] * np.array(self.inverse_frequencies, np.float64)
        cosine, sine = np.ones((tokens, dim)), np.zeros((tokens, dim))
        first, second = self.columns()
        cosine[:, first] = cosine[:, second] = np.cos(angles) * self.scaling
        sine[:, second] = np.sin(angles) * self.scaling
        sine[:, first] = -sine[:, second]
        return cosine.astype(np.float32), sine.astype(np.float32)


@dataclass(frozen=True)
class Calibration:
    """Means of K before RoPE of all layers and heads of a model, and how K is turned.

    For each group of ``layout``, ``means`` has a finite float32 array ``[layers, kv_heads,
    k_dim]``, the layers in the group's order, and ``rotaries`` its rotary embedding. The layout
    says which of it a shard needs; the digest is of the model's, however it is cut. Raises
    ``ConfigError`` for what does not fit. Arrays are borrowed, and never change.
    """

    layout: KVLayout
    means: tuple[FloatArray, ...]
    rotaries: tuple[Rotary, ...]

    def __post_init__(self) -> None:
        if not len(self.layout.groups) == len(self.means) == len(self.rotaries):
            raise ConfigError("a calibration has one mean and one rotary embedding per KV group")
        for index, group in enumerate(self.layout.groups):
            _check(index, group, self.means[index], self.rotaries[index])

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all means and embeddings, in hex: the calibration's id in headers."""
        summed = hashlib.sha256()
        for mean, rotary in zip(self.means, self.rotaries, strict=True):
            summed.update(repr((mean.shape, rotary)).encode())
            summed.update(np.ascontiguousarray(mean, dtype="<f4").tobytes())
        return summed.hexdigest()

    def mean(self, shard: ShardId, layout: ShardLayout) -> FloatArray:
        """The means of a shard's layers and heads: ``[layers, kv_heads, k_dim]``, a view."""
        group = self.layout.groups[shard.group]
        start = stage_layer_start(self.layout, shard.group, shard.stage)
        heads = head_range(group.kv_heads, shard.head_group, self.layout.head_groups)
        layers = slice(start, start + layout.layers)
        return self.means[shard.group][layers, heads.start : heads.stop]


def _check(index: int, group: KVGroup, mean: FloatArray, rotary: Rotary) -> None:
    shape = (len(group.layers), group.kv_heads, group.k_dim)
    if mean.shape != shape or mean.dtype != np.float32:
        raise ConfigError(f"means[{index}] is {mean.dtype} {mean.shape}, not float32 {shape}")
    if not np.isfinite(mean).all():
        raise ConfigError(f"means[{index}] holds a NaN or an infinity")
    end = rotary.start + 2 * len(rotary.inverse_frequencies)
    if rotary.start < 0 or end > group.k_dim:
        raise ConfigError(f"rotaries[{index}] turns columns beyond {group.k_dim}: up to {end}")
