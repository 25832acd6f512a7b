"""What a chunk of KV weighs and what it costs to compute, by model and codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtier.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense transformer's figures that sizes and costs follow from.

    ``parameters`` are those that a token passes through (of a mixture of experts: the active
    ones).
    """

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers of K and V that one token leaves behind."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def prefill_flops(self, start: float, tokens: float) -> float:
        """Return what computing ``tokens`` tokens from position ``start`` costs.

        Two operations per parameter and token, and four per layer, head dimension and token of
        context for attention.
        """
        per_context_token = 4.0 * self.layers * self.heads * self.head_dim
        context = start + tokens / 2.0
        return tokens * (2.0 * self.parameters + per_context_token * context)


MODEL_SHAPES: Final = {
    "llama-3.1-8b": ModelShape(8.03e9, 32, 32, 8, 128),
    "llama-3.1-70b": ModelShape(70.6e9, 80, 64, 8, 128),
    "qwen3-4b": ModelShape(4.02e9, 36, 32, 8, 128),
    "qwen3-8b": ModelShape(8.19e9, 36, 32, 8, 128),
    "qwen3-32b": ModelShape(32.8e9, 64, 64, 8, 128),
    "mistral-7b": ModelShape(7.25e9, 32, 32, 8, 128),
    "smollm2-135m": ModelShape(0.1345e9, 30, 9, 3, 64),
}

#: Bytes per number of K and V, scales included. ``raw`` is a bfloat16 pool.
CODEC_BYTES: Final = {
    "raw": 2.0,
    "lossless": 1.5625,
    "fp8": 1.0,
    "int8": 1.015625,
    "int6": 0.765625,
    "int5k4v": 0.578125,
    "int5k4v-c": 0.578125,
    "int4": 0.53125,
}


def model_shape(name: str) -> ModelShape:
    """Return a model's shape; ``ConfigError`` for a name that is not known."""
    shape = MODEL_SHAPES.get(name)
    if shape is None:
        raise ConfigError(
            f"no model shape {name!r}{nearest(name, MODEL_SHAPES)}; known: "
            + ", ".join(MODEL_SHAPES)
        )
    return shape


def chunk_bytes(shape: ModelShape, codec: str, chunk_tokens: int) -> float:
    """Return the bytes of one chunk; ``ConfigError`` for a codec that is not known."""
    per_number = CODEC_BYTES.get(codec)
    if per_number is None:
        raise ConfigError(
            f"no codec {codec!r}{nearest(codec, CODEC_BYTES)}; known: " + ", ".join(CODEC_BYTES)
        )
    return shape.kv_elements_per_token * per_number * chunk_tokens
