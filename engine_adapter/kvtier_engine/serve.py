"""Assembly: from settings to an engine with its model, pool and cache, and to the application."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI

from kvtier.cache.cache import Cache
from kvtier.cache.planner import chunk_shape
from kvtier.cache.warm_up import warm_up
from kvtier.cache.worker import CacheWorker
from kvtier.clock import SystemClock
from kvtier.codecs.known import KnownCodecs
from kvtier.config import CacheConfig, format_size
from kvtier.errors import ConfigError
from kvtier.obs.event_publisher import EventPublisher
from kvtier.obs.prometheus import registry_of
from kvtier.obs.spans import OtelSpans, Spans
from kvtier.types import KVLayout, Namespace, Placement
from kvtier_engine.access_recorder import AccessRecorder, open_recorder
from kvtier_engine.api.admission import Admission
from kvtier_engine.api.app import Health, create_app
from kvtier_engine.api.limits import QUEUED_SEQUENCES_MAX
from kvtier_engine.api.ports import ServedModel
from kvtier_engine.api.service import Service
from kvtier_engine.block_pool import BlockPool
from kvtier_engine.cache_link import CacheLink
from kvtier_engine.core import EngineCore, tell_nobody
from kvtier_engine.device import device_name
from kvtier_engine.engine import Engine
from kvtier_engine.engine_series import ENGINE_SERIES, ENGINE_TENANT_SERIES
from kvtier_engine.held import CacheHeld
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.link import Link, NoLink
from kvtier_engine.models.config import ModelConfig
from kvtier_engine.namespace import namespace_of
from kvtier_engine.options import DtypeChoice
from kvtier_engine.refusal import EngineLimits
from kvtier_engine.runner import ModelRunner
from kvtier_engine.scheduling import SchedulerConfig
from kvtier_engine.settings import EngineConfig, Settings
from kvtier_engine.snapshot import Snapshot
from kvtier_engine.status import Facts, health_of, is_degraded, stats_of, told_pins
from kvtier_engine.tokenizer import Tokenizer
from kvtier_engine.weights.load import LoadedModel, kv_layout, load_model, model_config

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tiers:
    """A cache and the worker that moves between it and the pool."""

    cache: Cache
    worker: CacheWorker
    namespace: Namespace


class Server:
    """Everything that serves, put together. Its application is run once; then it is closed."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        tokenizer: Tokenizer,
        model: ServedModel,
        facts: Facts,
        tiers: Tiers | None,
        recorder: AccessRecorder | None,
        publisher: EventPublisher | None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = model
        self.facts = facts
        self.admission = Admission(_sequences_max(settings.config))
        self._tiers = tiers
        self._recorder = recorder
        self._publisher = publisher
        self._started = False
        self._clock = SystemClock()
        self._began_s = self._clock.now()
        held = None if tiers is None else CacheHeld(tiers.cache, tiers.namespace)
        self._service = Service(engine, self.admission, self._clock, held)
        tenants = ENGINE_TENANT_SERIES if settings.config.tenant_metrics else ()
        self._registry = registry_of(self.snapshot, ENGINE_SERIES + tenants)

    def snapshot(self) -> Snapshot:
        """Return every figure as it stands. On the event loop's thread."""
        cache = None if self._tiers is None else self._tiers.cache.stats()
        return Snapshot(
            engine=self.engine.stats(),
            cache=cache,
            requests=self._service.counters,
            block_bytes=self.facts.block_bytes,
            degraded=is_degraded(self.facts, cache),
        )

    def health(self) -> Health:
        """Return what ``/health`` answers."""
        now = self.snapshot()
        draining = self.admission.draining
        return health_of(self.model, self.facts, now.engine, now.cache, draining=draining)

    def stats(self) -> dict[str, Any]:
        """Return what ``/v1/kvtier/stats`` answers."""
        uptime_s = self._clock.now() - self._began_s
        tenants = self.settings.config.tenant_metrics
        now = self.snapshot()
        return stats_of(self.model, self.facts, now, uptime_s=uptime_s, tenants=tenants)

    def pins(self) -> dict[str, Any]:
        """Return what ``/v1/kvtier/pins`` answers."""
        return {"pins": [] if self._tiers is None else told_pins(self._tiers.cache.holdings.pins())}

    def application(self) -> FastAPI:
        """Return the HTTP application; its lifespan starts the engine and closes everything."""
        return create_app(
            self._service,
            self.tokenizer,
            self.model,
            self.settings,
            health=self.health,
            stats=self.stats,
            pins=self.pins,
            registry=self._registry,
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        del app
        self._started = True
        self.engine.start()
        if self._recorder is not None:
            self._recorder.start()
        events = None if self._tiers is None else self._tiers.cache.events
        if self._publisher is not None and events is not None:
            self._publisher.start(events)
        try:
            yield
        finally:
            # Nobody listens any more, so blocking the loop holds nobody up.
            self.close()

    def close(self) -> None:
        """Abort what still runs, write out what is dirty, end every thread. Blocks; idempotent."""
        if self._started:
            self.engine.stop(0)
        if self._recorder is not None:
            self._recorder.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._tiers is not None:
            self._tiers.worker.close()
            self._tiers.cache.close()


def build(settings: Settings) -> Server:
    """Load the model and put the server together; blocks. Requests wait for the application.

    Raises ``KVTierError`` for settings that cannot be. A cache that cannot be set up is no error:
    the server is degraded and computes everything.
    """
    config = settings.config
    device = device_name(config.device)
    _check_model(config, model_config(config.model))
    dtype = None if config.dtype is DtypeChoice.AUTO else config.dtype.value
    weights_id = config.weights_id or None
    loaded = load_model(config.model, device=device, dtype=dtype, weights_id=weights_id)
    layout = kv_layout(loaded.config, loaded.dtype, config.chunk_tokens, config.head_groups)
    pool = _pool(config, layout, device)
    model = ServedModel(
        name=config.served_model_name or loaded.name,
        context_tokens=_context_tokens(config, loaded, pool),
        vocab_size=loaded.config.vocab_size,
        weights_id=loaded.weights_id,
        created=int(time.time()),
    )
    cache_config = config.cache_config()
    chunk_bytes = chunk_shape(layout, KnownCodecs().get(config.codec)).chunk_bytes
    if cache_config is not None:
        _check_chunks(cache_config, chunk_bytes, config.chunk_tokens, model.context_tokens)
    runner = ModelRunner(loaded, pool, max_rows=config.max_num_seqs)
    tried = runner.warm_up()
    namespace = namespace_of(loaded, layout, cache_config)
    with ExitStack() as undo:
        recorder = _recorder(config, namespace)
        if recorder is not None:
            undo.callback(recorder.close)
        spans = _spans(config)
        publisher = _publisher(config)
        if publisher is not None:
            undo.callback(publisher.close)
        # The tiers have threads, so they come last: nothing that could fail is left to do.
        tiers, problem = _tiers_boundary(cache_config, pool, namespace, spans)
        undo.pop_all()
    if tiers is not None and tried[0]:
        tiers.cache.costs.serve(f"{loaded.weights_id} {loaded.dtype} {device}", *tried)
    engine = _engine(config, loaded, namespace, runner, pool, model, tiers, recorder)
    facts = Facts(
        device=device,
        dtype=loaded.dtype,
        block_tokens=config.block_tokens,
        block_bytes=pool.bytes_per_block,
        chunk_tokens=config.chunk_tokens,
        codec=config.codec,
        stored_bytes_per_token=chunk_bytes / config.chunk_tokens,
        cache_problem=problem,
    )
    return Server(settings, engine, loaded.tokenizer, model, facts, tiers, recorder, publisher)


def _recorder(config: EngineConfig, namespace: Namespace) -> AccessRecorder | None:
    if not config.access_log:
        return None
    try:
        return open_recorder(Path(config.access_log), namespace)
    except ConfigError as error:
        raise ConfigError(f"--access-log: {error}") from error


def _spans(config: EngineConfig) -> Spans | None:
    if not config.traces:
        return None
    try:
        return OtelSpans()
    except ConfigError as error:
        raise ConfigError(f"--traces: {error}") from error


def _publisher(config: EngineConfig) -> EventPublisher | None:
    if not config.kv_events:
        return None
    try:
        return EventPublisher(config.kv_events, clock=SystemClock())
    except ConfigError as error:
        raise ConfigError(f"--kv-events: {error}") from error


def _engine(
    config: EngineConfig,
    loaded: LoadedModel,
    namespace: Namespace,
    runner: ModelRunner,
    pool: KVPool,
    model: ServedModel,
    tiers: Tiers | None,
    recorder: AccessRecorder | None,
) -> Engine:
    clock = SystemClock()
    blocks = BlockPool(pool.block_count, pool.block_tokens)
    link: Link = NoLink()
    if tiers is not None:
        link = CacheLink(tiers.cache, tiers.worker, namespace, blocks)
    core = EngineCore(
        runner,
        blocks,
        link,
        config=SchedulerConfig(config.max_num_seqs, config.max_num_batched_tokens),
        detokenizer=partial(loaded.tokenizer.detokenizer),
        end_ids=frozenset(loaded.tokenizer.eos_ids),
        clock=clock,
        on_admitted=tell_nobody if recorder is None else recorder.note,
    )
    limits = EngineLimits(model.context_tokens, model.vocab_size, _sequences_max(config))
    return Engine(core, limits, clock)


def _pool(config: EngineConfig, layout: KVLayout, device: str) -> KVPool:
    tokens, nbytes = config.block_tokens, config.kv_bytes
    try:
        return KVPool(layout, block_tokens=tokens, capacity_bytes=nbytes, device=device)
    except ConfigError as error:
        raise ConfigError(f"--kv-bytes {format_size(nbytes)}: {error}") from error
    except (OSError, OverflowError, MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"--kv-bytes {format_size(nbytes)}: {device} has no such memory ({error})"
        ) from error


def _tiers_boundary(
    config: CacheConfig | None, pool: KVPool, namespace: Namespace, spans: Spans | None
) -> tuple[Tiers | None, str]:
    """Open the cache, or say why there is none: a cache is worth less than an answer."""
    if config is None:
        return None, ""
    try:
        cache = Cache(config, spans=spans)
    except ConfigError as error:
        raise ConfigError(f"--dram {format_size(config.dram_bytes)}: {error}") from error
    # Whatever it is: requests are answered without a cache.
    except Exception as error:
        _log.exception("the cache could not be set up; everything will be computed")
        return None, f"{type(error).__name__}: {error}"
    worker = CacheWorker(Placement(), cache.arena, codecs=cache.codecs, window=cache.window)
    worker.register_pool(pool)
    cache.codecs.find(namespace, config.codecs)
    # Before there is something to learn: what it moves is no model's KV.
    warm_up(
        worker,
        cache.codecs,
        cache.codecs.foreseen(namespace, config.codecs),
        namespace.layout,
        block_tokens=pool.block_tokens,
        arena_bytes=config.arena_bytes,
    )
    cache.prepare(namespace)
    return Tiers(cache, worker, namespace), ""


def _check_model(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ``ConfigError`` for what is not to be had with this model, before it is loaded."""
    heads, parts, wanted = model.kv_heads, config.head_groups, config.max_model_len
    if heads % parts and parts % heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"--head-groups {parts}: the model has {heads} KV heads; allowed: {divisors}, or a "
            f"multiple of {heads}"
        )
    if wanted > model.context_tokens:
        raise ConfigError(
            f"--max-model-len {wanted}: the model knows {model.context_tokens} tokens"
        )


def _sequences_max(config: EngineConfig) -> int:
    return config.max_num_seqs + QUEUED_SEQUENCES_MAX


def _context_tokens(config: EngineConfig, loaded: LoadedModel, pool: KVPool) -> int:
    """Return the context limit: what the model knows, the pool holds and the operator wants."""
    held = pool.block_count * pool.block_tokens
    if held < config.chunk_tokens:
        needed = format_size(pool.bytes_per_block * (config.chunk_tokens // config.block_tokens))
        raise ConfigError(
            f"--kv-bytes {format_size(config.kv_bytes)} holds {held} tokens, less than a chunk of "
            f"{config.chunk_tokens}; allowed: {needed} or more"
        )
    known, wanted = loaded.config.context_tokens, config.max_model_len
    if wanted > held:
        raise ConfigError(
            f"--max-model-len {wanted} does not fit into --kv-bytes "
            f"{format_size(config.kv_bytes)}, which holds {held} tokens"
        )
    return wanted or min(known, held)


def _check_chunks(
    config: CacheConfig, chunk_bytes: int, chunk_tokens: int, context_tokens: int
) -> None:
    """Raise ``ConfigError`` for tiers that could never give anything back."""
    if chunk_tokens >= context_tokens:
        raise ConfigError(
            f"--chunk-tokens {chunk_tokens}: nothing could be cached, because the context limit "
            f"is {context_tokens} tokens; allowed: less than that, or --no-cache"
        )
    dram = "--dram" if config.dram_bytes else "--dram 0, which stages"
    sizes = {dram: config.arena_bytes}
    if config.disk is not None:
        each = len(config.disk.paths)
        flag = "--disk-bytes" if each == 1 else f"each of {each} shares of --disk-bytes"
        sizes[flag] = config.disk.capacity_bytes // each
    for flag, nbytes in sizes.items():
        if nbytes < chunk_bytes:
            raise ConfigError(
                f"{flag} {format_size(nbytes)} holds no chunk, which takes "
                f"{format_size(chunk_bytes)}"
            )
