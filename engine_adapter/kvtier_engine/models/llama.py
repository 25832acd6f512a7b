"""The Llama family: RMS norm, rotary embedding, grouped-query attention, gated SiLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvtier_engine.attention.paged import AttentionPlan, attend, write_kv
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.models.config import ModelConfig
from kvtier_engine.models.linear import Linear
from kvtier_engine.models.rope import Rotation, inverse_frequencies

#: ``take(name, shape)`` returns a stored tensor in the compute dtype on the compute device, or
#: raises ``ConfigError``. It may share the file's mapping, so a model copies what it keeps.
TakeTensor = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    attention_output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Weights and forward pass. Immutable after construction; holds no state of any request."""

    def __init__(self, config: ModelConfig, take: TakeTensor) -> None:
        self._config = config
        width = config.hidden_size
        self._embedding = take("model.embed_tokens.weight", (config.vocab_size, width)).clone()
        self._layers = tuple(_load_layer(config, take, i) for i in range(config.layer_count))
        self._norm = take("model.norm.weight", (width,)).clone()
        self._head = Linear(
            self._embedding
            if config.tie_word_embeddings
            else take("lm_head.weight", (config.vocab_size, width))
        )
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._frequencies = frequencies.to(self._embedding.device)

    @property
    def device(self) -> torch.device:
        """Where the weights lie and steps are computed."""
        return self._embedding.device

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        pool: KVPool,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a step's tokens, all rows flat, and return the last hidden states of some.

        ``token_ids`` and ``positions`` are int64 ``[tokens]``. ``wanted`` lists the tokens (by
        their place in the step) whose result is used, None for all; the others stop at the last
        layer's attention. The result is ``[wanted, hidden]``, normalised, ready for ``logits``.
        The KV of all tokens is written into ``pool``.
        """
        config = self._config
        kv_start = config.head_count
        scale = config.head_dim**-0.5
        hidden = self._embedding[token_ids]
        rotation = Rotation(positions, self._frequencies, hidden.dtype)
        for index, layer in enumerate(self._layers):
            normed = self._normalise(hidden, layer.attention_norm)
            heads = layer.qkv(normed).view(len(normed), -1, config.head_dim)
            rotation.apply_(heads[:, : kv_start + config.kv_heads])
            kv = pool.layer(index)
            write_kv(kv, heads[:, kv_start:], plan)
            mixed = attend(kv, heads[:, :kv_start], plan, scale)
            if wanted is not None and layer is self._layers[-1]:
                mixed, hidden = mixed[wanted], hidden[wanted]
            hidden = layer.attention_output.added_to(hidden, mixed.flatten(1))
            gate, up = layer.gate_up(self._normalise(hidden, layer.mlp_norm)).chunk(2, dim=1)
            hidden = layer.down.added_to(hidden, functional.silu(gate).mul_(up))
        return self._normalise(hidden, self._norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits ``[tokens, vocab]`` of hidden states from ``forward``."""
        return self._head(hidden).float()

    def _normalise(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._config.norm_epsilon)


def _load_layer(config: ModelConfig, take: TakeTensor, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    width, inner = config.hidden_size, config.intermediate_size
    query, kv = config.head_count * config.head_dim, config.kv_heads * config.head_dim

    def linear(*parts: tuple[str, int], inputs: int, bias: bool) -> Linear:
        """Fuse products that share their input into one, in the order given."""
        weights = [take(f"{prefix}{name}.weight", (size, inputs)) for name, size in parts]
        biases = [take(f"{prefix}{name}.bias", (size,)) for name, size in parts] if bias else []
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    return _Layer(
        attention_norm=take(prefix + "input_layernorm.weight", (width,)).clone(),
        qkv=linear(
            ("self_attn.q_proj", query),
            ("self_attn.k_proj", kv),
            ("self_attn.v_proj", kv),
            inputs=width,
            bias=config.attention_bias,
        ),
        attention_output=linear(
            ("self_attn.o_proj", width), inputs=query, bias=config.attention_bias
        ),
        mlp_norm=take(prefix + "post_attention_layernorm.weight", (width,)).clone(),
        gate_up=linear(
            ("mlp.gate_proj", inner), ("mlp.up_proj", inner), inputs=width, bias=config.mlp_bias
        ),
        down=linear(("mlp.down_proj", width), inputs=inner, bias=config.mlp_bias),
    )
