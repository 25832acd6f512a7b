"""What the plug reads of vLLM's KV cache, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.layout import validate_layout
from kvtier.types import GroupKind, KVGroup, KVLayout, Part, Placement
from kvtier_adapters.vllm.geometry import (
    Geometry,
    Transposes,
    load_range,
    read_geometry,
    sort_layers,
)
from kvtier_adapters.vllm.pool import VllmPool, open_pool


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's, by its name."""


class SlidingWindowSpec(SimpleNamespace):
    """As vLLM's, by its name."""


class MambaSpec(SimpleNamespace):
    """As vLLM's, by its name."""


class MLAAttentionSpec(SimpleNamespace):
    """As vLLM's, by its name."""


def spec(kind: type[SimpleNamespace] = FullAttentionSpec, **more: Any) -> SimpleNamespace:
    fields = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16, "block_size": 16}
    return kind(**fields | {"head_size_v": 8} | more)


def window(tokens: int, **more: Any) -> SimpleNamespace:
    return spec(SlidingWindowSpec, sliding_window=tokens, **more)


def cache_config(*specs: SimpleNamespace) -> SimpleNamespace:
    names = [f"model.layers.{layer}.self_attn.attn" for layer in (10, 2, 0)]
    groups = [SimpleNamespace(layer_names=names, kv_cache_spec=each) for each in specs]
    return SimpleNamespace(num_blocks=7, kv_cache_groups=groups)


def hybrid_config(*windows: SimpleNamespace) -> SimpleNamespace:
    """One full layer and one of each window, in groups of their own; windows come first."""
    specs = [*windows, spec()]
    groups = [
        SimpleNamespace(layer_names=[f"model.layers.{layer}.attn"], kv_cache_spec=each)
        for layer, each in enumerate(specs)
    ]
    return SimpleNamespace(num_blocks=7, kv_cache_groups=groups)


def hybrid(*windows: SimpleNamespace) -> Geometry:
    config = hybrid_config(*windows)
    found = read_geometry(vllm_config(), config, opaque=False, transposes=never)
    assert isinstance(found, Geometry), found
    return found


def vllm_config(device: str = "cuda", heads: int = 2, **parallel: Any) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1} | parallel),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )


def never(*sizes: Any) -> bool:
    """A CPU on which vLLM packs blocks in a way that is not known."""
    return False


def read(
    config: SimpleNamespace, *specs: SimpleNamespace, transposes: Transposes = never
) -> Geometry | str:
    caches = cache_config(*(specs or (spec(),)))
    return read_geometry(config, caches, opaque=False, transposes=transposes)


def known(config: SimpleNamespace, *specs: SimpleNamespace) -> Geometry:
    found = read(config, *specs)
    assert isinstance(found, Geometry), found
    return found


def test_layers_stand_in_the_models_order() -> None:
    geometry = known(vllm_config())
    assert geometry.groups[0].layers == (0, 2, 10)
    assert geometry.layer_names[2] == "model.layers.10.self_attn.attn"
    assert (geometry.dtype, geometry.block_tokens, geometry.opaque) == ("bfloat16", 16, False)
    validate_layout(geometry.layout(256))


@pytest.mark.parametrize(
    ("heads", "ranks", "rank_heads"), [(8, 4, 2), (2, 2, 1), (2, 4, 1), (1, 2, 1)]
)
def test_ranks_are_head_groups(heads: int, ranks: int, rank_heads: int) -> None:
    config = vllm_config(heads=heads, tensor_parallel_size=ranks)
    geometry = known(config, spec(num_kv_heads=rank_heads))
    layout = geometry.layout(256)
    validate_layout(layout)
    assert layout.head_groups == ranks
    assert geometry.placements()[-1] == Placement(ranks - 1, ranks - 1, ranks)


def test_on_a_cpu_blocks_are_opaque_and_say_whose_they_are() -> None:
    here, there = known(vllm_config("cpu")), known(vllm_config("cuda"))
    assert here.opaque
    assert "opaque blocks of 16" in here.form("0.32.0")
    assert here.form("0.32.0") != here.form("0.26.0")
    assert there.form("0.32.0") == ""


@pytest.mark.parametrize(
    ("changed", "specs", "said"),
    [
        ({"pipeline_parallel_size": 2}, (), "pipeline_parallel_size = 2"),
        ({"decode_context_parallel_size": 2}, (), "decode_context_parallel_size = 2"),
        ({"heads": 4}, (), "4 KV heads on 1 ranks"),
        ({"distributed_executor_backend": "external_launcher"}, (), "a scheduler each"),
        ({}, (spec(), spec()), "no numbers of their own"),
        ({}, (spec(), spec(MambaSpec)), "KV of MambaSpec"),
        ({}, (spec(MLAAttentionSpec),), "KV of MLAAttentionSpec"),
        ({}, (spec(), window(8, block_size=32)), "differ in size"),
        ({}, (spec(), window(8, num_kv_heads=4)), "differ in size"),
        ({}, (window(1),), "a sliding window of 1 tokens"),
        ({}, (spec(), window(8, head_size_v=4)), "K of 8 values and V of 4"),
        ({}, (spec(dtype=torch.int32),), "dtype int32"),
        ({}, (spec(head_size_v=4),), "K of 8 values and V of 4"),
        ({}, (spec(state_content_bytes=10),), "packed or compressed"),
        ({}, (spec(tokens_per_state=2),), "packed or compressed"),
        ({}, (spec(kv_quant_mode=SimpleNamespace(name="INT8_PER_TOKEN_HEAD")),), "INT8_PER_TOKEN"),
    ],
)
def test_what_is_not_known_for_certain_is_refused(
    changed: dict[str, Any], specs: tuple[SimpleNamespace, ...], said: str
) -> None:
    refusal = read(vllm_config(**changed), *specs)
    assert isinstance(refusal, str)
    assert said in refusal


def test_drafts_that_depend_on_later_tokens_are_refused() -> None:
    config = vllm_config()
    config.speculative_config = SimpleNamespace(method="eagle")
    assert "speculative decoding by 'eagle'" in str(read(config))
    config.speculative_config = SimpleNamespace(method="ngram")
    known(config)


@pytest.mark.parametrize("names", [["a", "b"], ["layers.1.attn", "draft.layers.1.attn"]])
def test_layers_without_numbers_of_their_own(names: list[str]) -> None:
    assert sort_layers(names) is None


@pytest.mark.parametrize(
    ("found", "matched", "prompt", "tokens"),
    [
        (0, 256, 300, range(256)),
        (128, 256, 300, range(128, 256)),
        (256, 256, 300, range(256, 256)),
        (0, 256, 256, range(240)),
        (0, 256, 200, range(192)),
        (0, 0, 10, range(0)),
        (288, 256, 300, range(288, 288)),
    ],
)
def test_whole_blocks_are_loaded_and_a_token_is_left(
    found: int, matched: int, prompt: int, tokens: range
) -> None:
    assert load_range(found, matched, prompt, 16) == tokens


def caches(geometry: Geometry, *, tokens_outside: bool = False) -> dict[str, torch.Tensor]:
    """KV caches as vLLM registers them, heads or tokens outside, numbered throughout."""
    shape = (7, 2, 16, 16)
    made = {}
    for index, name in enumerate(geometry.layer_names):
        plane = torch.arange(7 * 2 * 16 * 16).view(shape) + index * 10_000
        plane = plane.to(torch.bfloat16)
        if tokens_outside:
            plane = plane.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
        made[name] = plane
    return made


@pytest.mark.parametrize("tokens_outside", [False, True])
def test_the_pool_shows_k_and_v_by_layer(tokens_outside: bool) -> None:
    geometry = known(vllm_config())
    made = caches(geometry, tokens_outside=tokens_outside)
    pool = open_pool(geometry, made, dict.fromkeys(geometry.layer_names, "FLASH_ATTN"))
    assert isinstance(pool, VllmPool)
    value = pool.layer_view(0, 1, Part.V)
    assert value.shape == (7, 16, 2, 8)
    assert torch.equal(value[3, 5, 1], made[geometry.layer_names[1]][3, 1, 5, 8:])
    assert (pool.block_tokens, pool.block_count, pool.stream) == (16, 7, 0)


def test_an_unknown_attention_is_refused_unless_its_blocks_are_opaque() -> None:
    geometry = known(vllm_config())
    named = dict.fromkeys(geometry.layer_names, "NEW_ATTN")
    refusal = open_pool(geometry, caches(geometry), named)
    assert "NEW_ATTN" in str(refusal)
    opaque = read_geometry(vllm_config(), cache_config(spec()), opaque=True, transposes=never)
    assert isinstance(opaque, Geometry)
    assert isinstance(open_pool(opaque, caches(opaque), named), VllmPool)


def test_caches_that_are_not_as_configured_are_refused() -> None:
    geometry = known(vllm_config("cpu"))
    made = caches(geometry)
    name = geometry.layer_names[0]
    assert "no KV cache" in str(open_pool(geometry, {}, {}))
    for wrong in (made[name].float(), made[name][:, :, :8], made[name].transpose(2, 3)):
        assert isinstance(open_pool(geometry, made | {name: wrong}, {}), str)
    shared = dict.fromkeys(geometry.layer_names, made[name])
    assert "share" in str(open_pool(geometry, shared, {}))


def test_windows_are_groups_of_their_own() -> None:
    geometry = hybrid(window(33), window(9, extra_retained_tokens=2))
    layout = geometry.layout(64)
    validate_layout(layout)
    assert [(group.kind, group.layers, group.window_tokens) for group in layout.groups] == [
        (GroupKind.WINDOW, (0,), 32),
        (GroupKind.WINDOW, (1,), 10),
        (GroupKind.FULL, (2,), 0),
    ]
    assert (geometry.window_tokens, geometry.by_request) == (10, True)
    assert known(vllm_config(), window(9)).by_request


def test_one_group_of_full_attention_is_laid_out_as_ever() -> None:
    geometry = known(vllm_config())
    group = KVGroup(GroupKind.FULL, (0, 2, 10), 2, 8, 8, "bfloat16")
    assert geometry.layout(256) == KVLayout((group,), chunk_tokens=256)
    assert (geometry.window_tokens, geometry.windows, geometry.by_request) == (0, (0,), False)


def test_layers_of_different_groups_share_memory() -> None:
    geometry = hybrid(window(33))
    memory = caches(geometry)[geometry.layer_names[0]]
    made = dict.fromkeys(geometry.layer_names, memory)
    pool = open_pool(geometry, made, dict.fromkeys(geometry.layer_names, "FLASH_ATTN"))
    assert isinstance(pool, VllmPool)
    for group in range(2):
        assert torch.equal(pool.layer_view(group, 0, Part.K)[3, 5, 1], memory[3, 1, 5, :8])
