"""Runs the model over windows of text, with KV as it is and with KV that went through codecs.

Two pools hold one window each. ``exact`` keeps KV as the model computes it, ``packed`` what a
codec makes of it. In place, a piece of tokens attends to itself as it is and to all earlier tokens
as packed; the reference is fed in the same pieces, so that a codec that loses nothing differs in
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from kvtier.constants import CHUNK_TOKENS_DEFAULT
from kvtier.errors import CodecError, ConfigError
from kvtier.interfaces import BlockCodec
from kvtier.types import Part
from kvtier_engine.attention.paged import plan_attention
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.quality.metrics import (
    BLOCK_POSITIONS,
    Positions,
    compare,
    decibels,
    joined,
    summarise,
)
from kvtier_engine.quality.results import Mode, Noise, Result, Skipped
from kvtier_engine.quality.round_trip import RoundTrip, bits_per_value
from kvtier_engine.quality.windows import Windows
from kvtier_engine.types import RowStep
from kvtier_engine.weights.load import LoadedModel, kv_layout

BLOCK_TOKENS: Final = 16
#: Tokens that are packed together in place. Fewer are nearer to what an engine does and slower.
PIECE_TOKENS: Final = 32

#: Called with the number of tokens that were just fed.
Advance = Callable[[int], None]


class Candidate:
    """A codec, its way for this model's KV, and what was seen of it, window by window."""

    def __init__(self, name: str, bits: float, trip: RoundTrip, loaded: LoadedModel) -> None:
        self.name = name
        self.bits_per_value = bits
        self.trip = trip
        self._parts: list[Positions] = []
        self._signal = torch.zeros(2, loaded.config.layer_count, dtype=torch.float64)
        self._lost = torch.zeros_like(self._signal)

    def add(self, reference: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> None:
        """Compare a window's logits ``[positions, vocab]``; ``targets`` are what follows."""
        for start in range(0, len(targets), BLOCK_POSITIONS):
            span = slice(start, start + BLOCK_POSITIONS)
            self._parts.append(compare(reference[span], found[span], targets[span]))

    def add_noise(self, exact: KVPool, packed: KVPool, tokens: int) -> None:
        """Note what the codec changed in the first ``tokens`` of a window."""
        for layer in range(self._signal.shape[1]):
            expected = exact.layer(layer)[:, :, :tokens]
            lost = packed.layer(layer)[:, :, :tokens] - expected
            self._signal[:, layer] += _energy(expected)
            self._lost[:, layer] += _energy(lost)

    def result(self) -> Result:
        """Sum up all windows."""
        k, v = (decibels(self._signal[part], self._lost[part]) for part in (Part.K, Part.V))
        return Result(self.name, self.bits_per_value, summarise(joined(self._parts)), Noise(k, v))


class Bench:
    """One model, windows of one shape, and a mode. Used from one thread; blocks."""

    def __init__(self, loaded: LoadedModel, windows: Windows, mode: Mode) -> None:
        """Reserve two pools of one window; the caller keeps the model."""
        self._loaded = loaded
        self._windows = windows
        self._mode = mode
        chunk_tokens = CHUNK_TOKENS_DEFAULT if mode is Mode.STORAGE else PIECE_TOKENS
        self._layout = kv_layout(loaded.config, loaded.dtype, chunk_tokens)
        self._exact, self._packed = self._pool(), self._pool()

    def work_tokens(self, codec_count: int) -> int:
        """Tokens that ``measure`` feeds for that many codecs."""
        windows = self._windows
        again = windows.fed_tokens
        if self._mode is Mode.STORAGE:
            again = windows.continuation_tokens
        return len(windows.token_ids) * (windows.fed_tokens + codec_count * again)

    def prepare(self, codec: BlockCodec) -> Candidate:
        """Make a codec ready; ``CodecError`` or ``LayoutError`` if it cannot carry this model."""
        bits = bits_per_value(codec, kv_layout(self._loaded.config, "bfloat16"))
        return Candidate(codec.name, bits, RoundTrip(codec, self._layout), self._loaded)

    @torch.inference_mode()
    def measure(
        self, candidates: Sequence[Candidate], advance: Advance
    ) -> tuple[list[Result], list[Skipped]]:
        """Measure codecs, in their order.

        One that refuses a value or leaves one unwritten is skipped, with its reason. Raises
        ``ConfigError`` for a model that computes no finite logits without any codec.
        """
        refused: dict[Candidate, Skipped] = {}
        for window in self._windows.token_ids:
            reference = self._logits(self._reference(window, advance))
            if not reference.isfinite().all():
                raise ConfigError("the model's own logits, from KV as it is, hold no finite values")
            targets = self._indices(window[self._windows.prefix_tokens + 1 :])
            for each in candidates:
                if each in refused:
                    continue
                try:
                    found = self._logits(self._through(each.trip, window, advance))
                    _check_finite(found)
                except CodecError as error:
                    refused[each] = Skipped(each.name, str(error))
                    continue
                each.add(reference, found, targets)
                each.add_noise(self._exact, self._packed, self._packed_tokens)
        results = [each.result() for each in candidates if each not in refused]
        return results, list(refused.values())

    @property
    def _packed_tokens(self) -> int:
        if self._mode is Mode.STORAGE:
            return self._windows.prefix_tokens
        return self._windows.fed_tokens // PIECE_TOKENS * PIECE_TOKENS

    def _reference(self, window: Sequence[int], advance: Advance) -> torch.Tensor:
        """Return hidden states of the continuation after KV as it is."""
        if self._mode is Mode.IN_PLACE:
            return self._in_pieces(None, window, advance)
        prefix = self._windows.prefix_tokens
        self._feed(self._exact, window, range(prefix), advance)
        return self._feed(self._exact, window, self._continuation, advance)

    def _through(self, trip: RoundTrip, window: Sequence[int], advance: Advance) -> torch.Tensor:
        """Return hidden states of the continuation after KV that has been through the codec."""
        if self._mode is Mode.IN_PLACE:
            return self._in_pieces(trip, window, advance)
        self._poison(range(self._windows.prefix_tokens))
        chunks = range(self._windows.prefix_tokens // CHUNK_TOKENS_DEFAULT)
        trip.run(self._exact, self._packed, chunks)
        return self._feed(self._packed, window, self._continuation, advance)

    def _in_pieces(
        self, trip: RoundTrip | None, window: Sequence[int], advance: Advance
    ) -> torch.Tensor:
        hidden: list[torch.Tensor] = []
        stop = self._windows.fed_tokens
        for start in range(0, stop, PIECE_TOKENS):
            span = range(start, min(start + PIECE_TOKENS, stop))
            found = self._feed(self._packed, window, span, advance)
            if trip is not None and len(span) == PIECE_TOKENS:
                self._keep(span)
                self._poison(span)
                piece = start // PIECE_TOKENS
                trip.run(self._exact, self._packed, range(piece, piece + 1))
            if start >= self._windows.prefix_tokens:
                hidden.append(found)
        return torch.cat(hidden)

    def _keep(self, span: range) -> None:
        """Copy a span as computed from ``packed`` to ``exact``."""
        for layer in range(self._loaded.config.layer_count):
            rows = self._packed.layer(layer)[:, :, span.start : span.stop]
            self._exact.layer(layer)[:, :, span.start : span.stop] = rows

    def _poison(self, span: range) -> None:
        """Make what a codec does not write show: a NaN spreads to all that attends to it."""
        for layer in range(self._loaded.config.layer_count):
            self._packed.layer(layer)[:, :, span.start : span.stop] = torch.nan

    @property
    def _continuation(self) -> range:
        return range(self._windows.prefix_tokens, self._windows.fed_tokens)

    def _feed(
        self, pool: KVPool, window: Sequence[int], span: range, advance: Advance
    ) -> torch.Tensor:
        """Compute a span of the window after what the pool holds of it."""
        blocks = (tuple(range(pool.block_count)),)
        ids = tuple(window[span.start : span.stop])
        plan = plan_attention([RowStep(0, ids, span.start, blocks, sample=False)], pool)
        hidden = self._loaded.model.forward(self._indices(ids), self._indices(span), plan, pool)
        advance(len(span))
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._loaded.model.logits(hidden)

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._loaded.model.device)

    def _pool(self) -> KVPool:
        group = self._layout.groups[0]
        values = len(group.layers) * group.kv_heads * (group.k_dim + group.v_dim)
        dtype: torch.dtype = getattr(torch, group.dtype)
        blocks = -(-self._windows.fed_tokens // BLOCK_TOKENS)
        return KVPool(
            self._layout,
            block_tokens=BLOCK_TOKENS,
            capacity_bytes=blocks * BLOCK_TOKENS * values * dtype.itemsize,
            device=str(self._loaded.model.device),
        )


def _check_finite(logits: torch.Tensor) -> None:
    if not logits.isfinite().all():
        raise CodecError("KV that it left unwritten or infinite reached the logits")


def _energy(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares of ``[2, heads, tokens, dim]`` per K and V."""
    return rows.double().square().sum(dim=(1, 2, 3)).cpu()
