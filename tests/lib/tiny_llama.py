"""A Llama small enough to write to disk in a test, and what it must compute, spelled out.

``reference_logits`` is the oracle: whole sequences, double precision, no cache, one loop per head.
That shares nothing with the engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from kvtier_engine.attention.paged import plan_attention
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.types import RowStep
from kvtier_engine.weights.load import LoadedModel, kv_layout

Tensors = dict[str, torch.Tensor]

SPECIAL_TOKENS = ("<|end|>", "<|user|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>{% endif %}"
)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json``: three layers, six heads over two KV heads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "tie_word_embeddings": False,
        "eos_token_id": 256,
    } | changes


def tiny_tensors(config: dict[str, Any], seed: int = 7) -> Tensors:
    """Random weights, large enough that every token and position matters to the result."""
    generator = torch.Generator().manual_seed(seed)
    width, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 1.5 / math.sqrt(shape[-1])

    tensors = {
        "model.embed_tokens.weight": draw(config["vocab_size"], width) * 4,
        "model.norm.weight": 1 + draw(width),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = draw(config["vocab_size"], width)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        tensors[f"{prefix}input_layernorm.weight"] = 1 + draw(width)
        tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + draw(width)
        for name, outputs, inputs, flag in (
            ("self_attn.q_proj", query, width, "attention_bias"),
            ("self_attn.k_proj", kv, width, "attention_bias"),
            ("self_attn.v_proj", kv, width, "attention_bias"),
            ("self_attn.o_proj", width, query, "attention_bias"),
            ("mlp.gate_proj", inner, width, "mlp_bias"),
            ("mlp.up_proj", inner, width, "mlp_bias"),
            ("mlp.down_proj", width, inner, "mlp_bias"),
        ):
            tensors[f"{prefix}{name}.weight"] = draw(outputs, inputs)
            if config.get(flag):
                tensors[f"{prefix}{name}.bias"] = draw(outputs)
    return tensors


def tiny_tokenizer() -> Tokenizer:
    """One token per byte, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Write a Hugging Face folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>"})
    )
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rope_frequencies(config: dict[str, Any]) -> list[float]:
    """Radians per token of each pair of dimensions, for the three kinds of scaling."""
    dim, theta = config["head_dim"], config["rope_theta"]
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    result = []
    for pair in range(dim // 2):
        frequency = 1.0 / theta ** (2 * pair / dim)
        if scaling["rope_type"] == "linear":
            frequency /= scaling["factor"]
        if scaling["rope_type"] == "llama3":
            original = scaling["original_max_position_embeddings"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            wavelength = 2 * math.pi / frequency
            if wavelength > original / low:
                frequency /= scaling["factor"]
            elif wavelength >= original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        result.append(frequency)
    return result


def reference_logits(
    config: dict[str, Any],
    tensors: Tensors,
    ids: list[int],
    change_kv: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> torch.Tensor:
    """Logits ``[tokens, vocab]`` of a whole sequence, float64.

    ``change_kv`` is done to every key (after its rotation) and value before attention reads it.
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    hidden = weights["model.embed_tokens.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        normed = _norm(config, hidden, weights[f"{prefix}input_layernorm.weight"])
        hidden = hidden + _attention(config, weights, f"{prefix}self_attn.", normed, change_kv)
        normed = _norm(config, hidden, weights[f"{prefix}post_attention_layernorm.weight"])
        gate = _linear(weights, f"{prefix}mlp.gate_proj", normed)
        up = _linear(weights, f"{prefix}mlp.up_proj", normed)
        mixed = gate / (1 + torch.exp(-gate)) * up
        hidden = hidden + _linear(weights, f"{prefix}mlp.down_proj", mixed)
    normed = _norm(config, hidden, weights["model.norm.weight"])
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return normed @ head.T


def reference_tokens(
    config: dict[str, Any], tensors: Tensors, prompt: tuple[int, ...], count: int
) -> list[int]:
    """The greedy continuation, each token from the whole sequence before it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(reference_logits(config, tensors, ids)[-1].argmax()))
    return ids[len(prompt) :]


def assert_computes(loaded: LoadedModel, config: dict[str, Any], tensors: Tensors) -> None:
    """Check that a loaded model's logits are the reference's."""
    ids = [(index * 37 + 11) % 251 for index in range(40)]
    layout = kv_layout(loaded.config, loaded.dtype)
    pool = KVPool(layout, block_tokens=16, capacity_bytes=1 << 20)
    row = RowStep(0, tuple(ids), 0, (tuple(range(8)),), sample=True)
    plan = plan_attention([row], pool)
    with torch.inference_mode():
        hidden = loaded.model.forward(torch.tensor(ids), torch.arange(len(ids)), plan, pool)
        logits = loaded.model.logits(hidden)
    expected = reference_logits(config, tensors, ids).float()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def _linear(weights: Tensors, name: str, inputs: torch.Tensor) -> torch.Tensor:
    product = inputs @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return product if bias is None else product + bias


def _norm(config: dict[str, Any], hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    mean_square = (hidden**2).mean(dim=-1, keepdim=True)
    return hidden / torch.sqrt(mean_square + config["rms_norm_eps"]) * weight


def _rotate(config: dict[str, Any], head: torch.Tensor) -> torch.Tensor:
    half = config["head_dim"] // 2
    frequencies = torch.tensor(rope_frequencies(config), dtype=torch.float64)
    angles = torch.arange(len(head), dtype=torch.float64)[:, None] * frequencies
    first, second = head[:, :half], head[:, half:]
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        dim=1,
    )


def _attention(
    config: dict[str, Any],
    weights: Tensors,
    prefix: str,
    normed: torch.Tensor,
    change_kv: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    dim, heads = config["head_dim"], config["num_attention_heads"]
    group = heads // config["num_key_value_heads"]
    query = _linear(weights, f"{prefix}q_proj", normed)
    key = _linear(weights, f"{prefix}k_proj", normed)
    value = _linear(weights, f"{prefix}v_proj", normed)
    outputs = []
    for head in range(heads):
        own = slice(head * dim, (head + 1) * dim)
        shared = slice(head // group * dim, (head // group + 1) * dim)
        scores = _rotate(config, query[:, own]) @ change_kv(_rotate(config, key[:, shared])).T
        scores = scores / math.sqrt(dim)
        future = torch.ones(len(normed), len(normed), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
        outputs.append(scores.softmax(dim=-1) @ change_kv(value[:, shared]))
    return _linear(weights, f"{prefix}o_proj", torch.cat(outputs, dim=1))
