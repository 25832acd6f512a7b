"""GGUF files, written by the test as llama.cpp's converter writes them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.model_files.cache import cache_folder
from kvtier_engine.weights.gguf import gguf_folder
from kvtier_engine.weights.load import load_model
from tests.lib.tiny_llama import (
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    Tensors,
    assert_computes,
    tiny_config,
    tiny_tensors,
    tiny_tokenizer,
)

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvtier"


def gguf_config(**changes: Any) -> dict[str, Any]:
    """With one token more, made by the only merge."""
    return tiny_config(vocab_size=VOCAB_SIZE + 1, **changes)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter: row i of a head's first half goes before row i of its second."""
    rows = []
    dim = len(weight) // heads
    for head in range(heads):
        for pair in range(dim // 2):
            rows += [weight[head * dim + pair], weight[head * dim + dim // 2 + pair]]
    return torch.stack(rows)


def write_gguf(
    path: Path, config: dict[str, Any], tensors: Tensors, **metadata: Any
) -> dict[str, torch.Tensor]:
    """Write a GGUF file; returns the tensors as a reader of exact arithmetic would see them."""
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    vocab = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model(metadata.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(metadata.pop("pre", "gpt-2"))
    tokens = [*(token for token, _ in vocab), "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([metadata.pop("merge", "a b")])
    writer.add_eos_token_id(256)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    seen = {}
    for name, tensor in tensors.items():
        stored, seen[name] = _gguf_tensor(config, name, tensor)
        writer.add_tensor(*stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return seen


def _gguf_tensor(
    config: dict[str, Any], name: str, tensor: torch.Tensor
) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Large matrices as Q8_0, projections of attention as float16, the rest as float32."""
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    target = plain.get(name)
    if target is None:
        _, _, index, *middle, kind = name.split(".")
        target = f"blk.{index}.{GGUF_NAMES['.'.join(middle)]}.{kind}"
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    stored = tensor
    for part, count in heads.items():
        if part in name:
            stored = interleave(tensor, config[count])
    if "down_proj" in name:
        kind = gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quants.quantize(stored.numpy(), kind)
        exact = torch.from_numpy(gguf.quants.dequantize(packed, kind).copy())
        return (target, packed, None, kind), exact
    if "self_attn" in name:
        return (target, stored.numpy().astype(np.float16)), tensor.half().float()
    return (target, stored.numpy()), tensor


def test_a_gguf_file_computes_what_its_tensors_say(tmp_path: Path, own_cache: Path) -> None:
    for changes in ({}, {"tie_word_embeddings": True}, {"num_key_value_heads": 3}):
        config = gguf_config(**changes)
        path = tmp_path / "tiny.gguf"
        seen = write_gguf(path, config, tiny_tensors(config))
        loaded = load_model(str(path))
        assert_computes(loaded, config, seen)
        assert loaded.config.norm_epsilon == config["rms_norm_eps"]
        assert loaded.tokenizer.eos_ids == (256,)
        assert loaded.tokenizer.encode("ab<|end|>") == [VOCAB_SIZE, 256]
        ids = loaded.tokenizer.encode("any text, ümlaut 7")
        assert loaded.tokenizer.decode(ids) == "any text, ümlaut 7"
    assert len(list((own_cache / "models").iterdir())) == 3


def test_gguf_scaling_is_carried_over(tmp_path: Path) -> None:
    config = gguf_config(rope_scaling={"rope_type": "linear", "factor": 3.0})
    path = tmp_path / "tiny.gguf"
    tensors = tiny_tensors(config)
    write_gguf(path, config, tensors, llama__rope__scaling__type="none")
    assert load_model(str(path)).config.rope.kind == "default"
    for kind, message in (("yarn", "allowed: none, linear"), ("linear", "scaling.factor")):
        write_gguf(path, config, tensors, llama__rope__scaling__type=kind)
        with pytest.raises(ConfigError, match=message):
            load_model(str(path))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"architecture": "gemma"}, "'gemma' is not supported; allowed: llama"),
        ({"tokenizer": "llama"}, "tokenizer model 'llama' is not supported; allowed: gpt2"),
        ({"merge": "a xyz"}, "tokenizer: .*xyz"),
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2' is not supported; allowed: gpt-2, smollm"),
    ],
)
def test_gguf_names_what_it_refuses(
    tmp_path: Path, own_cache: Path, metadata: dict[str, str], message: str
) -> None:
    config = gguf_config()
    write_gguf(tmp_path / "x.gguf", config, tiny_tensors(config), **metadata)
    with pytest.raises(ConfigError, match=message):
        load_model(str(tmp_path / "x.gguf"))
    assert not list((own_cache / "models").iterdir())


def test_gguf_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    config = gguf_config()
    path = tmp_path / "x.gguf"
    tensors = tiny_tensors(config)
    GGUF_NAMES["odd"] = "odd"
    try:
        write_gguf(path, config, tensors | {"model.layers.0.odd.weight": torch.zeros(2)})
    finally:
        del GGUF_NAMES["odd"]
    with pytest.raises(ConfigError, match=r"'blk\.0\.odd\.weight' has no place"):
        load_model(str(path))


def test_bytes_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    for number, data in enumerate((b"", b"GGUF", b"no" * 100)):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="not a GGUF file"):
            load_model(str(path))


def test_a_gguf_file_is_converted_once_until_it_changes(tmp_path: Path) -> None:
    config = gguf_config()
    path = tmp_path / "x.gguf"
    tensors = tiny_tensors(config)
    write_gguf(path, config, tensors)
    first = gguf_folder(path)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert gguf_folder(path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000))
    assert gguf_folder(path) != first
    shutil.rmtree(cache_folder())
    assert gguf_folder(path).is_dir()
