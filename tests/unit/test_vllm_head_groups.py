"""In how many parts engines of several degrees store KV heads, and which of them can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.cache.planner import chunk_shape, shard_writers
from kvtier.codecs.raw import RawCodec
from kvtier.errors import ConfigError, LayoutError
from kvtier.layout import validate_layout
from kvtier_adapters.vllm.geometry import Geometry
from kvtier_adapters.vllm.head_groups import stored_head_groups
from kvtier_engine.models.config import parse_config
from kvtier_engine.weights.load import kv_layout
from tests.lib.vllm_double import double_geometry

DEGREES = (1, 2, 4, 8)


def geometry(heads: int, degree: int, *, opaque: bool = False) -> Geometry:
    return replace(double_geometry(degree, 4, 8, heads), opaque=opaque)


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("asked", [0, 2])
def test_a_shard_for_each_rank_unless_something_else_is_asked_for(asked: int, opaque: bool) -> None:
    assert stored_head_groups(geometry(4, 2, opaque=opaque), asked, stores=True) == 2


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("asked", DEGREES)
def test_what_is_allowed_is_what_the_planner_can_store(heads: int, degree: int, asked: int) -> None:
    served = geometry(heads, degree)
    layout = served.layout(8, asked)
    validate_layout(layout)
    shape = chunk_shape(layout, RawCodec())
    try:
        writers = shard_writers(layout, shape, served.placements())
    except LayoutError:
        with pytest.raises(ConfigError, match=f"head_groups = {asked}: no rank holds"):
            stored_head_groups(served, asked, stores=True)
    else:
        assert stored_head_groups(served, asked, stores=True) == asked
        assert writers.keys() == shape.layouts.keys()
    # Who only reads takes parts of shards, and several.
    assert stored_head_groups(served, asked, stores=False) == asked


def test_kvtier_serve_cuts_the_same_parts() -> None:
    """Its layout is that of vLLM on two GPUs, if it is told that there are two head groups."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    model = parse_config(config, "a table")
    assert kv_layout(model, "float32", 8, 2) == geometry(4, 2).layout(8)
    with pytest.raises(LayoutError, match="head_groups is 3"):
        kv_layout(model, "float32", 8, 3)


@pytest.mark.parametrize("asked", [-1, 3, 5])
def test_a_head_is_never_cut(asked: int) -> None:
    with pytest.raises(ConfigError, match=f"head_groups = {asked}: allowed is what divides the 4"):
        stored_head_groups(geometry(4, 2), asked, stores=True)


def test_blocks_of_which_only_the_bytes_are_known_are_stored_as_ranks_have_them() -> None:
    with pytest.raises(ConfigError, match=r"head_groups = 4: .* allowed is 2"):
        stored_head_groups(geometry(4, 2, opaque=True), 4, stores=True)
