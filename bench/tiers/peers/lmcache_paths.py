"""LMCache 0.5.6 on a CPU: local CPU and disk, remotes, L2 adapters and fp8, in lockstep.

Runs in LMCache's environment. A store into DRAM takes a buffer of LMCache's and copies a chunk
that lies in one piece, where KVTier gathers blocks. A store on disk is timed from the buffer on. A
retrieval ends with the bytes in tensors of the engine's; disks are read cold. A figure counts
only once all bytes came back.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time

os.environ.update(
    LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1", LMCACHE_LOG_LEVEL="ERROR", PYTHONHASHSEED="0"
)
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lockstep import Job, drop_page_cache, serve

LIMIT_S = 120


class Chunks:
    """The chunks of a round and the tensors they come back to."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.shape = torch.Size([2, job.layers, job.tokens, job.heads * job.dim])
        generator = torch.Generator().manual_seed(7)
        self.sources = [
            torch.randn(self.shape, generator=generator).to(torch.bfloat16)
            for _ in range(job.chunks)
        ]
        self.targets = [torch.zeros_like(source) for source in self.sources]
        self.expected = self.sources

    def speeds(self, store_s: float, retrieve_s: float) -> dict[str, float]:
        for expected, target in zip(self.expected, self.targets, strict=True):
            if not torch.equal(expected.view(torch.int16), target.view(torch.int16)):
                raise SystemExit("gate: a chunk came back different")
            target.zero_()
        nbytes = self.job.payload * self.job.chunks
        return {"store": nbytes / store_s / 1e9, "retrieve": nbytes / retrieve_s / 1e9}


def back_end(job: Job):  # noqa: ANN201
    """The local CPU back end, or behind one the local disk, or a remote at the folder's URL."""
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

    on_disk, remote = job.section == "local_disk", job.section == "remote"
    metadata = LMCacheMetadata(
        model_name="bench",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(job.layers, 2, job.tokens, job.heads, job.dim),
        chunk_size=job.tokens,
    )
    behind = {"local_disk": job.folder, "max_local_disk_size": 20} if on_disk else {}
    if remote:
        behind = {
            "remote_url": job.folder,
            "remote_serde": "naive",
            "blocking_timeout_secs": LIMIT_S,
        }
    config = LMCacheEngineConfig.from_defaults(
        max_local_cpu_size=1.0, chunk_size=job.tokens, local_cpu=not behind, **behind
    )
    cpu = LocalCPUBackend(config, metadata, "cpu")
    if not behind:
        return cpu, cpu
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    if remote:
        return cpu, RemoteBackend(config, metadata, loop, cpu, "cpu")
    return cpu, LocalDiskBackend(config, loop, cpu, "cpu", None, metadata)


def local(job: Job):  # noqa: ANN201
    chunks = Chunks(job)
    cpu, back = back_end(job)

    def run(number: int) -> dict[str, float]:
        first = number * job.chunks
        keys = [CacheEngineKey("bench", 1, 0, first + i, torch.bfloat16) for i in range(job.chunks)]
        left, done = [job.chunks], threading.Event()

        def complete(*_: object) -> None:
            left[0] -= 1
            if not left[0]:
                done.set()

        start = time.perf_counter()
        objects = [cpu.allocate(chunks.shape, torch.bfloat16) for _ in keys]
        for target, source in zip(objects, chunks.sources, strict=True):
            target.tensor.copy_(source)
        if back is not cpu:
            start = time.perf_counter()
        back.batched_submit_put_task(keys, objects, on_complete_callback=complete)
        if not done.wait(LIMIT_S):
            raise SystemExit("a put did not end")
        if job.section == "remote":
            back.contains(keys[-1])  # lm:// does not say that it has taken a put.
        stored = time.perf_counter() - start
        for buffer in objects:
            buffer.ref_count_down()
        if job.section == "local_disk":
            drop_page_cache(job.folder)
        start = time.perf_counter()
        got = back.batched_get_blocking(keys)
        for target, source in zip(chunks.targets, got, strict=True):
            target.copy_(source.tensor)
        retrieved = time.perf_counter() - start
        for buffer in got:
            buffer.ref_count_down()
        for key in keys:
            back.remove(key)
        return chunks.speeds(stored, retrieved)

    return run


def l2_options(job: Job) -> dict[str, object]:
    """What an adapter of its second level is made with; the folder of ``resp`` is its address."""
    if job.section == "resp":
        host, _, port = job.folder.rpartition(":")
        return {"host": host, "port": int(port), "num_workers": 4}
    files: dict[str, object] = {"base_path": job.folder}
    if job.section == "fs_native":
        files |= {"num_workers": 4, "use_odirect": True}
    return files


def l2(job: Job):  # noqa: ANN201
    """Its adapters in C++, four threads each: files with O_DIRECT, RESP; and files in Python."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
    from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator

    chunks = Chunks(job)
    options = {"type": job.section, **l2_options(job)}
    adapter = create_l2_adapter(get_l2_adapter_config_class(job.section).from_dict(options))
    allocator = MixedMemoryAllocator(2**30, align_bytes=4096)
    buffers = allocator.batched_allocate([chunks.shape], [torch.bfloat16], job.chunks)

    def wait(descriptor: int, poll) -> object:  # noqa: ANN001
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        end = time.monotonic() + LIMIT_S
        while (answer := poll()) is None:
            if time.monotonic() > end:
                raise SystemExit("the adapter did not answer")
            if poller.poll(1000):
                os.read(descriptor, 8)
        return answer

    def run(number: int) -> dict[str, float]:
        first = number * job.chunks
        keys = [
            ObjectKey((first + i).to_bytes(32, "big"), "bench", 0x01000100)
            for i in range(job.chunks)
        ]
        for buffer, source in zip(buffers, chunks.sources, strict=True):
            buffer.tensor.copy_(source)
        start = time.perf_counter()
        task = adapter.submit_store_task(keys, buffers)
        stores: dict[object, object] = {}

        def stored_result() -> object:
            stores.update(adapter.pop_completed_store_tasks())
            return stores.get(task)

        wait(adapter.get_store_event_fd(), stored_result)
        stored = time.perf_counter() - start
        for buffer in buffers:
            buffer.tensor.zero_()
        drop_page_cache(job.folder)
        start = time.perf_counter()
        task = adapter.submit_load_task(keys, buffers)
        wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        for target, buffer in zip(chunks.targets, buffers, strict=True):
            target.copy_(buffer.tensor)
        retrieved = time.perf_counter() - start
        adapter.delete(keys)
        return chunks.speeds(stored, retrieved)

    return run


def fp8(job: Job):  # noqa: ANN201
    """Its only lossy serde that runs on a CPU: a cast without a scale, on one core.

    Without the queue that it has around it. A buffer of its own to another, chunk by chunk; in
    the core's time, as ours.
    """
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.serde.fp8 import (
        Fp8QuantizationDeserializer,
        Fp8QuantizationSerializer,
    )
    from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator

    torch.set_num_threads(1)
    chunks = Chunks(job)
    chunks.expected = [source.to(torch.float8_e4m3fn).to(source.dtype) for source in chunks.sources]
    allocator = MixedMemoryAllocator(6 * job.payload * job.chunks + 2**26, align_bytes=4096)
    key = ObjectKey(bytes(32), "bench", 0x01000100)
    bytes_shape = torch.Size([job.payload // 2])

    def buffers(shape: torch.Size, dtype: torch.dtype):  # noqa: ANN202
        return allocator.batched_allocate([shape], [dtype], job.chunks)

    sources = buffers(chunks.shape, torch.bfloat16)
    coded = buffers(bytes_shape, torch.uint8)
    targets = buffers(chunks.shape, torch.bfloat16)
    for buffer, source in zip(sources, chunks.sources, strict=True):
        buffer.tensor.copy_(source)

    def run(_: int) -> dict[str, float]:
        serializer, deserializer = Fp8QuantizationSerializer(), Fp8QuantizationDeserializer()
        start = time.thread_time()
        for source, code in zip(sources, coded, strict=True):
            serializer.serialize(source, code, key)
        stored = time.thread_time() - start
        for target in targets:
            target.tensor.zero_()
        start = time.thread_time()
        for code, target in zip(coded, targets, strict=True):
            deserializer.deserialize(code, target, key)
        retrieved = time.thread_time() - start
        for target, buffer in zip(chunks.targets, targets, strict=True):
            target.copy_(buffer.tensor)
        return chunks.speeds(stored, retrieved)

    return run


PATHS = {"fs": l2, "fs_native": l2, "resp": l2, "fp8": fp8}

if __name__ == "__main__":
    serve(lambda job: PATHS.get(job.section, local)(job))
