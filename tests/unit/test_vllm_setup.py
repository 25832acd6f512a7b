"""From vLLM's configuration to what is opened for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.types import Direction, Fidelity, HeadSlice, Move, Plan, ShardId, ShardLayout, Slot
from kvtier_adapters.vllm.geometry import Geometry
from kvtier_adapters.vllm.messages import LoadOrder, Orders
from kvtier_adapters.vllm.pool import VllmPool
from kvtier_adapters.vllm.scheduler_side import SchedulerSide
from kvtier_adapters.vllm.setup import (
    Setup,
    close_scheduler_side,
    open_scheduler_side,
    open_worker_side,
    read_setup,
    register_pool_boundary,
    tiers_text,
)

VERSION = "0.32.0"
NAMES = [f"model.layers.{layer}.attn" for layer in range(2)]


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's, by its name."""


class SlidingWindowSpec(SimpleNamespace):
    """As vLLM's, by its name."""


def hf_config(**more: Any) -> SimpleNamespace:
    values = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 8,
        "head_dim": 8,
        "rope_theta": 10_000.0,
    }
    return SimpleNamespace(to_dict=lambda: values | more)


def vllm_config(options: dict[str, Any], **more: Any) -> SimpleNamespace:
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    fields: dict[str, Any] = {
        "kv_transfer_config": SimpleNamespace(
            kv_connector_extra_config={"dram": "1MiB", "weights_id": "these"} | options,
            kv_load_failure_policy="recompute",
            kv_role="kv_both",
            engine_id="engine",
        ),
        "parallel_config": SimpleNamespace(
            tensor_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            world_size=1,
            rank=0,
            distributed_executor_backend=None,
        ),
        "speculative_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "device_config": SimpleNamespace(device_type="cuda"),
        "scheduler_config": SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        "compilation_config": SimpleNamespace(static_forward_context=dict.fromkeys(NAMES, layer)),
        "load_config": SimpleNamespace(load_format="auto"),
        "model_config": SimpleNamespace(
            get_total_num_kv_heads=lambda: 2,
            hf_config=hf_config(),
            hf_text_config=hf_config(),
            model="nowhere",
            revision=None,
            quantization=None,
        ),
    }
    return SimpleNamespace(**fields | more)


def cache_config(groups: int = 1) -> SimpleNamespace:
    spec = FullAttentionSpec(
        num_kv_heads=2, head_size=8, head_size_v=8, dtype=torch.float32, block_size=16
    )
    group = SimpleNamespace(layer_names=NAMES, kv_cache_spec=spec)
    return SimpleNamespace(num_blocks=8, kv_cache_groups=[group] * groups)


def setup(options: dict[str, Any] | None = None, groups: int = 1, **more: Any) -> Setup:
    return read_setup(vllm_config(options or {}, **more), cache_config(groups), VERSION)


def caches() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(8, 2, 16, 16) for name in NAMES}


def move() -> Move:
    shape = ShardLayout(layers=2, kv_heads=2, k_dim=8, v_dim=8, dtype="float32", tokens=16)
    return Move(
        0,
        "raw",
        ShardId(0, 0, 0),
        shape,
        Slot(0, 8192),
        4096,
        0,
        1,
        HeadSlice(0, 0, 2),
        0,
        0,
        16,
        (1,),
    )


def test_windows_are_served_where_vllm_can_be_told_of_a_failed_load() -> None:
    config = cache_config()
    spec = config.kv_cache_groups[0].kv_cache_spec
    window = SlidingWindowSpec(**vars(spec), sliding_window=33)
    config.kv_cache_groups = [
        SimpleNamespace(layer_names=[name], kv_cache_spec=each)
        for name, each in zip(NAMES, (spec, window), strict=True)
    ]
    served = read_setup(vllm_config({}), config, "0.32.0")
    assert served.namespace is not None
    # Chunks of 48 tokens are the longest that a window of 33 can be stored by.
    assert served.namespace.layout.chunk_tokens == 48
    assert (served.duties.windows, served.duties.step_blocks) == ((0, 33), 2 * (4 + 4))
    refused = read_setup(vllm_config({}), config, "0.26.0")
    assert refused.geometry == (
        "vLLM 0.26.0 cannot be told that a load into several KV groups has failed"
    )


def test_the_namespace_is_that_of_the_model() -> None:
    namespace = setup().namespace
    assert namespace is not None
    assert (namespace.weights_id, namespace.kv_scales_id) == ("these", "")
    assert namespace.rope == "kind=default;layout=half;dim=8;theta=10000.0"
    assert namespace.layout.chunk_tokens == 256
    assert namespace.fidelity is Fidelity.EXACT


def test_lossy_codecs_are_apart_and_need_blocks_that_can_be_read() -> None:
    namespace = setup({"codec": "int8"}).namespace
    assert namespace is not None
    assert namespace.fidelity is Fidelity.LOSSY
    cpu = SimpleNamespace(device_type="cpu")
    with pytest.raises(ConfigError, match=r"codec 'int8'.*allowed is 'raw'"):
        setup({"codec": "int8"}, device_config=cpu)
    quantised = SimpleNamespace(cache_dtype="fp8")
    with pytest.raises(ConfigError, match="codec 'int8'"):
        setup({"codec": "int8"}, cache_config=quantised)
    assert setup({"blocks": "opaque"}).namespace != setup().namespace


@pytest.mark.parametrize("enabled", [False, True])
def test_events_are_kept_if_vllm_publishes_them(enabled: bool) -> None:
    told = SimpleNamespace(enable_kv_cache_events=enabled)
    config = setup(kv_events_config=told).config
    assert config is not None
    assert config.events is enabled


def test_an_unknown_rotary_embedding_is_known_by_its_digest() -> None:
    model = vllm_config({}).model_config
    model.hf_text_config = hf_config(rope_scaling={"rope_type": "new", "factor": 2.0})
    first = setup(model_config=model).namespace
    model.hf_text_config = hf_config(rope_scaling={"rope_type": "new", "factor": 3.0})
    second = setup(model_config=model).namespace
    assert first is not None
    assert second is not None
    assert first.rope.startswith("unknown;")
    assert first.rope != second.rope


def test_a_failed_load_must_not_be_the_clients_error() -> None:
    config = vllm_config({})
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    with pytest.raises(ConfigError, match="allowed is 'recompute'"):
        read_setup(config, cache_config(), VERSION)


def test_untested_versions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"vLLM 0\.40\.1"):
        read_setup(vllm_config({}), cache_config(), "0.40.1")
    read_setup(vllm_config({"any_version": True}), cache_config(), "0.40.1")


@pytest.mark.parametrize(
    ("role", "loads", "stores"),
    [("kv_both", True, True), ("kv_producer", False, True), ("kv_consumer", True, False)],
)
def test_roles(role: str, loads: bool, stores: bool) -> None:
    config = vllm_config({})
    config.kv_transfer_config.kv_role = role
    duties = read_setup(config, cache_config(), VERSION).duties
    assert (duties.loads, duties.stores) == (loads, stores)


def test_engines_side_by_side_have_folders_of_their_own(tmp_path: Path) -> None:
    parallel = vllm_config({}).parallel_config
    parallel.data_parallel_size, parallel.data_parallel_rank = 2, 1
    config = setup({"disk": str(tmp_path)}, parallel_config=parallel).config
    assert config is not None
    assert config.disk is not None
    assert config.disk.path == str(tmp_path / "engine-1")


@pytest.mark.parametrize(
    ("world", "backend", "shared"),
    [(1, None, False), (1, "uni", False), (1, "mp", True), (2, None, True)],
)
def test_ranks_in_other_processes_share_the_arena(
    world: int, backend: str | None, shared: bool
) -> None:
    parallel = vllm_config({}).parallel_config
    parallel.world_size, parallel.distributed_executor_backend = world, backend
    config = setup(parallel_config=parallel).config
    assert config is not None
    assert config.shared is shared


def test_what_is_not_served_opens_nothing(caplog: pytest.LogCaptureFixture) -> None:
    refused = setup(groups=0)
    assert open_scheduler_side(refused) is None
    assert "KVTier is switched off: a model with 0 KV cache groups" in caplog.text


def test_the_log_says_which_tiers_there_are_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.kvtier")
    remote = "redis://:secret@localhost:1/"
    ours = setup({"disk": "/nowhere/kv", "remote": remote, "codec": "int8"})
    assert ours.config is not None
    said = tiers_text(ours.config)
    assert said == "dram 1 MiB (int8), disk 10 GiB in /nowhere/kv, redis:"
    alone = setup()
    side = open_scheduler_side(alone)
    assert side is not None
    close_scheduler_side(alone, side)
    assert caplog.messages == ["KVTier keeps KV in dram 1 MiB (raw)"]


def test_a_rank_that_sees_another_model_than_the_scheduler_says_so() -> None:
    refused = setup(groups=0)
    worker = open_worker_side(refused)
    register_pool_boundary(refused, worker, caches())
    plan = Plan(1, Direction.LOAD, 1e9, (move(),))
    worker.execute(Orders(loads=(LoadOrder(1, "request", (plan,), last=True),)))
    answers = worker.take_answers()
    assert answers.refusals == ("a model with 0 KV cache groups is not supported",)
    assert [result.ok for result in answers.results] == [False]


@pytest.mark.parametrize("shared", [False, True])
def test_both_sides_of_one_engine_meet(shared: bool) -> None:
    parallel = vllm_config({}).parallel_config
    parallel.distributed_executor_backend = "mp" if shared else "uni"
    ours = setup(parallel_config=parallel)
    worker = open_worker_side(ours)
    register_pool_boundary(ours, worker, caches())
    scheduler = open_scheduler_side(ours)
    assert isinstance(scheduler, SchedulerSide)
    nothing = SimpleNamespace(
        num_scheduled_tokens={},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
    )
    worker.execute(scheduler.orders(nothing))
    assert not worker.take_answers()
    worker.close()
    close_scheduler_side(ours, scheduler)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_kernels_are_tried_before_the_first_request(
    on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the stream: vLLM's is CUDA's default one, whose number is 0."""
    tried: list[list[str]] = []

    def warm_up(worker: object, codecs: object, names: list[str], *_: object, **__: object) -> None:
        tried.append(names)

    monkeypatch.setattr("kvtier_adapters.vllm.setup.warm_up", warm_up)
    monkeypatch.setattr(VllmPool, "on_cuda", property(lambda _: on_cuda))
    monkeypatch.setattr(VllmPool, "stream", 0)
    ours = setup({"codec": "int8"})
    register_pool_boundary(ours, open_worker_side(ours), caches())
    assert tried == ([["int8"]] if on_cuda else [])


def test_a_pool_that_is_not_as_configured_is_told_to_the_scheduler() -> None:
    ours = setup()
    assert isinstance(ours.geometry, Geometry)
    worker = open_worker_side(ours)
    register_pool_boundary(ours, worker, {name: each.double() for name, each in caches().items()})
    (refusal,) = worker.take_answers().refusals
    assert "float64" in refusal


def test_a_pool_that_nobody_understands_is_told_to_the_scheduler() -> None:
    ours = setup()
    worker = open_worker_side(ours)
    states: dict[str, Any] = {name: [each] for name, each in caches().items()}
    register_pool_boundary(ours, worker, states)
    (refusal,) = worker.take_answers().refusals
    assert "rank 0: AttributeError" in refusal
