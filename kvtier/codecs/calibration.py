"""What the centred codecs know of a model: the mean of K before RoPE, and the rotary embedding.

Of K's energy before RoPE, about three quarters are one constant vector per layer and head. It is
learned from the first tokens of a model's traffic, sink tokens left out, and then never changes.

As bytes, little-endian, one form only::

    0     magic "KVTC"
    4     format version          uint32
    8     xxh3-128 of the body
    24    body                    msgpack: weak layers, then for each KV group its layers,
                                  kv_heads, k_dim, means (float32), frequencies (float64),
                                  start, interleaved, scaling
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.constants import MIB
from kvtier.errors import ConfigError, FormatError
from kvtier.layout import INDEX_MAX, head_range, stage_layer_start
from kvtier.types import KVGroup, KVLayout, ShardId, ShardLayout

FloatArray = npt.NDArray[np.float32]
AnyArray = TypeVar("AnyArray", bound=npt.NDArray[Any])

FORMAT_VERSION: Final = 1
#: The largest that is read or written: 128 layers of 128 heads of 128 values take 8 MiB.
CALIBRATION_BYTES_MAX: Final = 16 * MIB

_MAGIC: Final = b"KVTC"
_PREFIX: Final = struct.Struct("<4sI16s")


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

    def partner(self, rows: AnyArray) -> AnyArray:
        """Rows ``[..., dim]`` with the columns of each pair exchanged."""
        first, second = self.columns()
        exchanged = rows.copy()
        exchanged[..., first], exchanged[..., second] = rows[..., second], rows[..., first]
        return exchanged

    def turns(self, position_start: int, tokens: int, dim: int) -> tuple[FloatArray, FloatArray]:
        """Cosine and signed sine per column, ``[tokens, dim]``: a row turned is ``row * cosine +
        partner(row) * sine``.

        Angles are products in float32, as models compute them: at position 8000 a more exact one
        is 5e-4 off theirs. Sine and cosine of them are computed in float64, so that all hosts
        round to the same float32.
        """
        positions = np.arange(position_start, position_start + tokens).astype(np.float32)
        frequencies = np.array(self.inverse_frequencies, np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        cosine, sine = np.ones((tokens, dim)), np.zeros((tokens, dim))
        first, second = self.columns()
        cosine[:, first] = cosine[:, second] = np.cos(angles) * self.scaling
        sine[:, second] = np.sin(angles) * self.scaling
        sine[:, first] = -sine[:, second]
        return cosine.astype(np.float32), sine.astype(np.float32)

    def turns_back(
        self, position_start: int, tokens: int, dim: int
    ) -> tuple[FloatArray, FloatArray]:
        """As ``turns``, for turned rows: what they give was there before."""
        inverse = replace(self, scaling=1.0 / self.scaling)
        cosine, sine = inverse.turns(position_start, tokens, dim)
        return cosine, -sine


@dataclass(frozen=True)
class Calibration:
    """Means of K before RoPE of all layers and heads of a model, and how K is turned.

    For each group of ``layout``, ``means`` has a finite float32 array ``[layers, kv_heads,
    k_dim]``, the layers in the group's order, and ``rotaries`` its rotary embedding. The layout
    says which of it a shard needs; the digest is of the model's, however it is cut. Of
    ``weak_layers``, ascending, a codec with these means was seen to lose more than it should.
    Raises ``ConfigError`` for what does not fit. Arrays are borrowed, and never change.
    """

    layout: KVLayout
    means: tuple[FloatArray, ...]
    rotaries: tuple[Rotary, ...]
    weak_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.layout.groups) == len(self.means) == len(self.rotaries):
            raise ConfigError("a calibration has one mean and one rotary embedding per KV group")
        for index, group in enumerate(self.layout.groups):
            _check(index, group, self.means[index], self.rotaries[index])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes, in hex: the calibration's id in headers."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The bytes that ``parse_calibration`` reads; equal for equal calibrations."""
        groups = [
            (
                group.layers,
                group.kv_heads,
                group.k_dim,
                np.ascontiguousarray(mean, dtype="<f4").tobytes(),
                np.array(rotary.inverse_frequencies, "<f8").tobytes(),
                rotary.start,
                rotary.interleaved,
                float(rotary.scaling),
            )
            for group, mean, rotary in zip(
                self.layout.groups, self.means, self.rotaries, strict=True
            )
        ]
        body: bytes = msgpack.packb((self.weak_layers, groups))
        return _PREFIX.pack(_MAGIC, FORMAT_VERSION, xxhash.xxh3_128_digest(body)) + body

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
    numbers = np.array([*rotary.inverse_frequencies, rotary.scaling])
    if not np.isfinite(numbers).all() or rotary.scaling <= 0:
        raise ConfigError(f"rotaries[{index}] does not turn: {rotary}")


def parse_calibration(data: bytes, layout: KVLayout) -> Calibration:
    """Read a calibration's bytes for a deployment's layout, which says how the model is cut.

    Raises ``FormatError`` for damaged bytes and other versions, and ``ConfigError`` for means of
    another model's layers, heads or dims.
    """
    if not _PREFIX.size < len(data) <= CALIBRATION_BYTES_MAX:
        raise FormatError(f"calibration: {len(data)} bytes; allowed: {CALIBRATION_BYTES_MAX}")
    magic, version, checksum = _PREFIX.unpack_from(data)
    body = data[_PREFIX.size :]
    if magic != _MAGIC or xxhash.xxh3_128_digest(body) != checksum:
        raise FormatError("calibration: damaged, or no calibration")
    if version != FORMAT_VERSION:
        raise FormatError(
            f"calibration: format version is {version}; this build reads {FORMAT_VERSION}"
        )
    try:
        weak_layers, groups = msgpack.unpackb(body, max_array_len=INDEX_MAX, max_map_len=0)
        found = [_parse_group(*group) for group in groups]
        weak = tuple(map(int, weak_layers))
    except (TypeError, ValueError, OverflowError, msgpack.UnpackException) as error:
        raise FormatError(f"calibration: not what it should be: {error}") from error
    if [layers for layers, _, _ in found] != [group.layers for group in layout.groups]:
        raise ConfigError("the calibration is of a model with other layers or KV groups")
    return Calibration(
        layout, tuple(mean for _, mean, _ in found), tuple(rotary for *_, rotary in found), weak
    )


def _parse_group(
    layers: list[int],
    kv_heads: int,
    k_dim: int,
    mean: bytes,
    frequencies: bytes,
    start: int,
    interleaved: Any,
    scaling: Any,
) -> tuple[tuple[int, ...], FloatArray, Rotary]:
    means = np.frombuffer(mean, "<f4").reshape(len(layers), kv_heads, k_dim)
    pairs = tuple(np.frombuffer(frequencies, "<f8").tolist())
    rotary = Rotary(pairs, int(start), bool(interleaved), float(scaling))
    return tuple(map(int, layers)), means.astype(np.float32, copy=False), rotary
