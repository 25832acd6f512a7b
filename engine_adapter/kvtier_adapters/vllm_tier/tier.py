"""The secondary tier that vLLM's offloading loads: its interface, over a ``TierDesk``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.clock import SystemClock
from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.payloads.options import plug_options
from kvtier_adapters.payloads.store import PlugStore
from kvtier_adapters.vllm_tier.desk import TierDesk
from kvtier_adapters.vllm_tier.scheme import SYSTEM, chunk_scheme, cpu_flags, device_text
from kvtier_adapters.vllm_tier.versions import check_version

_CPU_INFO = Path("/proc/cpuinfo")


class KVTierTier(SecondaryTierManager):  # type: ignore[misc]
    """Keeps what vLLM's CPU tier holds on KVTier's tiers, verified and bounded.

    One per replica, in the scheduler's process. Whatever goes wrong is a miss, and vLLM computes.
    When vLLM resets its cache, as it does when weights are changed, everything is forgotten, unless
    ``keep_on_reset``.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        locality: str | None = None,
        keep_on_reset: bool = False,
        any_version: bool = False,
        **options: Any,
    ) -> None:
        """Open the cache that the other options describe.

        Raises ``KVTierError`` for options that cannot be, and for a version of vLLM that is not
        tested unless ``any_version``: then vLLM does not start.
        """
        check_version(vllm.__version__, forced=any_version)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._keep_on_reset = keep_on_reset
        self._chunks = primary_kv_view.cast("B")
        config, clock = offloading_spec.config, SystemClock()
        self._complaints = Complaints("KVTier below vLLM's CPU tier", clock)
        plug = plug_options(options, "secondary_tiers")
        replica = f"replica-{config.parallel.data_parallel_index}"
        store = PlugStore(plug, SYSTEM, folder=replica, clock=clock)
        flags = cpu_flags(_CPU_INFO.read_text("utf-8")) if _CPU_INFO.exists() else ""
        device = device_text(str(current_platform.device_type), flags)
        scheme = chunk_scheme(config, self.block_size_bytes, vllm.__version__, device)
        self._desk = TierDesk(store, scheme, self._complaints)

    def lookup(self, key: OffloadKey, req_context: object) -> LookupResult:
        """Tell whether a chunk is held."""
        del req_context
        held = self._desk.held(bytes(key))
        if held is None:
            return LookupResult.RETRY
        return LookupResult.HIT if held else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Begin a cascade."""
        self._submit_boundary(job_metadata, self._desk.store)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin a promotion."""
        self._submit_boundary(job_metadata, self._desk.load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that came back, each once."""
        return [
            JobResult(
                job_id=done.job_id,
                success=done.complete,
                successful_keys=None if done.complete else done.good or None,
                transfer_time=done.seconds,
                transfer_bytes=len(done.good) * self.block_size_bytes,
            )
            for done in self._desk.take_finished()
        ]

    def has_pending_work(self) -> bool:
        """Have vLLM ask on while a job has not come back."""
        return self._desk.open_jobs > 0

    def on_new_request(self, req_context: object) -> RequestOffloadingContext:
        """Every chunk for itself."""
        del req_context
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until every job has come back; then forget everything, if vLLM's reset means that.

        Bounded by the deadlines of the jobs.
        """
        if not self._desk.drain():
            self._complaints.tell("drain", "a job did not come back")
        if not self._keep_on_reset:
            self._desk.forget_all()

    def shutdown(self) -> None:
        """End what is under way, close the cache, and let go of vLLM's memory."""
        self._desk.close()
        self._chunks.release()

    def _submit_boundary(self, job: Any, submit: Any) -> None:
        """A job that is lost would pin its chunks for ever, so it comes back whatever happens."""
        try:
            keys = [bytes(key) for key in job.keys]
            chunks = self._slices(job.chunk_ids)
            if len(keys) != len(chunks):
                raise ValueError(f"{len(keys)} keys for {len(chunks)} chunks")
        except Exception as error:  # A job that is lost would hang vLLM.
            self._complaints.tell("job", f"a job that cannot be read: {error!r}")
            self._desk.fail(job.job_id, len(job.keys))
            return
        submit(job.job_id, keys, chunks)

    def _slices(self, chunk_ids: Sequence[int]) -> list[memoryview]:
        size = self.block_size_bytes
        return [self._chunks[int(one) * size : (int(one) + 1) * size] for one in chunk_ids]
