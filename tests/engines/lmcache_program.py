"""Run inside LMCache's own environment: real adapters and back ends, ordered by JSON on stdin.

``lmcache_program.py l2``: an L2 adapter as LMCache's server makes it, and steps to do with it.
``lmcache_program.py remote``: a remote back end of LMCache inside an engine, with our connector.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import sys
import threading
import time
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

WAIT_S = 60.0
SHAPE = torch.Size([2, 4, 16, 64])
TOKENS = 16


def content(number: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Bytes that no other number has."""
    nbytes = shape.numel() * dtype.itemsize
    seed = hashlib.sha256(b"%d" % number).digest()
    data = bytearray((seed * (nbytes // len(seed) + 1))[:nbytes])
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class Adapter:
    """An L2 adapter with buffers, driven as LMCache's controllers do."""

    def __init__(self, spec: dict[str, Any]) -> None:
        options = get_l2_adapter_config_class(spec["type"]).from_dict(spec)
        self.adapter = create_l2_adapter(options)
        self.allocator = MixedMemoryAllocator(2**26, align_bytes=4096)

    def keys(self, numbers: list[int], salt: str = "") -> list[Any]:
        return [
            ObjectKey(number.to_bytes(32, "big"), "org/model", 0x01000100, 0, salt)
            for number in numbers
        ]

    def buffers(self, count: int, dtype: torch.dtype) -> list[Any]:
        made: list[Any] = self.allocator.batched_allocate([SHAPE], [dtype], count)
        return made

    def wait(self, descriptor: int, ask: Any) -> Any:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        end = time.monotonic() + WAIT_S
        while (answer := ask()) is None:
            if time.monotonic() > end:
                raise SystemExit("the adapter did not answer")
            if poller.poll(1000):
                os.read(descriptor, 8)
        return answer

    def store(self, numbers: list[int], dtype: torch.dtype, salt: str) -> bool:
        buffers = self.buffers(len(numbers), dtype)
        for number, buffer in zip(numbers, buffers, strict=True):
            buffer.tensor.copy_(content(number, SHAPE, dtype))
        task = self.adapter.submit_store_task(self.keys(numbers, salt), buffers)
        done: dict[int, Any] = {}

        def ask() -> Any:
            done.update(self.adapter.pop_completed_store_tasks())
            return done.get(task)

        result = self.wait(self.adapter.get_store_event_fd(), ask)
        self.free(buffers)
        return bool(result.is_successful())

    def load(self, numbers: list[int], dtype: torch.dtype, salt: str) -> list[str]:
        """``same``, ``miss``, or ``wrong`` for what is said to be there and is not."""
        buffers = self.buffers(len(numbers), dtype)
        for buffer in buffers:
            buffer.tensor.zero_()
        task = self.adapter.submit_load_task(self.keys(numbers, salt), buffers)
        found = self.wait(
            self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task)
        )
        there = set(found.get_indices_list())
        answers = []
        for position, (number, buffer) in enumerate(zip(numbers, buffers, strict=True)):
            right = same(buffer.tensor, content(number, SHAPE, dtype))
            answers.append(("same" if right else "wrong") if position in there else "miss")
        self.free(buffers)
        return answers

    def lookup(self, numbers: list[int], dtype: torch.dtype, salt: str) -> list[int]:
        del dtype
        task = self.adapter.submit_lookup_and_lock_task(self.keys(numbers, salt), {})
        ask = self.adapter.query_lookup_and_lock_result
        found = self.wait(self.adapter.get_lookup_and_lock_event_fd(), lambda: ask(task))
        return [numbers[index] for index in found.get_indices_list()]

    def unlock(self, numbers: list[int], dtype: torch.dtype, salt: str) -> None:
        del dtype
        self.adapter.submit_unlock(self.keys(numbers, salt))

    def delete(self, numbers: list[int], dtype: torch.dtype, salt: str) -> None:
        del dtype
        self.adapter.delete(self.keys(numbers, salt))

    def status(self, *_: Any) -> Any:
        return self.adapter.report_status()

    def usage(self, *_: Any) -> int:
        return int(self.adapter.get_usage().total_bytes_used)

    def free(self, buffers: list[Any]) -> None:
        for buffer in buffers:
            buffer.ref_count_down()


def l2(orders: dict[str, Any]) -> list[Any]:
    adapter = Adapter(orders["adapter"])
    answers = []
    for name, numbers, dtype, salt in orders["steps"]:
        answers.append(getattr(adapter, name)(numbers, getattr(torch, dtype), salt))
    adapter.adapter.close()
    return answers


LAYERS, WIDTH = 2, 64
#: Tokens of the chunks that are stored; the last one is short.
CHUNKS = (TOKENS, TOKENS, TOKENS, TOKENS, 5)


class Remote:
    """LMCache's remote back end with our connector, and a loop as an engine has it."""

    def __init__(self, options: dict[str, Any]) -> None:
        metadata = LMCacheMetadata(
            model_name="org/model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, TOKENS, 2, WIDTH // 2),
            chunk_size=TOKENS,
        )
        config = LMCacheEngineConfig.from_defaults(
            max_local_cpu_size=0.02,
            chunk_size=TOKENS,
            local_cpu=False,
            blocking_timeout_secs=int(WAIT_S),
            remote_url="plugin://kvtier",
            remote_serde="naive",
            remote_storage_plugins=["kvtier"],
            extra_config={
                "remote_storage_plugin.kvtier.module_path": "kvtier_adapters.lmcache",
                "remote_storage_plugin.kvtier.class_name": "KVTierConnector",
                "kvtier": options,
            },
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.local = LocalCPUBackend(config, metadata, "cpu")
        self.back_end = RemoteBackend(config, metadata, self.loop, self.local, "cpu")
        self.keys = [CacheEngineKey("org/model", 1, 0, n, torch.bfloat16) for n in range(6)]
        self.references: set[int] = set()

    def put(self, number: int, tokens: int) -> None:
        stored = threading.Event()
        buffer = self.local.allocate(shape_of(tokens), torch.bfloat16)
        buffer.tensor.copy_(content(number, shape_of(tokens), torch.bfloat16))
        self.back_end.batched_submit_put_task(
            [self.keys[number]], [buffer], on_complete_callback=lambda *_: stored.set()
        )
        if not stored.wait(WAIT_S):
            raise SystemExit("a put did not end")
        self.references.add(buffer.get_ref_count())
        buffer.ref_count_down()

    def get(self) -> tuple[list[bool], list[int]]:
        """Tell which chunks came back right, and which did not come."""
        objects = self.back_end.batched_get_blocking(self.keys)
        right = [
            buffer is not None
            and same(buffer.tensor, content(number, shape_of(tokens), torch.bfloat16))
            for number, (buffer, tokens) in enumerate(zip(objects, CHUNKS, strict=False))
        ]
        for buffer in objects:
            if buffer is not None:
                self.references.add(buffer.get_ref_count())
                buffer.ref_count_down()
        return right, [number for number, buffer in enumerate(objects) if buffer is None]

    async def give_up(self, count: int) -> None:
        """Begin gets and cancel them at once, as LMCache does at its time limit."""
        for number in range(count):
            task = asyncio.ensure_future(self.back_end.connection.get(self.keys[number % 4]))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def wait(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.wait(self.back_end.connection.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


def shape_of(tokens: int) -> torch.Size:
    return torch.Size([2, LAYERS, tokens, WIDTH])


def remote(orders: dict[str, Any]) -> dict[str, Any]:
    """Store and load chunks through LMCache's remote back end; tell what came back."""
    session = Remote(orders["options"])
    if orders["store"]:
        for number, tokens in enumerate(CHUNKS):
            session.put(number, tokens)
    session.wait(session.give_up(orders["given_up"]))
    found: dict[str, Any] = {"prefix": session.back_end.batched_contains(session.keys)}
    found["same"], found["missing"] = session.get()
    first = session.keys[0]
    found["removed"] = [session.back_end.remove(first), session.back_end.contains(first)]
    found["references"] = sorted(session.references)
    session.close()
    return found


if __name__ == "__main__":
    found = {"l2": l2, "remote": remote}[sys.argv[1]](json.load(sys.stdin))
    print("RESULT " + json.dumps(found), flush=True)  # noqa: T201
