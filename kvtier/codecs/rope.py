"""From a model's rotary embedding, as a text or as its ``config.json``, to how K is turned.

The text is the one that stands in a namespace::

    kind=llama3;layout=half;dim=128;theta=500000.0;factor=8.0;low=1.0;high=4.0;original=8192

``rotary`` (how many columns turn, all of ``dim`` unless said) and ``start`` (where they begin)
may follow ``dim``. Whatever depends on more than a token's position, or is not known, is refused:
un-turned in a wrong way, K has no mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvtier.codecs.calibration import FloatArray, Rotary
from kvtier.errors import ConfigError
from kvtier.layout import DIM_MAX

#: What stands in the text behind the embedding's size, by kind, in this order.
_TERMS: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low", "high", "original"),
    "yarn": ("factor", "original", "fast", "slow", "attention", "truncate"),
}
_TEXT_LENGTH_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class _Family:
    """What the configs of a model type leave unsaid."""

    interleaved: bool = False
    partial: float = 1.0
    theta: float = 10_000.0


#: Model types whose every layer turns K in one and the same way.
_FAMILIES: Final[dict[str, _Family]] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2"),
            *("granite", "olmo", "olmo2", "starcoder2", "phi3"),
        ),
        _Family(),
    ),
    "mixtral": _Family(theta=1_000_000.0),
    "gpt_neox": _Family(partial=0.25),
    "phi": _Family(partial=0.5),
    "stablelm": _Family(partial=0.25),
    "cohere": _Family(interleaved=True, theta=500_000.0),
    "glm": _Family(interleaved=True, partial=0.5),
    # These say how many columns turn in numbers, or nothing that is known here.
    "gptj": _Family(interleaved=True, partial=0.0),
    "codegen": _Family(interleaved=True, partial=0.0),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding's parameters (Su et al., arXiv 2104.09864).

    Of a row of ``dim`` values, ``rotary`` turn, from column ``start`` on. ``linear`` divides all
    frequencies by ``factor``; ``llama3`` only the low ones, with a blend between (Llama 3.1 model
    card); ``yarn`` likewise (Peng et al., arXiv 2309.00071), and K grows by ``attention``.
    """

    dim: int
    rotary: int
    start: int = 0
    kind: str = "default"
    interleaved: bool = False
    theta: float = 10_000.0
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    fast: float = 32.0
    slow: float = 1.0
    attention: float = 1.0
    truncate: int = 1

    def __post_init__(self) -> None:
        if self.kind not in _TERMS:
            raise ConfigError(f"rope kind {self.kind!r} is not one of {', '.join(_TERMS)}")
        numbers = (self.theta, self.factor, self.low, self.high, self.original, self.fast)
        if not all(0 < each < math.inf for each in (*numbers, self.slow, self.attention)):
            raise ConfigError(f"rope: a number that is not above 0: {self}")
        if not 0 <= self.start < self.start + self.rotary <= self.dim <= DIM_MAX:
            raise ConfigError(f"rope turns columns beyond {self.dim}: {self}")
        if self.rotary % 2 or self.high <= self.low or self.theta == 1:
            raise ConfigError(f"rope with parameters that no model has: {self}")

    @property
    def text(self) -> str:
        """The canonical text: equal for equal embeddings and for no others."""
        text = f"kind={self.kind};layout={'interleaved' if self.interleaved else 'half'}"
        text += f";dim={self.dim}"
        if self.rotary != self.dim:
            text += f";rotary={self.rotary}"
        if self.start:
            text += f";start={self.start}"
        terms = [f"{name}={getattr(self, name)!r}" for name in ("theta", *_TERMS[self.kind])]
        return ";".join([text, *terms])

    def rotary_embedding(self) -> Rotary:
        """How K is turned. Frequencies are computed in float32, as models do."""
        frequencies = _plain(self)
        if self.kind == "linear":
            frequencies /= np.float32(self.factor)
        elif self.kind == "llama3":
            frequencies = _llama3(self, frequencies)
        elif self.kind == "yarn":
            frequencies = _yarn(self, frequencies)
        scaling = self.attention if self.kind == "yarn" else 1.0
        return Rotary(tuple(map(float, frequencies)), self.start, self.interleaved, scaling)


def parse_rope(text: str) -> Rope:
    """Read a canonical text. Raises ``ConfigError`` for any other and for what is not known."""
    if len(text) > _TEXT_LENGTH_MAX:
        raise ConfigError(f"a rope text of {len(text)} characters")
    terms = dict(part.partition("=")[::2] for part in text.split(";"))
    kind, layout = terms.pop("kind", ""), terms.pop("layout", "")
    integers = {"dim", "rotary", "start", "original", "truncate"}
    try:
        numbers: dict[str, Any] = {
            name: int(value) if name in integers else float(value) for name, value in terms.items()
        }
        numbers.setdefault("rotary", numbers.get("dim"))
        rope = Rope(kind=kind, interleaved=layout == "interleaved", **numbers)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"no rope text: {text!r}") from error
    if rope.text != text:
        raise ConfigError(f"rope text {text!r}; canonical is {rope.text!r}")
    return rope


def rope_of_config(values: Mapping[str, Any]) -> Rope:
    """Read a Hugging Face ``config.json``, in the spelling of any release.

    Raises ``ConfigError`` for model types and kinds whose turning is not known here.
    """
    family = _FAMILIES.get(str(values.get("model_type")))
    if family is None:
        raise ConfigError(f"how model type {values.get('model_type')!r} turns K is not known")
    params = {"rope_theta": values.get("rope_theta") or values.get("rotary_emb_base")}
    for name in ("rope_scaling", "rope_parameters"):
        given = values.get(name) or {}
        if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
            raise ConfigError(f"{name} = {given!r}: one embedding for all layers is expected")
        params.update(given)
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in _TERMS or params.get("mrope_section"):
        raise ConfigError(f"rope kind {kind!r} with {sorted(params)} is not supported")
    fields = _Numbers(params)
    dim = _head_dim(values)
    partial = next(
        (
            float(found)
            for found in (
                params.get("partial_rotary_factor"),
                values.get("partial_rotary_factor"),
                values.get("rotary_pct"),
            )
            if found is not None
        ),
        family.partial,
    )
    return Rope(
        dim=dim,
        rotary=int(values.get("rotary_dim") or dim * partial),
        kind=kind,
        interleaved=family.interleaved,
        theta=fields.number("rope_theta", family.theta),
        **_scaling(kind, fields, values),
    )


class _Numbers:
    """Parameters that are read with a type check and a named error."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params

    def number(self, name: str, default: float | None = None) -> float:
        value = self._params.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"rope: {name} = {value!r}; allowed: a number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._params.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"rope: {name} = {value!r}; allowed: true or false")
        return default if value is None else value

    def says(self, name: str) -> bool:
        return self._params.get(name) is not None


def _head_dim(values: Mapping[str, Any]) -> int:
    sizes = _Numbers(values)
    if sizes.says("head_dim"):
        return int(sizes.number("head_dim"))
    width, heads = ("n_embd", "n_head") if sizes.says("n_embd") else ("hidden_size", "")
    return int(sizes.number(width) // max(1, sizes.number(heads or "num_attention_heads")))


def _scaling(kind: str, fields: _Numbers, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``Rope`` that a kind has beyond the plain embedding."""
    if kind == "default":
        return {}
    if kind == "linear":
        return {"factor": fields.number("factor")}
    original = values.get("original_max_position_embeddings") or fields.number(
        "original_max_position_embeddings", values.get("max_position_embeddings")
    )
    scaling: dict[str, Any] = {"factor": fields.number("factor"), "original": int(original)}
    if kind == "llama3":
        scaling["low"] = fields.number("low_freq_factor")
        scaling["high"] = fields.number("high_freq_factor")
        return scaling
    scaling["fast"] = fields.number("beta_fast", 32.0)
    scaling["slow"] = fields.number("beta_slow", 1.0)
    scaling["truncate"] = int(fields.flag("truncate", default=True))
    scaling["attention"] = _attention(fields, scaling["factor"])
    return scaling


def _attention(fields: _Numbers, factor: float) -> float:
    """By how much YaRN makes cosine and sine larger."""
    if fields.says("attention_factor"):
        return fields.number("attention_factor")

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = (fields.number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
    return grown(above) / grown(below) if above and below else grown(1.0)


def _plain(rope: Rope) -> FloatArray:
    """Radians per token of each pair: every step is rounded to float32."""
    exponents = np.arange(0, rope.rotary, 2, dtype=np.float32) / np.float32(max(rope.rotary, 1))
    powers = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    plain: FloatArray = np.float32(1.0) / powers
    return plain


def _llama3(rope: Rope, plain: FloatArray) -> FloatArray:
    """Keep what turns more than ``high`` times within the original context, divide what turns
    less than ``low`` times, and blend in between.
    """
    waves = np.float32(2 * math.pi) / plain
    turns = np.float32(rope.original) / waves
    slowed = plain / np.float32(rope.factor)
    share = (turns - np.float32(rope.low)) / np.float32(rope.high - rope.low)
    blended = (1 - share) * plain / np.float32(rope.factor) + share * plain
    found = np.where(waves > rope.original / rope.low, slowed, blended)
    return np.where(waves < rope.original / rope.high, plain, found)


def _yarn(rope: Rope, plain: FloatArray) -> FloatArray:
    """Between the pairs that turn ``fast`` and ``slow`` times within the original context, go
    from the plain frequency to that divided by ``factor``.
    """

    def pair_that_turns(times: float) -> float:
        waves = rope.original / (times * 2 * math.pi)
        return rope.rotary * math.log(waves) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.fast), pair_that_turns(rope.slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary - 1)
    pairs = np.arange(len(plain), dtype=np.float32)
    # Equal ends are a step; a step's width is what models take.
    width = last - first or 0.001
    ramp = np.clip((pairs - np.float32(first)) / np.float32(width), 0, 1).astype(np.float32)
    kept = 1 - ramp
    slowed = np.float32(1.0) / (np.float32(rope.factor) * (np.float32(1.0) / plain))
    mixed: FloatArray = slowed * (1 - kept) + plain * kept
    return mixed
