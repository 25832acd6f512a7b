"""What a cache must know of vLLM's KV: read from vLLM's own configuration, never guessed.

Whatever is not known for certain is a refusal, a sentence: then the connector switches itself off.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier.types import DTYPE_BYTES, GroupKind, KVGroup, KVLayout, Placement

#: Attention that keeps K and V side by side, K first, unchanged in each token's row.
PLAIN_BACKENDS: Final = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
# Proposals that need no model of their own, whose KV would depend on tokens yet to come.
_DRAFTLESS: Final = ("ngram", "ngram_gpu", "suffix")
# Quantisation whose scales belong to the weights.
_SCALED: Final = ("NONE", "FP8_PER_TENSOR")
# Kinds of KV that are served, by the names of vLLM's classes: kinds derived from them are not.
_FULL: Final = "FullAttentionSpec"
_WINDOW: Final = "SlidingWindowSpec"
_LAYER: Final = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


#: Tells of dtype, block's tokens, KV heads and head's size whether K alone is transposed.
Transposes = Callable[[Any, int, int, int], bool]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that have blocks in common, in the model's order.

    A token attends to ``window_tokens`` before it; 0: to all.
    """

    layer_names: tuple[str, ...]
    layers: tuple[int, ...]
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Geometry:
    """KV groups of full attention and of sliding windows, whose blocks are all alike.

    ``kv_heads`` counts all ranks together and ``rank_heads`` those of one. Of an ``opaque`` block
    only the bytes are known; in others K may be transposed, as ``cpu_blocks`` says.
    """

    groups: tuple[LayerGroup, ...]
    kv_heads: int
    rank_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    block_count: int
    tp_size: int
    opaque: bool
    cache_dtype: str
    transposed: bool = False

    def layout(self, chunk_tokens: int, head_groups: int = 0) -> KVLayout:
        """Return how chunks of this KV are cut: in so many head groups, 0 for one a rank."""
        groups = tuple(
            KVGroup(
                GroupKind.WINDOW if each.window_tokens else GroupKind.FULL,
                each.layers,
                self.kv_heads,
                self.head_dim,
                self.head_dim,
                self.dtype,
                each.window_tokens,
            )
            for each in self.groups
        )
        parts = head_groups or self.tp_size
        return KVLayout(groups, chunk_tokens=chunk_tokens, head_groups=parts)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers of all groups."""
        return tuple(name for group in self.groups for name in group.layer_names)

    @property
    def window_tokens(self) -> int:
        """The smallest window; 0 where all layers attend to all tokens."""
        return min((each.window_tokens for each in self.groups if each.window_tokens), default=0)

    @property
    def windows(self) -> tuple[int, ...]:
        """The groups' windows as vLLM counts them, with the token itself; 0: none."""
        return tuple(each.window_tokens and each.window_tokens + 1 for each in self.groups)

    @property
    def by_request(self) -> bool:
        """Whether a load counts as a whole or not at all."""
        return len(self.groups) > 1 or bool(self.window_tokens)

    def placements(self) -> tuple[Placement, ...]:
        """Return the workers that hold it, numbered by their rank."""
        return tuple(Placement(rank, rank, self.tp_size) for rank in range(self.tp_size))

    def form(self, version: str) -> str:
        """Return what makes these blocks' bytes differ from others of the same KV, if anything.

        Opaque bytes are read by the same machine's vLLM only, in blocks of the same size.
        """
        scales = "" if self.cache_dtype == "auto" else f"cache dtype {self.cache_dtype}"
        if not self.opaque:
            return scales
        from torch import cpu

        abilities = sorted(name for name, there in cpu.get_capabilities().items() if there is True)
        return (
            f"opaque blocks of {self.block_tokens} {scales}, vLLM {version}, "
            f"{platform.machine()} {' '.join(abilities)}"
        )


def read_geometry(
    vllm_config: Any, kv_cache_config: Any, *, opaque: bool, transposes: Transposes
) -> Geometry | str:
    """Return what vLLM's configuration says of its KV, or why the connector cannot serve it.

    On a CPU vLLM packs blocks as the machine's instructions like them: unless it ``transposes``
    K and does nothing else, they are opaque.
    """
    refusal = _refusal(vllm_config, kv_cache_config)
    if refusal:
        return refusal
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        return f"KV of dtype {dtype} is not supported"
    groups = _layer_groups(kv_cache_config.kv_cache_groups)
    if isinstance(groups, str):
        return groups
    parallel = vllm_config.parallel_config
    tp_size = int(parallel.tensor_parallel_size)
    kv_heads = int(vllm_config.model_config.get_total_num_kv_heads())
    if max(1, kv_heads // tp_size) != spec.num_kv_heads:
        return f"{kv_heads} KV heads on {tp_size} ranks do not make {spec.num_kv_heads} for each"
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    on_cpu = vllm_config.device_config.device_type == "cpu"
    transposed = (
        on_cpu
        and not opaque
        and cache_dtype == "auto"
        and transposes(spec.dtype, spec.block_size, spec.num_kv_heads, spec.head_size)
    )
    return Geometry(
        groups=groups,
        kv_heads=kv_heads,
        rank_heads=int(spec.num_kv_heads),
        head_dim=int(spec.head_size),
        dtype=dtype,
        block_tokens=int(spec.block_size),
        block_count=int(kv_cache_config.num_blocks),
        tp_size=tp_size,
        opaque=opaque or (on_cpu and not transposed),
        cache_dtype=cache_dtype,
        transposed=transposed,
    )


def _layer_groups(groups: Sequence[Any]) -> tuple[LayerGroup, ...] | str:
    """Return vLLM's groups in its order, or why their layers cannot be told apart."""
    everything = [name for group in groups for name in group.layer_names]
    if sort_layers(everything) is None:
        return f"the layers {everything[:3]} .. have no numbers of their own"
    found = []
    for group in groups:
        names = sort_layers(group.layer_names) or {}
        window = _window_tokens(group.kv_cache_spec)
        found.append(LayerGroup(tuple(names.values()), tuple(names), window))
    return tuple(found)


def _window_tokens(spec: Any) -> int:
    """Return how many tokens before its own a token needs blocks of; 0: all.

    vLLM counts the token itself, and may keep some more than attention needs.
    """
    if type(spec).__name__ != _WINDOW:
        return 0
    return int(spec.sliding_window) - 1 + int(getattr(spec, "extra_retained_tokens", 0))


def sort_layers(names: Sequence[str]) -> dict[int, str] | None:
    """Return layers' names by their number in the model; None unless each has one of its own."""
    numbered: dict[int, str] = {}
    for name in names:
        found = _LAYER.search(name)
        if found is None or int(found[1]) in numbered:
            return None
        numbered[int(found[1])] = name
    return dict(sorted(numbered.items()))


def _refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return why this configuration is not served; an empty text where it is."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            return f"{name} = {getattr(parallel, name)} is not supported"
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        return "ranks with a scheduler each (external_launcher) are not supported"
    if speculative is not None and speculative.method not in _DRAFTLESS:
        return f"speculative decoding by {speculative.method!r} is not supported"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "KV scales that are calculated while serving are not supported"
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not specs:
        return "a model with 0 KV cache groups is not supported"
    refusal = next(filter(None, map(_spec_refusal, specs)), "")
    if refusal:
        return refusal
    shapes = {(each.block_size, each.num_kv_heads, each.head_size, each.dtype) for each in specs}
    if len(shapes) > 1:
        return "KV cache groups whose blocks differ in size, heads or dtype are not supported"
    return ""


def _spec_refusal(spec: Any) -> str:
    """Return why layers of this kind are not served; an empty text where they are."""
    if type(spec).__name__ not in (_FULL, _WINDOW):
        return f"KV of {type(spec).__name__} is not supported"
    if type(spec).__name__ == _WINDOW and _window_tokens(spec) < 1:
        return f"a sliding window of {spec.sliding_window} tokens is not supported"
    quantised = getattr(getattr(spec, "kv_quant_mode", None), "name", _SCALED[0])
    if quantised not in _SCALED:
        return f"KV quantised by {quantised}, whose scales lie elsewhere, is not supported"
    content = getattr(spec, "state_content_bytes", None), getattr(spec, "num_head_slots", None)
    if content != (None, None) or getattr(spec, "tokens_per_state", 1) != 1:
        return "packed or compressed KV blocks are not supported"
    value_dim = getattr(spec, "head_size_v", None) or spec.head_size
    if value_dim != spec.head_size:
        return f"K of {spec.head_size} values and V of {value_dim} are not supported"
    return ""


def block_end(tokens: int, block_tokens: int) -> int:
    """Return where the last whole block before a token ends."""
    return tokens - tokens % block_tokens


def load_range(found: int, matched: int, prompt: int, block_tokens: int) -> range:
    """Return the tokens to load of a prompt of which vLLM has the first ``found``.

    Whole blocks, and at least one token of the prompt is left to compute.
    """
    end = block_end(min(matched, prompt - 1), block_tokens)
    return range(found, max(found, end))
