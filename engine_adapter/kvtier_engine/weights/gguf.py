"""GGUF files of the Llama family, turned once into a cached Hugging Face folder.

Quantised tensors are dequantised to float32, which is exact. Two things differ between the formats
beside names: llama.cpp interleaves the rows of the query and key projections for its rotary
embedding, and the tokenizer stands in the file's metadata.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file

from kvtier.errors import ConfigError
from kvtier.model_files.cache import cached_folder, file_identity
from kvtier_engine.weights.gguf_tokenizer import build_tokenizer

#: Rises when this module writes other folders from the same file.
CONVERSION = "gguf folder 1"
#: Files whose folders are kept; one is as large as the model in float32.
CONVERSIONS_KEPT_MAX = 3

_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_folder(path: Path) -> Path:
    """Return a Hugging Face folder with the content of a GGUF file, from the cache if possible.

    Raises ``ConfigError`` for a file that is no GGUF, or of an architecture, tokenizer or feature
    that is not supported. Blocks for some seconds the first time.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    name = file_identity([path], CONVERSION)
    convert = partial(_convert, path)
    return cached_folder("models", name, convert, kept_max=CONVERSIONS_KEPT_MAX)


class _Metadata:
    """The key-value part of a GGUF file, read with named errors."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self._reader = reader

    def get(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path}: metadata key {key!r} is missing")
        return value


def _convert(path: Path, folder: Path) -> None:
    try:
        reader = GGUFReader(path)
    # The library reads offsets and sizes as they stand, and fails wherever they lead.
    except (ValueError, LookupError, OverflowError) as error:
        raise ConfigError(f"{path}: not a GGUF file: {error}") from error
    metadata = _Metadata(path, reader)
    config = _config(metadata, {tensor.name for tensor in reader.tensors})
    tensors = dict(_tensor(path, config, tensor) for tensor in reader.tensors)
    tokenizer, tokenizer_config = build_tokenizer(metadata.require, metadata.get)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, values in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        text = json.dumps(values, indent=1, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")


def _config(metadata: _Metadata, tensor_names: set[str]) -> dict[str, Any]:
    architecture = metadata.require("general.architecture")
    if architecture != "llama":
        raise ConfigError(
            f"{metadata.path}: GGUF architecture {architecture!r} is not supported; allowed: llama"
        )
    if "rope_freqs.weight" in tensor_names:
        raise ConfigError(
            f"{metadata.path}: rotary scaling by 'rope_freqs.weight' is not supported in GGUF; "
            "allowed: none or linear; use the model's safetensors folder"
        )

    def require(key: str) -> Any:
        return metadata.require(f"llama.{key}")

    heads, width = require("attention.head_count"), require("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata.require("tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": require("feed_forward_length"),
        "num_hidden_layers": require("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv") or heads,
        "head_dim": metadata.get("llama.attention.key_length") or width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": require("context_length"),
        # A float32 in the file; seven digits give back the number that was meant.
        "rms_norm_eps": float(f"{require('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(metadata.get("llama.rope.freq_base") or 10_000.0),
        "rope_scaling": _rope_scaling(metadata),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": "blk.0.attn_q.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensor_names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.require("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
    }


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type")
    if kind in {None, "none"}:
        return None
    if kind != "linear":
        raise ConfigError(
            f"{metadata.path}: llama.rope.scaling.type = {kind!r}; allowed: none, linear"
        )
    return {"rope_type": "linear", "factor": metadata.require("llama.rope.scaling.factor")}


def _tensor(path: Path, config: dict[str, Any], tensor: ReaderTensor) -> tuple[str, torch.Tensor]:
    """Return one tensor under its Hugging Face name, float32, rows in Hugging Face order."""
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = GGMLQuantizationType(tensor.tensor_type).name
        raise ConfigError(f"{path}: tensor {tensor.name!r} has type {kind}: {error}") from error
    weight = torch.from_numpy(values.copy()).float()
    name = tensor.name
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name], weight
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        raise ConfigError(f"{path}: tensor {name!r} has no place in a Llama model")
    for kind, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
        if parts[2] == kind:
            weight = _undo_interleave(weight, config[heads])
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}", weight


def _undo_interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Take a head's rows from the order (0, half, 1, half + 1, …) back to (0, 1, 2, …)."""
    by_pair = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return by_pair.transpose(1, 2).reshape(weight.shape)
