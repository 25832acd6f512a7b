"""From vLLM's configuration to the two sides: what is read where, and what is opened for it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.cache.cache import Cache
from kvtier.cache.warm_up import warm_up, warm_up_bytes
from kvtier.cache.worker import CacheWorker
from kvtier.clock import SystemClock
from kvtier.codecs.calibration_copies import CalibrationCopies
from kvtier.codecs.known import KnownCodecs
from kvtier.codecs.rope import rope_of_config
from kvtier.config import CacheConfig, format_size
from kvtier.constants import MIB
from kvtier.errors import ConfigError
from kvtier.interfaces import Clock
from kvtier.tiers.memory import map_arena
from kvtier.types import Fidelity, Namespace, Placement
from kvtier_adapters.vllm.cpu_blocks import vllm_transposes_keys_boundary
from kvtier_adapters.vllm.events import EventDesk
from kvtier_adapters.vllm.geometry import Geometry, read_geometry
from kvtier_adapters.vllm.head_groups import stored_head_groups
from kvtier_adapters.vllm.identity import is_altered, weights_id
from kvtier_adapters.vllm.messages import Orders
from kvtier_adapters.vllm.options import BlockForm, Options, parse_options
from kvtier_adapters.vllm.pool import VllmPool, open_pool
from kvtier_adapters.vllm.scheduler_side import Duties, SchedulerSide
from kvtier_adapters.vllm.versions import check_version, fails_loads
from kvtier_adapters.vllm.worker_side import WorkerSide

_log = logging.getLogger("kvtier.vllm")
#: Below vLLM's own, which shows what is no warning, too.
_told = logging.getLogger("vllm.kvtier")

#: What a config says of itself rather than of the model.
_ASIDE: Final = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
#: A rank's part of a chunk fits, but for models whose KV is larger than any that is known.
_WARM_UP_BYTES_MAX: Final = 512 * MIB

#: Caches of this process by vLLM's engine id, for workers beside them; and such workers.
_CACHES: dict[str, Cache] = {}
_WORKERS: dict[str, WorkerSide] = {}


@dataclass(frozen=True, slots=True)
class Setup:
    """What both sides know. ``geometry`` as a text says why the connector is switched off."""

    engine_id: str
    options: Options
    geometry: Geometry | str
    namespace: Namespace | None
    config: CacheConfig | None
    duties: Duties
    rank: int
    backends: Mapping[str, Any]
    clock: Clock


def read_setup(vllm_config: Any, kv_cache_config: Any, version: str) -> Setup:
    """Read everything once. Raises ``ConfigError`` for what the user has to change."""
    transfer = vllm_config.kv_transfer_config
    options = parse_options(transfer.kv_connector_extra_config)
    check_version(version, forced=options.any_version)
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy = {transfer.kv_load_failure_policy!r}: what a tier has lost "
            "would be an error to the client; allowed is 'recompute'"
        )
    opaque = options.blocks is BlockForm.OPAQUE
    geometry = read_geometry(
        vllm_config,
        kv_cache_config,
        opaque=opaque,
        transposes=vllm_transposes_keys_boundary,
    )
    if isinstance(geometry, Geometry) and geometry.by_request and not fails_loads(version):
        geometry = f"vLLM {version} cannot be told that a load into several KV groups has failed"
    namespace, config, block_tokens = None, None, 1
    if isinstance(geometry, Geometry):
        block_tokens = geometry.block_tokens
        config = _cache_config(vllm_config, options, geometry)
        namespace = _namespace(vllm_config, options, geometry, config, version)
    duties = Duties(
        block_tokens=block_tokens,
        running_max=int(vllm_config.scheduler_config.max_num_seqs),
        load_deadline_s=options.load_deadline_s,
        ranks=geometry.tp_size if isinstance(geometry, Geometry) else 1,
        loads=transfer.kv_role != "kv_producer",
        stores=transfer.kv_role != "kv_consumer",
        keeps_on_reset=options.keep_on_reset,
        step_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
        windows=geometry.windows if isinstance(geometry, Geometry) else (0,),
    )
    return Setup(
        engine_id=str(transfer.engine_id),
        options=options,
        geometry=geometry,
        namespace=namespace,
        config=config,
        duties=duties,
        rank=int(vllm_config.parallel_config.rank),
        backends=vllm_config.compilation_config.static_forward_context,
        clock=SystemClock(),
    )


def open_scheduler_side(setup: Setup) -> SchedulerSide | None:
    """Open the cache; None, with a warning that says why, where this model is not served.

    Maps the arena, about a second per 4 GiB. Raises ``ConfigError`` or ``RegistryError`` for
    settings that cannot be.
    """
    if setup.namespace is None or setup.config is None:
        _log.warning("KVTier is switched off: %s", setup.geometry)
        return None
    cache = Cache(setup.config, clock=setup.clock)
    _told.info("KVTier keeps KV in %s", tiers_text(setup.config))
    _CACHES[setup.engine_id] = cache
    cache.prepare(setup.namespace)
    beside = _WORKERS.pop(setup.engine_id, None)
    if beside is not None:
        beside.open(Orders())  # Before the first request has to wait for it.
    arena = cache.arena_handle if setup.config.shared else None
    feed, duties = cache.events, setup.duties
    events = EventDesk(feed, duties.block_tokens) if feed is not None else None
    return SchedulerSide(cache, setup.namespace, duties, setup.clock, arena, events)


def tiers_text(config: CacheConfig) -> str:
    """Return the tiers in one line, without the URLs, which may hold secrets."""
    said = [f"dram {format_size(config.dram_bytes)} ({config.codec})"] if config.dram_bytes else []
    if config.disk is not None:
        places = ", ".join(map(str, config.disk.paths))
        said.append(f"disk {format_size(config.disk.capacity_bytes)} in {places}")
    said += [f"{each.url.partition(':')[0]}:" for each in config.remotes]
    return ", ".join(said)


def close_scheduler_side(setup: Setup, side: SchedulerSide) -> None:
    """Write out what is left and end the cache."""
    _CACHES.pop(setup.engine_id, None)
    side.close()


def open_worker_side(setup: Setup) -> WorkerSide:
    """Return what serves one rank, without a pool yet; where that cannot be, it refuses.

    A rank may see what the scheduler does not, which then has to be told.
    """
    geometry = setup.geometry
    if isinstance(geometry, Geometry):
        rank = setup.rank % geometry.tp_size
        return WorkerSide(Placement(rank, rank, geometry.tp_size))
    side = WorkerSide(Placement(setup.rank, setup.rank, setup.rank + 1))
    side.refuse(geometry)
    return side


def register_pool_boundary(setup: Setup, side: WorkerSide, kv_caches: dict[str, Any]) -> None:
    """Give a rank its KV cache, or have it refuse what is not as the configuration says.

    On CUDA kernels are compiled here, which takes seconds, rather than at the first load.
    """
    try:
        _register_pool(setup, side, kv_caches)
    except Exception as error:  # Whatever it is: vLLM serves as without the connector.
        _log.exception("the KV cache of rank %d cannot be used", setup.rank)
        side.refuse(f"rank {setup.rank}: {type(error).__name__}: {error}")


def _register_pool(setup: Setup, side: WorkerSide, kv_caches: dict[str, Any]) -> None:
    geometry = setup.geometry
    if not isinstance(geometry, Geometry):
        return
    backends = {name: _backend(setup.backends.get(name)) for name in geometry.layer_names}
    pool = open_pool(geometry, kv_caches, backends)
    if isinstance(pool, str):
        side.refuse(pool)
        return
    if pool.on_cuda:
        _warm_up(setup, side.placement, pool)
    side.serve(lambda orders: _open_worker(setup, side.placement, pool, orders))
    if setup.config is not None and not setup.config.shared:
        _WORKERS[setup.engine_id] = side


def _open_worker(
    setup: Setup, placement: Placement, pool: VllmPool, orders: Orders
) -> CacheWorker | str:
    """Reach the arena: the cache's own in this process, else by the handle in the orders."""
    cache = _CACHES.get(setup.engine_id)
    if cache is not None:
        worker = CacheWorker(
            placement,
            cache.arena,
            codecs=cache.codecs,
            window=cache.window,
            clock=setup.clock,
        )
    elif orders.arena is not None:
        codecs = _codecs(setup)
        worker = CacheWorker(placement, map_arena(orders.arena), codecs=codecs, clock=setup.clock)
    else:
        return "the cache is in another process, and its arena is not shared"
    worker.register_pool(pool)
    return worker


def _codecs(setup: Setup) -> KnownCodecs:
    """Return codecs for a process without the cache, with the calibrations that lie on disk."""
    assert setup.config is not None
    assert setup.namespace is not None
    paths = setup.config.disk.paths if setup.config.disk else ()
    codecs = KnownCodecs(CalibrationCopies(list(map(Path, paths))) if paths else None)
    codecs.find(setup.namespace, setup.config.codecs)
    return codecs


def _warm_up(setup: Setup, placement: Placement, pool: VllmPool) -> None:
    """Compile the kernels with an arena that nobody else uses, before vLLM computes anything."""
    assert setup.config is not None
    assert setup.namespace is not None
    codecs = _codecs(setup)
    names = codecs.foreseen(setup.namespace, setup.config.codecs)
    layout, place = setup.namespace.layout, placement
    nbytes = min(warm_up_bytes(codecs, names, layout, place), _WARM_UP_BYTES_MAX)
    arena = memoryview(bytearray(nbytes))
    worker = CacheWorker(place, arena, codecs=codecs, clock=setup.clock)
    worker.register_pool(pool)
    warm_up(
        worker,
        codecs,
        names,
        layout,
        block_tokens=pool.block_tokens,
        arena_bytes=nbytes,
        placement=place,
        workers=setup.config.workers,
    )
    worker.close()


def _backend(layer: Any) -> str:
    """Return the name of a layer's attention, or ``unknown``."""
    backend = getattr(layer, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else "unknown"


def _cache_config(vllm_config: Any, options: Options, geometry: Geometry) -> CacheConfig:
    """Return the cache's settings: each data-parallel engine has a folder of its own on disk."""
    parallel = vllm_config.parallel_config
    apart = int(parallel.data_parallel_size) > 1
    folder = f"engine-{int(parallel.data_parallel_rank)}" if apart else ""
    shared = int(parallel.world_size) > 1 or parallel.distributed_executor_backend not in {
        None,
        "uni",
    }
    told = getattr(vllm_config, "kv_events_config", None)
    events = told is not None and bool(told.enable_kv_cache_events)
    return options.cache_config(geometry.placements(), shared=shared, folder=folder, events=events)


def _namespace(
    vllm_config: Any, options: Options, geometry: Geometry, config: CacheConfig, version: str
) -> Namespace:
    """Return the namespace of this engine's KV, without a request's salt and adapter."""
    known = KnownCodecs()
    lossy = [name for name in config.codecs if not known.get(name).traits.exact]
    form = geometry.form(version)
    if lossy and form:
        raise ConfigError(
            f"codec {lossy[0]!r} needs K and V as they are, and here blocks are {form!r}; "
            "allowed is 'raw'"
        )
    model = vllm_config.model_config
    values = {**model.hf_config.to_dict(), "quantization": model.quantization}
    plain = {name: value for name, value in values.items() if name not in _ASIDE}
    identity = options.weights_id or weights_id(
        str(model.model),
        str(model.revision or "main"),
        str(vllm_config.load_config.load_format),
        plain,
        altered=is_altered(model),
        snapshot=_snapshot,
    )
    stores = vllm_config.kv_transfer_config.kv_role != "kv_consumer"
    parts = stored_head_groups(geometry, options.head_groups, stores=stores)
    chunk_tokens = options.chunk_tokens_for(geometry.block_tokens, geometry.window_tokens)
    return Namespace(
        weights_id=identity,
        layout=geometry.layout(chunk_tokens, parts),
        rope=_rope(model.hf_text_config.to_dict()),
        kv_scales_id=form,
        fidelity=Fidelity.LOSSY if lossy else Fidelity.EXACT,
    )


def _rope(values: Mapping[str, Any]) -> str:
    """Return the rotary embedding's canonical text; one that is not known, by its digest."""
    try:
        return rope_of_config(values).text
    except ConfigError:
        said = {name: value for name, value in values.items() if "rope" in name}
        text = json.dumps(said, sort_keys=True, default=str)
        return f"unknown;{hashlib.sha256(text.encode()).hexdigest()}"


def _snapshot(model: str, revision: str) -> Path | None:
    """Return the folder of a model in the hub's cache on this machine."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None
