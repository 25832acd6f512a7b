"""``KVTierConnector``: what vLLM calls, handed to the side that this process is on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvtier.interfaces import Clock
from kvtier_adapters.vllm.figures import TOLD_S, figures, since
from kvtier_adapters.vllm.messages import Answers, Orders
from kvtier_adapters.vllm.metrics import KVTierPromMetrics, KVTierStats, by_source
from kvtier_adapters.vllm.published import published
from kvtier_adapters.vllm.setup import (
    Setup,
    close_scheduler_side,
    open_scheduler_side,
    open_worker_side,
    read_setup,
    register_pool_boundary,
)
from kvtier_adapters.vllm.versions import media

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier_adapters.vllm.scheduler_side import SchedulerSide
    from kvtier_adapters.vllm.worker_side import WorkerSide

# vLLM has no types that are seen here, so its classes count as Any.
# mypy: disable-error-code="misc"


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's orders, from the scheduler's side to all workers."""

    orders: Orders


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers' answers, to the scheduler's side."""

    answers: Answers

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Return what two ranks say."""
        return WorkerMetadata(self.answers.merged(other.answers))


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """Tiers below vLLM's KV cache. See the guide for its options.

    One object in the scheduler's process and one beside each rank, as vLLM's contract says; in each
    only the methods of that side are called. Raises ``ConfigError`` for options or versions that
    cannot be; a model that is not served is no error: vLLM runs as without a connector.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        setup = read_setup(vllm_config, kv_cache_config, vllm.__version__)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._setup: Setup = setup
        self._media = media(vllm.__version__)
        self._clock: Clock = setup.clock
        self._told_s = self._clock.now()
        self._told: Mapping[str, float] = {}
        self._begun: Orders | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = open_scheduler_side(setup)
        else:
            self._worker = open_worker_side(setup)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nothing to anybody."""
        return False

    # The scheduler's side.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool whose blocks are held while stores read them."""
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Prefetch where the request will have to wait."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look the prompt up."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.lookup(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin to load into the request's blocks."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Say where these tokens come from, for vLLM's own metrics."""
        if self._scheduler is None:
            return {}
        return by_source(self._scheduler.tiers(request, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Order the step's moves."""
        if self._scheduler is None:
            return StepMetadata(Orders())
        return StepMetadata(self._scheduler.orders(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' answers."""
        said = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(said, WorkerMetadata):
            self._scheduler.answered(said.answers)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished_all_groups``, where there is one."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Store what is left. vLLM may free the blocks: the store holds references of its own."""
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keep an idle engine stepping until stores have been answered."""
        return self._scheduler is not None and self._scheduler.busy

    def take_events(self) -> list[Any]:
        """Return what the tiers hold and hold no more, since the last step, as vLLM's events."""
        if self._scheduler is None:
            return []
        told, duties = self._scheduler.take_events(), self._setup.duties
        return [
            published(event, duties.block_tokens, self._media, group, window)
            for event in told
            for group, window in enumerate(duties.windows)
        ]

    def reset_cache(self) -> bool | None:
        """Make all that is stored of this model unreachable, in every tier."""
        return self._scheduler.reset() if self._scheduler is not None else None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the KV cache, if it is what the configuration says."""
        if self._worker is not None:
            register_pool_boundary(self._setup, self._worker, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Begin the step's moves, before its forward.

        They read what earlier steps computed and write into blocks that nobody reads, so they need
        not wait for the forward, behind which they would end later.
        """
        if self._worker is not None and kv_connector_metadata.orders is not self._begun:
            self._begun = kv_connector_metadata.orders
            self._worker.execute(self._begun)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's moves if that was not asked for yet."""
        del forward_context, kwargs
        self.handle_preemptions(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are waited for by the scheduler."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole chunks are stored once all layers are computed."""

    def wait_for_save(self) -> None:
        """Nothing: blocks are held as long as a store reads them."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended."""
        del finished_req_ids
        received = self._worker.take_received() if self._worker is not None else None
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the same with the requests of windows whose loads have failed; since 0.32."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving = self._worker.take_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that have to be computed after all."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Answer the scheduler's side."""
        answers = self._worker.take_answers() if self._worker is not None else Answers()
        return WorkerMetadata(answers) if answers else None

    # Both sides.

    def get_kv_connector_stats(self) -> KVTierStats | None:
        """Return what was counted since the last time. vLLM asks at the end of each step."""
        if self._scheduler is None:
            return None
        self._scheduler.step_ended()
        now = self._clock.now()
        if now - self._told_s < TOLD_S:
            return None
        scheduler, self._told_s = self._scheduler, now
        found = figures(scheduler.stats(), scheduler.faults, off=bool(scheduler.off))
        changed, self._told = since(self._told, found), found
        return KVTierStats(data=changed) if changed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        """Return figures that came from another process."""
        return KVTierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTierPromMetrics:
        """Register the metrics at vLLM's own endpoint."""
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Finish what was begun and write out what is dirty, within the cache's own deadline."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            close_scheduler_side(self._setup, self._scheduler)
