"""vLLM's configuration of a model in a folder, without vLLM: what the connector reads of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers import AutoConfig

from kvtier.types import Namespace
from kvtier_adapters.vllm.requests import request_namespace
from kvtier_adapters.vllm.setup import read_setup
from tests.lib.vllm_double_parts import DoubleRequest

VERSION: Final = "0.32.0"


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's, by its name."""


def vllm_namespace(
    folder: Path,
    options: dict[str, Any] | None = None,
    *,
    request: DoubleRequest | None = None,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    ranks: int = 1,
    cache_dtype: str = "auto",
    load_format: str = "auto",
    overrides: dict[str, Any] | None = None,
    quantization: str | None = None,
) -> Namespace:
    """Return the namespace of a request to vLLM on a GPU that serves a folder's model."""
    model = AutoConfig.from_pretrained(folder)
    model.update(overrides or {})
    heads, layers = model.num_key_value_heads, range(model.num_hidden_layers)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in layers]
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"dram": "1MiB"} | (options or {}),
            kv_load_failure_policy="recompute",
            kv_role="kv_both",
            engine_id="engine",
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks,
            data_parallel_size=1,
            data_parallel_rank=0,
            world_size=ranks,
            rank=0,
            distributed_executor_backend=None,
        ),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        device_config=SimpleNamespace(device_type="cuda"),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(static_forward_context={}),
        load_config=SimpleNamespace(load_format=load_format),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: heads,
            hf_config=model,
            hf_text_config=model,
            hf_overrides=overrides or {},
            model=str(folder),
            revision=None,
            quantization=quantization,
        ),
    )
    spec = FullAttentionSpec(
        num_kv_heads=max(1, heads // ranks),
        head_size=model.head_dim,
        dtype=dtype,
        block_size=block_tokens,
    )
    groups = [SimpleNamespace(layer_names=names, kv_cache_spec=spec)]
    kv_cache = SimpleNamespace(num_blocks=8, kv_cache_groups=groups)
    base = read_setup(config, kv_cache, VERSION).namespace
    assert base is not None
    return request_namespace(base, request or DoubleRequest("one", [1, 2, 3]))
