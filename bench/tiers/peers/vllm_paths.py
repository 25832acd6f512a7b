"""vLLM 0.32's own tiering on a CPU, in lockstep: its primary tier and its ``fs`` tier.

Runs in vLLM's environment. Manager, tiers and files are vLLM's; the copy between the engine and
the primary tier is ours, because vLLM's needs CUDA: a chunk in one piece, where KVTier gathers
blocks. ``cpu``: a store and a load with that copy. ``fs``: the cascade of chunks that the primary
tier holds, and the promotion from cold files with the copy out. One job per chunk, which is what
lets its threads work side by side. A figure counts only once all bytes came back.
"""

from __future__ import annotations

import hashlib
import os
import time

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
import torch
from lockstep import Job, drop_page_cache, serve
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

LIMIT_S = 120
BLOCK = 16
STEP_END = ScheduleEndContext((), ())


def manager(job: Job):  # noqa: ANN201
    tiers = [{"type": "fs", "root_dir": job.folder}] if job.section == "fs" else []
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(BLOCK, ("l0",), 0),),
        worker_kv_bytes_per_block=job.payload,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": job.payload * job.chunks,
            "eviction_policy": "lru",
            "secondary_tiers": tiers,
        },
        engine_id=f"bench{os.getpid()}",
        model=OffloadingModelConfig("bench/m", "bfloat16"),
        cache=OffloadingCacheConfig(BLOCK, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )
    return TieringOffloadingSpec(config).get_manager()


class Engine:
    """Sources and targets of a round, and the steps of a scheduler that moves them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.manager = manager(job)
        view = self.manager.primary_tier.get_kv_memoryview()
        self.rows = torch.frombuffer(view, dtype=torch.uint8).view(len(view), -1)
        shape = (job.chunks, job.payload)
        generator = torch.Generator().manual_seed(7)
        self.sources = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.targets = torch.zeros_like(self.sources)

    def run(self, number: int) -> dict[str, float]:
        keys = [
            make_offload_key(hashlib.sha256(f"{number} {i}".encode()).digest(), 0)
            for i in range(self.job.chunks)
        ]
        on_disk = self.job.section == "fs"
        start = time.perf_counter()
        stored = self.store(keys, f"store {number}")
        if not on_disk:
            stored = time.perf_counter() - start
        else:
            self.manager.reset_cache()
            drop_page_cache(self.job.folder)
            self.rows.zero_()
        start = time.perf_counter()
        self.load(keys, f"load {number}")
        loaded = time.perf_counter() - start
        if not torch.equal(self.sources, self.targets):
            raise SystemExit("gate: a chunk came back different")
        self.targets.zero_()
        self.manager.reset_cache()
        nbytes = self.job.payload * self.job.chunks
        return {"store": nbytes / stored / 1e9, "retrieve": nbytes / loaded / 1e9}

    def store(self, keys: list[bytes], request: str) -> float:
        """Store all chunks; return how long the cascade took, from the last copy on."""
        context = ReqContext(request)
        self.manager.on_new_request(context)
        jobs = []
        for key, source in zip(keys, self.sources, strict=True):
            output = self.manager.prepare_store([key], context)
            (row,) = output.store_spec.chunk_ids
            self.rows[row, : self.job.payload].copy_(source)
            jobs.append([key])
        start = time.perf_counter()
        for job in jobs:
            self.manager.complete_store(job, context)
        while self.manager.has_pending_work():
            self.manager.on_schedule_end(STEP_END)
            time.sleep(0.0002)
        seconds = time.perf_counter() - start
        self.manager.on_request_finished(context)
        return seconds

    def load(self, keys: list[bytes], request: str) -> None:
        context = ReqContext(request)
        self.manager.on_new_request(context)
        end = time.monotonic() + LIMIT_S
        while any(self.manager.lookup(key, context) is not LookupResult.HIT for key in keys):
            self.manager.on_schedule_end(STEP_END)
            if time.monotonic() > end:
                raise SystemExit("no hit")
            time.sleep(0.0002)
        spec = self.manager.prepare_load(keys, context)
        for row, target in zip(spec.chunk_ids, self.targets, strict=True):
            target.copy_(self.rows[row, : self.job.payload])
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)


if __name__ == "__main__":
    serve(lambda job: Engine(job).run)
