"""Rotary embeddings from texts and configs, against those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from kvtier.codecs.rope import Rope, parse_rope, rope_of_config
from kvtier.errors import ConfigError
from kvtier_engine.models.config import parse_config

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "default": LLAMA,
    "linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {**LLAMA, "rope_scaling": LLAMA3},
    "yarn": {**LLAMA, "rope_scaling": YARN},
    "yarn-untruncated": {**LLAMA, "rope_scaling": {**YARN, "truncate": False, "beta_fast": 16.0}},
    "yarn-attention": {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.25}},
    "yarn-mscale": {**LLAMA, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "new-spelling": {
        **{k: v for k, v in LLAMA.items() if k != "rope_theta"},
        "model_type": "qwen3",
        "head_dim": 96,
        "rope_parameters": {**LLAMA3, "rope_theta": 1e6},
    },
    "partial": {**SIZES, "model_type": "phi", "rope_theta": 10_000.0},
    "gpt-neox": {**SIZES, "model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10_000},
    "gpt-j": {
        "model_type": "gptj",
        "n_embd": 256,
        "n_head": 4,
        "n_layer": 1,
        "rotary_dim": 32,
        "n_positions": 131_072,
    },
    "interleaved": {**SIZES, "model_type": "cohere", "rope_theta": 8_000_000.0},
}


def rows(tokens: int, dim: int) -> torch.Tensor:
    return torch.randn((1, 2, tokens, dim), generator=torch.Generator().manual_seed(5))


def turned_by_transformers(values: dict[str, Any], keys: torch.Tensor, start: int) -> torch.Tensor:
    """What the model's own code makes of K ``[1, heads, tokens, dim]``."""
    import importlib

    config: PreTrainedConfig = AutoConfig.for_model(**values)
    kind = values["model_type"]
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    ids = torch.arange(start, start + keys.shape[2])[None]
    if kind == "gptj":
        sine, cosine = module.GPTJRotaryEmbedding(config)(keys, ids)
        by_token = keys.transpose(1, 2)
        width = config.rotary_dim
        first = module.apply_rotary_pos_emb(by_token[..., :width], sine, cosine)
        return torch.cat([first, by_token[..., width:]], -1).transpose(1, 2)
    names = {"gpt_neox": "GPTNeoXRotaryEmbedding"}
    embedding = getattr(module, names.get(kind, f"{kind.capitalize()}RotaryEmbedding"))
    cosine, sine = embedding(config)(keys, ids)
    width = 2 * (cosine.shape[-1] // 2)
    found, _ = module.apply_rotary_pos_emb(keys[..., :width], keys[..., :width], cosine, sine)
    return torch.cat([found, keys[..., width:]], -1)


@pytest.mark.parametrize("start", [0, 1200, 100_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_k_is_turned_as_transformers_turns_it_and_back(name: str, start: int) -> None:
    rope = rope_of_config(CONFIGS[name])
    keys = rows(300, rope.dim)
    theirs = turned_by_transformers(CONFIGS[name], keys, start)[0].numpy()
    rotary = rope.rotary_embedding()
    ours = keys[0].numpy()
    cosine, sine = rotary.turns(start, 300, rope.dim)
    np.testing.assert_allclose(ours * cosine + rotary.partner(ours) * sine, theirs, atol=2e-6)
    cosine, sine = rotary.turns_back(start, 300, rope.dim)
    np.testing.assert_allclose(theirs * cosine + rotary.partner(theirs) * sine, ours, atol=2e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_says_all_of_an_embedding(name: str) -> None:
    rope = rope_of_config(CONFIGS[name])
    assert parse_rope(rope.text) == rope
    assert parse_rope(rope.text).rotary_embedding() == rope.rotary_embedding()


@pytest.mark.parametrize("name", ["default", "linear", "llama3"])
def test_the_engine_spells_namespaces_alike(name: str) -> None:
    assert rope_of_config(CONFIGS[name]).text == parse_config(CONFIGS[name], "here").rope_text


def test_columns_of_a_latent_row_turn_from_a_start() -> None:
    rope = parse_rope("kind=default;layout=interleaved;dim=12;rotary=4;start=8;theta=10000.0")
    assert rope == Rope(dim=12, rotary=4, start=8, interleaved=True)
    row = np.arange(12, dtype=np.float32)
    cosine, sine = rope.rotary_embedding().turns(7, 1, 12)
    turned = row * cosine[0] + rope.rotary_embedding().partner(row) * sine[0]
    assert np.array_equal(turned[:8], row[:8])
    assert turned[8] == pytest.approx(8 * np.cos(7) - 9 * np.sin(7), rel=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kind=default",
        "kind=longrope;layout=half;dim=64;theta=10000.0",
        "kind=default;layout=half;dim=64;theta=10000",
        "kind=default;layout=half;dim=64;theta=nan",
        "kind=default;layout=half;dim=64;theta=1.0",
        "kind=default;layout=half;dim=63;theta=10000.0",
        "kind=default;layout=sideways;dim=64;theta=10000.0",
        "kind=default;layout=half;dim=64;rotary=80;theta=10000.0",
        "kind=default;layout=half;dim=64;theta=10000.0;factor=2.0",
        "kind=linear;layout=half;dim=64;theta=10000.0;factor=0.0",
        "kind=linear;layout=half;dim=64;theta=10000.0;unheard=2.0",
        "kind=default;layout=half;dim=64;theta=10000.0" + " " * 1024,
    ],
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="rope"):
        parse_rope(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "smollm3"},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 8, 8]}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {**YARN, "truncate": "no"}},
        {"model_type": "gptj"},
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rope|model type"):
        rope_of_config({**LLAMA, **changes})
