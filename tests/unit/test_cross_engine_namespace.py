"""vLLM and kvtier-serve have one namespace for one model, and others for all that differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.config import CacheConfig
from kvtier.constants import GIB
from kvtier.keys import namespace_digest
from kvtier.types import Namespace
from kvtier_engine.namespace import namespace_of
from kvtier_engine.weights.load import kv_layout, load_model
from tests.lib.tiny_llama import tiny_config, tiny_tensors, write_folder
from tests.lib.vllm_config import vllm_namespace
from tests.lib.vllm_double_parts import DoubleRequest

CONFIG = tiny_config(model_type="llama")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
#: Of the namespace below, in every engine, process and version.
GOLDEN = "b96c8222139ba7ce38b2fe5eb75729ce0dbf71ae79dfdd56d41681422279a989"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", CONFIG, tiny_tensors(CONFIG))


def serve_namespace(
    folder: Path,
    *,
    weights_id: str | None = None,
    dtype: str = "float32",
    chunk_tokens: int = 256,
    head_groups: int = 1,
    codec: str = "raw",
) -> Namespace:
    """The namespace of a request to kvtier-serve without a salt."""
    loaded = load_model(str(folder), dtype=dtype, weights_id=weights_id)
    layout = kv_layout(loaded.config, loaded.dtype, chunk_tokens, head_groups)
    return namespace_of(loaded, layout, CacheConfig(dram_bytes=GIB, codec=codec))


def test_both_have_one_name_for_one_folder(folder: Path) -> None:
    assert vllm_namespace(folder) == serve_namespace(folder)


def test_both_have_the_keys_that_are_written_down(folder: Path) -> None:
    ours = serve_namespace(folder, weights_id="weights 1")
    theirs = vllm_namespace(folder, {"weights_id": "weights 1"})
    assert namespace_digest(ours).hex() == GOLDEN
    assert namespace_digest(theirs).hex() == GOLDEN


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
def test_the_size_of_blocks_does_not_matter(folder: Path, block_tokens: int) -> None:
    assert vllm_namespace(folder, block_tokens=block_tokens) == serve_namespace(folder)


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": LLAMA3},
    ],
    ids=["plain", "theta", "linear", "llama3"],
)
def test_both_say_alike_how_k_is_turned(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = CONFIG | rope
    folder = write_folder(tmp_path / "model", config, tiny_tensors(config))
    assert vllm_namespace(folder) == serve_namespace(folder)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"dtype": torch.float16}, {"dtype": "float16"}),
        ({"options": {"chunk_tokens": 64}}, {"chunk_tokens": 64}),
        ({"options": {"codec": "int8"}}, {"codec": "int8"}),
        ({"options": {"head_groups": 2}}, {"head_groups": 2}),
        ({"ranks": 2}, {"head_groups": 2}),
        ({"options": {"weights_id": "mine"}}, {"weights_id": "mine"}),
    ],
    ids=str,
)
def test_what_both_are_told_alike_is_shared(
    folder: Path, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    assert vllm_namespace(folder, **theirs) == serve_namespace(folder, **ours)
    assert vllm_namespace(folder, **theirs) != serve_namespace(folder)
    assert vllm_namespace(folder) != serve_namespace(folder, **ours)


def test_b27_a_salt_is_a_tenant_in_both(folder: Path) -> None:
    salted = DoubleRequest("one", [1], cache_salt="tenant")
    theirs = vllm_namespace(folder, request=salted)
    assert theirs == replace(serve_namespace(folder), tenant_salt="tenant")
    assert theirs != serve_namespace(folder)


@pytest.mark.parametrize(
    "told",
    [
        {"cache_dtype": "fp8"},
        {"options": {"blocks": "opaque"}},
        {"quantization": "fp8"},
        {"overrides": {"rms_norm_eps": 1e-3}},
        {"overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}},
        {"load_format": "dummy"},
        {"options": {"weights_id": "others"}},
    ],
    ids=str,
)
def test_b27_what_vllm_alone_is_told_keeps_it_apart(folder: Path, told: dict[str, Any]) -> None:
    assert vllm_namespace(folder, **told) != vllm_namespace(folder)
    assert vllm_namespace(folder, **told) != serve_namespace(folder)


def test_b27_adapters_and_images_keep_requests_apart(folder: Path) -> None:
    adapter = SimpleNamespace(lora_name="law", lora_path="")
    image = SimpleNamespace(identifier="a picture", mm_position=SimpleNamespace(offset=0, length=1))
    plain = serve_namespace(folder)
    for request in (
        DoubleRequest("one", [1], lora_request=adapter),
        DoubleRequest("one", [1], mm_features=[image]),
    ):
        assert vllm_namespace(folder, request=request) != plain


@pytest.mark.parametrize("change", ["a weight", "a weight's dtype", "the config"])
def test_b27_other_models_keep_engines_apart(tmp_path: Path, folder: Path, change: str) -> None:
    config, tensors = dict(CONFIG), tiny_tensors(CONFIG)
    if change == "a weight":
        tensors["model.norm.weight"][0] += 1
    elif change == "a weight's dtype":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    else:
        config["rms_norm_eps"] = 1e-6
    other = write_folder(tmp_path / "other", config, tensors)
    assert vllm_namespace(other) == serve_namespace(other)
    assert vllm_namespace(other) != serve_namespace(folder)
