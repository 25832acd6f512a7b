"""What a model is, read from a Hugging Face ``config.json``: sizes, rotary embedding, dtype.

Everything is checked here, once: a value that this engine would silently compute differently is a
``ConfigError`` that names the key, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.errors import ConfigError

ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding (Su et al., 2021), half-split form, over the whole head.

    ``linear`` divides all frequencies by ``factor``; ``llama3`` divides the low ones, keeps the
    high ones and blends between (Llama 3.1 model card).
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder-only transformer. ``dtype`` is that of the stored weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: RopeConfig
    context_tokens: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"

    @property
    def rope_text(self) -> str:
        """Canonical text of the rotary embedding; two models share KV only where it is equal."""
        rope = self.rope
        text = f"kind={rope.kind};layout=half;dim={self.head_dim};theta={rope.theta!r}"
        if rope.kind != "default":
            text += f";factor={rope.factor!r}"
        if rope.kind == "llama3":
            text += f";low={rope.low_freq_factor!r};high={rope.high_freq_factor!r}"
            text += f";original={rope.original_context_tokens}"
        return text


class _Fields:
    """A ``config.json`` whose values are read with a type check and a named error."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self._origin = origin

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def error(self, name: str, allowed: str) -> ConfigError:
        return ConfigError(
            f"{self._origin}: {name} = {self._values.get(name)!r}; allowed: {allowed}"
        )

    def count(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "an integer of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise self.error(name, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false")
        return bool(value)


def parse_config(values: Mapping[str, Any], origin: str) -> ModelConfig:
    """Read a ``config.json``; ``origin`` names it in errors.

    Raises ``ConfigError`` for a missing or impossible size and for every feature that would change
    the result and is not supported. The architecture's name is taken as it stands: the registry
    says which are known.
    """
    fields = _Fields(values, origin)
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", "a list of one name")
    if fields.get("hidden_act") not in {None, "silu"}:
        raise fields.error("hidden_act", "silu")
    hidden_size, head_count = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", head_count)
    if head_count % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of {head_count} heads")
    head_dim = fields.count("head_dim", hidden_size // head_count)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    context_tokens = fields.count("max_position_embeddings")
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    return ModelConfig(
        architecture=names[0],
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        layer_count=fields.count("num_hidden_layers"),
        head_count=head_count,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        rope=_parse_rope(values, origin, context_tokens),
        context_tokens=context_tokens,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        dtype=str(dtype),
    )


def _parse_rope(values: Mapping[str, Any], origin: str, context_tokens: int) -> RopeConfig:
    """Read both spellings: ``rope_parameters`` (new) and ``rope_theta`` + ``rope_scaling``."""
    merged: dict[str, Any] = {"rope_theta": values.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        nested = values.get(name)
        if nested is not None and not isinstance(nested, Mapping):
            raise ConfigError(f"{origin}: {name} = {nested!r}; allowed: an object or null")
        merged.update(nested or {})
    fields = _Fields(merged, f"{origin}: rope")
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"{origin}: rope_type = {kind!r}; allowed: {', '.join(ROPE_KINDS)}")
    merged.setdefault("partial_rotary_factor", values.get("partial_rotary_factor"))
    if merged["partial_rotary_factor"] not in {None, 1.0}:
        raise fields.error("partial_rotary_factor", "1.0")
    theta = fields.number("rope_theta", 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = fields.number("factor")
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_context_tokens=fields.count("original_max_position_embeddings", context_tokens),
    )
