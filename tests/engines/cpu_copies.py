"""Lets vLLM 0.32's own offloading run on a CPU: only the copy between its pool and its CPU tier.

Loaded by vLLM as ``spec_module_path``. Scheduler, manager, eviction, secondary tiers and hashing
are vLLM's. The copies are synchronous and of one block a chunk.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies pages at once, in the thread that asks; ``zeros``: brings nothing back but zeros."""

    zeros = False

    def __init__(self, caches: Any, region: Any) -> None:
        self._caches, self._region = caches, region
        self._rows = [region.create_next_worker_view(one.page_size_bytes) for one in caches.tensors]
        self._done: list[Any] = []

    def submit_store(self, job_id: int, source: Any, target: Any) -> bool:
        return self._copy(job_id, source, target, store=True)

    def submit_load(self, job_id: int, source: Any, target: Any) -> bool:
        return self._copy(job_id, target, source, store=False)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, pool: Any, chunks: Any, *, store: bool) -> bool:
        start = nbytes = 0
        for group, size in enumerate(pool.group_sizes):
            blocks = pool.block_ids[start : start + size]
            slots = chunks.block_ids[start : start + size]
            start += size
            for ref in self._caches.group_data_refs[group]:
                pages, rows = (
                    self._caches.tensors[ref.tensor_idx].tensor,
                    self._rows[ref.tensor_idx],
                )
                used = ref.page_size_bytes
                for block, slot in zip(blocks, slots, strict=True):
                    page, row = pages[block, :used], rows[slot, :used]
                    if store:
                        row.copy_(page)
                    elif self.zeros:
                        page.zero_()
                    else:
                        page.copy_(row)
                    nbytes += used
        self._done.append(TransferResult(job_id, True, nbytes, 0.0))
        return True


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering with another worker."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        assert self.blocks_per_chunk == 1
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker
