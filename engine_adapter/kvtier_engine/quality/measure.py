"""Runs the model over windows of text, with KV as it is and with KV that went through codecs.

One pool holds a window up to three times::

    blocks   0 ........... n .......... 2 n .......... 3 n
             |--- exact ---|-- packed ---|--- fresh ---|

*Storage*: the prefix is computed once (exact) and goes through each codec (packed); the
continuation is computed after that, and writes KV as it is.

*In place*: every token reads packed KV, its own too, and what it writes depends on that. So the
whole window is computed several times: a pass reads ``packed`` and writes ``fresh``, which is
packed for the next one. Layer i is final after i passes, and all of them nearly so after a few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from kvtier.codecs.centred import stored_name
from kvtier.constants import CHUNK_TOKENS_DEFAULT
from kvtier.errors import CodecError, ConfigError
from kvtier.interfaces import BlockCodec
from kvtier.types import DTYPE_BYTES, KVLayout, Part
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
#: Passes in place. Measured with SmolLM2-135M: four give 97 % of the KL that many passes give.
PASSES: Final = 4

#: Called with the number of tokens that were just fed.
Advance = Callable[[int], None]
#: KV of one place per layer: ``[2, kv_heads, tokens, dim]``.
Rows = list[torch.Tensor]


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

    def add_noise(self, exact: Rows, packed: Rows) -> None:
        """Note what the codec has made of a window's KV, layer by layer."""
        for layer, (expected, found) in enumerate(zip(exact, packed, strict=True)):
            self._signal[:, layer] += _energy(expected)
            self._lost[:, layer] += _energy(found - expected)

    def result(self) -> Result:
        """Sum up all windows."""
        k, v = (decibels(self._signal[part], self._lost[part]) for part in (Part.K, Part.V))
        return Result(self.name, self.bits_per_value, summarise(joined(self._parts)), Noise(k, v))


class Bench:
    """One model, windows of one shape, and a mode. Used from one thread; blocks."""

    def __init__(
        self, loaded: LoadedModel, windows: Windows, mode: Mode, *, passes: int = PASSES
    ) -> None:
        """Reserve the pool; the caller keeps the model. ``passes`` counts those in place."""
        self._loaded = loaded
        self._windows = windows
        self._mode = mode
        assert passes >= 1, f"{passes} passes"
        self._passes = passes
        self._layout = kv_layout(loaded.config, loaded.dtype)
        # Whole chunks: in place, zeros are packed after the last token.
        self._chunks = range(-(-windows.fed_tokens // CHUNK_TOKENS_DEFAULT))
        count = len(self._chunks) * CHUNK_TOKENS_DEFAULT // BLOCK_TOKENS
        self._pool = _pool(self._layout, 3 * count, str(loaded.model.device))
        self._exact, self._packed, self._fresh = (
            range(start, start + count) for start in (0, count, 2 * count)
        )

    def work_tokens(self, codec_count: int) -> int:
        """Tokens that ``measure`` feeds for that many codecs."""
        windows = self._windows
        again = self._passes * windows.fed_tokens
        if self._mode is Mode.STORAGE:
            again = windows.continuation_tokens
        return len(windows.token_ids) * (windows.fed_tokens + codec_count * again)

    def prepare(self, codec: BlockCodec) -> Candidate:
        """Make a codec ready; ``CodecError`` or ``LayoutError`` if it cannot carry this model."""
        bits = bits_per_value(codec, kv_layout(self._loaded.config, "bfloat16"))
        return Candidate(
            stored_name(codec.name)[0], bits, RoundTrip(codec, self._layout), self._loaded
        )

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
                    found = self._logits(self._through(each, window, advance))
                    _check_finite(found)
                except CodecError as error:
                    refused[each] = Skipped(each.name, str(error))
                    continue
                each.add(reference, found, targets)
        results = [each.result() for each in candidates if each not in refused]
        return results, list(refused.values())

    def _reference(self, window: Sequence[int], advance: Advance) -> torch.Tensor:
        """Return hidden states of the continuation; ``exact`` then holds the window's KV."""
        prefix, fed = self._windows.prefix_tokens, self._windows.fed_tokens
        if self._mode is Mode.IN_PLACE:
            whole = self._feed(self._exact, self._exact, window, range(fed), advance)
            return whole[prefix:]
        self._feed(self._exact, self._exact, window, range(prefix), advance)
        return self._feed(self._exact, self._exact, window, range(prefix, fed), advance)

    def _through(self, each: Candidate, window: Sequence[int], advance: Advance) -> torch.Tensor:
        """Return hidden states of the continuation with KV that has been through the codec."""
        prefix, fed = self._windows.prefix_tokens, self._windows.fed_tokens
        if self._mode is Mode.STORAGE:
            chunks = range(prefix // CHUNK_TOKENS_DEFAULT)
            self._pack(each, self._exact, chunks)
            each.add_noise(*self._rows(self._exact, self._packed, prefix))
            return self._feed(self._packed, self._packed, window, range(prefix, fed), advance)
        source = self._exact
        for number in range(self._passes):
            self._pack(each, source, self._chunks)
            if number == self._passes - 1:
                each.add_noise(*self._rows(source, self._packed, fed))
            whole = self._feed(self._packed, self._fresh, window, range(fed), advance)
            source = self._fresh
        return whole[prefix:]

    def _pack(self, each: Candidate, source: range, chunks: range) -> None:
        """Send chunks from ``source`` through the codec to ``packed``."""
        # What a codec does not write shows: a NaN spreads to all that attends to it.
        for rows in self._rows(self._packed, self._packed, len(chunks) * CHUNK_TOKENS_DEFAULT)[0]:
            rows.fill_(torch.nan)
        each.trip.run(self._pool, source, self._packed, chunks)

    def _rows(self, first: range, second: range, tokens: int) -> tuple[Rows, Rows]:
        """Return views of the first ``tokens`` at two places, layer by layer."""
        layers = [self._pool.layer(index) for index in range(self._loaded.config.layer_count)]
        starts = (place.start * BLOCK_TOKENS for place in (first, second))
        one, other = ([layer[:, :, at : at + tokens] for layer in layers] for at in starts)
        return one, other

    def _feed(
        self, read: range, write: range, window: Sequence[int], span: range, advance: Advance
    ) -> torch.Tensor:
        """Compute a span of the window. Attention reads the blocks ``read``; KV goes to ``write``.

        Where these are the same, new tokens read what they have just written.
        """
        ids = tuple(window[span.start : span.stop])
        row = RowStep(0, ids, span.start, (tuple(read),), sample=False)
        plan = plan_attention([row], self._pool)
        if write != read:
            plan = replace(plan, slots=plan.slots + (write.start - read.start) * BLOCK_TOKENS)
        forward = self._loaded.model.forward
        hidden = forward(self._indices(ids), self._indices(span), plan, self._pool)
        advance(len(span))
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._loaded.model.logits(hidden)

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._loaded.model.device)


def _pool(layout: KVLayout, block_count: int, device: str) -> KVPool:
    group = layout.groups[0]
    values = len(group.layers) * group.kv_heads * (group.k_dim + group.v_dim)
    token_bytes = values * DTYPE_BYTES[group.dtype]
    return KVPool(
        layout,
        block_tokens=BLOCK_TOKENS,
        capacity_bytes=block_count * BLOCK_TOKENS * token_bytes,
        device=device,
    )


def _check_finite(logits: torch.Tensor) -> None:
    if not logits.isfinite().all():
        raise CodecError("KV that it left unwritten or infinite reached the logits")


def _energy(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares of ``[2, heads, tokens, dim]`` per K and V."""
    return rows.double().square().sum(dim=(1, 2, 3)).cpu()
