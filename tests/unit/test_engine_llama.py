"""The Llama forward pass against a spelled-out reference, and what a config may say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier_engine.attention.paged import plan_attention
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.models import build_model
from kvtier_engine.models.config import parse_config
from kvtier_engine.models.llama import LlamaModel
from kvtier_engine.types import RowStep
from kvtier_engine.weights.load import kv_layout
from tests.lib.tiny_llama import Tensors, reference_logits, tiny_config, tiny_tensors

BLOCK = 4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "no_grouping": {"num_key_value_heads": 6},
    "wide_heads": {"head_dim": 12},
    "rope_linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "rope_llama3": {"rope_scaling": LLAMA3, "rope_theta": 10_000.0},
}


def build(config: dict[str, Any], tensors: Tensors) -> tuple[LlamaModel, KVPool]:
    parsed = parse_config(config, "test")
    model = build_model(parsed, lambda name, _shape: tensors[name])
    layout = kv_layout(parsed, "float32", chunk_tokens=2 * BLOCK)
    return model, KVPool(layout, block_tokens=BLOCK, capacity_bytes=1 << 20)


@torch.inference_mode()
def run(
    model: LlamaModel, pool: KVPool, ids: list[int], start: int, blocks: tuple[int, ...]
) -> torch.Tensor:
    """Feed ``ids[start:]`` and return their logits."""
    row = RowStep(0, tuple(ids[start:]), start, (blocks,), sample=True)
    positions = torch.arange(start, len(ids))
    hidden = model.forward(torch.tensor(ids[start:]), positions, plan_attention([row], pool), pool)
    return model.logits(hidden)


def draw_ids(count: int) -> list[int]:
    return [(index * 37 + 11) % 251 for index in range(count)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference(variant: str) -> None:
    config = tiny_config(**VARIANTS[variant])
    tensors = tiny_tensors(config)
    model, pool = build(config, tensors)
    ids = draw_ids(90)
    logits = run(model, pool, ids, 0, tuple(range(23)))
    expected = reference_logits(config, tensors, ids).float()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_every_variant_differs_from_plain() -> None:
    # Or the test above would not see a setting that is ignored.
    ids = draw_ids(90)
    plain = tiny_config()
    logits = reference_logits(plain, tiny_tensors(plain), ids)[-1]
    for variant, changes in VARIANTS.items():
        config = tiny_config(**changes)
        other = reference_logits(config, tiny_tensors(config), ids)[-1]
        assert variant == "plain" or (other - logits).abs().max() > 0.01, variant


def test_b17_warm_prefill_feeds_the_rest_and_attends_to_all() -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    ids = draw_ids(12)
    model, pool = build(config, tensors)
    cold = run(model, pool, ids, 0, (2, 0, 1))
    warm = run(model, pool, ids, 8, (2, 0, 1))
    assert len(warm) == 4
    torch.testing.assert_close(warm, cold[8:], rtol=1e-4, atol=1e-4)
    # Each of the eight cached tokens counts: change one, and the result changes.
    for position in range(8):
        slot = (2, 0, 1)[position // BLOCK] * BLOCK + position % BLOCK
        saved = pool.layer(1)[:, :, slot].clone()
        pool.layer(1)[:, :, slot] += 1.0
        assert (run(model, pool, ids, 8, (2, 0, 1)) - warm).abs().max() > 1e-3, position
        pool.layer(1)[:, :, slot] = saved


def test_pool_may_be_reused_without_being_cleared() -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    model, pool = build(config, tensors)
    for index in range(config["num_hidden_layers"]):
        pool.layer(index).fill_(float("nan"))
    ids = draw_ids(10)
    logits = run(model, pool, ids, 0, (5, 3, 9))
    expected = reference_logits(config, tensors, ids).float()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_the_reference(dtype: torch.dtype) -> None:
    config = tiny_config()
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors(config).items()}
    parsed = parse_config(config, "test")
    model = build_model(parsed, lambda name, _shape: tensors[name])
    layout = kv_layout(parsed, str(dtype).removeprefix("torch."), chunk_tokens=2 * BLOCK)
    pool = KVPool(layout, block_tokens=BLOCK, capacity_bytes=1 << 20)
    ids = draw_ids(20)
    run(model, pool, ids[:9], 0, (2, 0, 1, 4, 3))
    logits = run(model, pool, ids, 9, (2, 0, 1, 4, 3))
    expected = reference_logits(config, tensors, ids)[9:].float()
    assert logits.dtype == torch.float32
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_unknown_architecture_names_the_known_ones() -> None:
    config = parse_config(tiny_config(architectures=["LlamaForCausalML"]), "test")
    with pytest.raises(ConfigError, match=r"did you mean 'LlamaForCausalLM'.*allowed"):
        build_model(config, lambda _name, shape: torch.zeros(shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 4}, "divisor of 6"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"hidden_act": "gelu"}, "allowed: silu"),
        ({"attention_bias": "yes"}, "true or false"),
        ({"architectures": []}, "architectures"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "default, linear, llama3"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": 7}, "rope_scaling = 7"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_config_names_what_it_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(tiny_config(**changes), "test")


def test_both_spellings_of_rope_mean_the_same() -> None:
    old = tiny_config(rope_theta=5e5, rope_scaling=LLAMA3)
    new = tiny_config(rope_theta=None, rope_parameters={"rope_theta": 5e5, **LLAMA3})
    assert parse_config(old, "test") == parse_config(new, "test")


def test_rope_text_tells_every_parameter_apart() -> None:
    texts = {
        parse_config(tiny_config(**changes), "test").rope_text
        for changes in (
            {},
            {"rope_theta": 101.0},
            {"head_dim": 16},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rope_scaling": LLAMA3},
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}},
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 8.0}},
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 128}},
        )
    }
    assert len(texts) == 9
    assert parse_config(tiny_config(), "test").rope_text == (
        "kind=default;layout=half;dim=8;theta=100.0"
    )
