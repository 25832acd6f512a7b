"""Runs a model over a text and learns its calibration from KV, as a server does from traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from kvtier.cache.planner import chunk_shape, shard_writers, store_moves
from kvtier.codecs.assay import CODES_DB
from kvtier.codecs.calibration import Calibration
from kvtier.codecs.calibrator import Calibrator
from kvtier.codecs.centred import codec_for
from kvtier.codecs.raw import RawCodec
from kvtier.codecs.rope import parse_rope
from kvtier.codecs.rotated import SINK_TOKENS
from kvtier.constants import CHUNK_TOKENS_DEFAULT
from kvtier.errors import ConfigError
from kvtier.interfaces import BlockCodec
from kvtier.types import DTYPE_BYTES, Blocks, Move, Namespace, Part, Placement, Slot
from kvtier_engine.attention.paged import plan_attention
from kvtier_engine.calibration.report import Layer
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.types import RowStep
from kvtier_engine.weights.load import LoadedModel, kv_layout

WINDOW_TOKENS: Final = 4 * CHUNK_TOKENS_DEFAULT
TOKENS_MIN: Final = CHUNK_TOKENS_DEFAULT
TOKENS_MAX: Final = 1 << 20
_BLOCK_TOKENS: Final = 16
#: Nothing is packed while a calibration is learned.
_NOWHERE: Final = Slot(0, 0)

_TINY: Final = 1e-15

#: Called with the number of tokens that were just fed.
Advance = Callable[[int], None]


class Lesson:
    """One model, one text in windows: the last one is kept to look at what was learned."""

    def __init__(self, loaded: LoadedModel, text: str, tokens: int) -> None:
        """Cut the text and reserve a pool.

        Raises ``ConfigError`` for too short a text and for K that cannot be turned back.
        """
        if not TOKENS_MIN <= tokens <= TOKENS_MAX:
            raise ConfigError(f"--tokens {tokens}; allowed: {TOKENS_MIN} to {TOKENS_MAX}")
        self._loaded = loaded
        self._layout = kv_layout(loaded.config, loaded.dtype)
        self._rotary = parse_rope(loaded.rope_text).rotary_embedding()
        self._tokens = tokens
        self._windows = _windows(loaded, text, tokens)
        self._pool = self._new_pool()

    @property
    def namespace(self) -> Namespace:
        """Whose calibration it is."""
        return Namespace(self._loaded.weights_id, self._layout, rope=self._loaded.rope_text)

    @property
    def work_tokens(self) -> int:
        """Tokens that ``learn`` and ``assess`` feed together."""
        return sum(map(len, self._windows))

    @torch.inference_mode()
    def learn(self, advance: Advance) -> Calibration:
        """Feed the windows; blocks."""
        calibrator = Calibrator(self._layout, (self._rotary,), tokens=self._tokens)
        for window in self._windows[:-1]:
            self._feed(window, advance)
            for move in self._moves(len(window), RawCodec()):
                calibrator.observe(self._pool, move)
        found = calibrator.result()
        assert found is not None, f"{calibrator.tokens_seen} of {self._tokens} tokens"
        return found

    @torch.inference_mode()
    def assess(self, calibration: Calibration, advance: Advance) -> tuple[Layer, ...]:
        """Pack and unpack the KV of the last window as ``int4``; blocks."""
        window = self._windows[-1]
        self._feed(window, advance)
        count = len(window)
        blocks = count // _BLOCK_TOKENS
        codec = codec_for("int4", calibration)
        payload = memoryview(bytearray(chunk_shape(self._layout, codec, chunk=0).chunk_bytes))
        for move in self._moves(count, codec):
            codec.pack(self._pool, move, payload)
            beyond = tuple(block + blocks for block in move.block_ids)
            codec.unpack(payload, self._pool, replace(move, block_ids=beyond))
        cosine, sine = self._rotary.turns(0, count, self._loaded.config.head_dim)
        span = slice(SINK_TOKENS, count)
        layers = []
        for layer, mean in enumerate(calibration.means[0]):
            turned = mean[:, None] * cosine + self._rotary.partner(mean)[:, None] * sine
            rows = self._pool.layer(layer)
            kv, found = rows[:, :, :count][:, :, span], rows[:, :, count:][:, :, span]
            centred = kv[Part.K] - torch.from_numpy(turned[:, span]).to(kv)
            k, v = _energy(kv[Part.K]), _energy(kv[Part.V])
            left = _energy(centred)
            layers.append(
                Layer(
                    layer,
                    mean_share=1.0 - left / k,
                    k_expected_db=CODES_DB + _decibels(k, left),
                    k_db=_decibels(k, _energy(found[Part.K] - kv[Part.K])),
                    v_db=_decibels(v, _energy(found[Part.V] - kv[Part.V])),
                )
            )
        return tuple(layers)

    def _feed(self, window: Sequence[int], advance: Advance) -> None:
        """Compute the KV of a window into the pool's first blocks."""
        blocks = (tuple(range(self._pool.block_count)),)
        plan = plan_attention([RowStep(0, tuple(window), 0, blocks, sample=False)], self._pool)
        device = self._loaded.model.device
        ids = torch.tensor(window, dtype=torch.int64, device=device)
        positions = torch.arange(len(window), device=device)
        self._loaded.model.forward(ids, positions, plan, self._pool, positions[:1])
        advance(len(window))

    def _moves(self, tokens: int, codec: BlockCodec) -> Iterator[Move]:
        """What a server would store of a window."""
        blocks = Blocks(0, (tuple(range(self._pool.block_count)),), _BLOCK_TOKENS)
        for chunk in range(tokens // CHUNK_TOKENS_DEFAULT):
            shape = chunk_shape(self._layout, codec, chunk=chunk)
            writers = shard_writers(self._layout, shape, (Placement(),))
            yield from store_moves(
                self._layout, shape, writers, chunk=chunk, blocks=blocks, slots=lambda _: _NOWHERE
            )

    def _new_pool(self) -> KVPool:
        group = self._layout.groups[0]
        values = len(group.layers) * group.kv_heads * (group.k_dim + group.v_dim)
        # A window, and what comes back of one.
        tokens = 2 * len(self._windows[0])
        return KVPool(
            self._layout,
            block_tokens=_BLOCK_TOKENS,
            capacity_bytes=tokens * values * DTYPE_BYTES[group.dtype],
            device=str(self._loaded.model.device),
        )


def _windows(loaded: LoadedModel, text: str, tokens: int) -> list[tuple[int, ...]]:
    """Cut as many windows as ``tokens`` take beside the sinks, and one more."""
    begin = loaded.tokenizer.bos_id
    start = [begin] if begin is not None and loaded.tokenizer.encode("")[:1] == [begin] else []
    ids = loaded.tokenizer.encode(text, add_special_tokens=False)
    chunks = min(WINDOW_TOKENS, loaded.config.context_tokens) // CHUNK_TOKENS_DEFAULT
    size = min(chunks, -(-tokens // CHUNK_TOKENS_DEFAULT)) * CHUNK_TOKENS_DEFAULT
    if not size:
        raise ConfigError(f"the model's context is below {CHUNK_TOKENS_DEFAULT} tokens")
    count = -(-tokens // (size - SINK_TOKENS)) + 1
    taken = size - len(start)
    if len(ids) < count * taken:
        raise ConfigError(
            f"the text has {len(ids)} tokens; {count * taken} are needed: give a longer one, or "
            "fewer --tokens"
        )
    return [(*start, *ids[index * taken : (index + 1) * taken]) for index in range(count)]


def _energy(values: torch.Tensor) -> float:
    return float(values.double().square().sum())


def _decibels(signal: float, noise: float) -> float:
    """Signal to noise; without noise or signal what float32 could tell at most."""
    return 10.0 * math.log10(max(signal, _TINY) / max(noise, signal * _TINY, _TINY))
