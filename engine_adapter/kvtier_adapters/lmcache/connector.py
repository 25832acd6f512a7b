"""The remote connector that LMCache inside an engine loads: chunks in a KVTier cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvtier.clock import SystemClock
from kvtier.errors import ConfigError
from kvtier_adapters.lmcache.limits import STORES_ACTIVE_MAX
from kvtier_adapters.lmcache.naming import (
    CONNECTOR_SCHEME,
    SEAL_BYTES,
    SYSTEM,
    layout_text,
    seal,
    sealed_bytes,
)
from kvtier_adapters.payloads.complaints import Complaints
from kvtier_adapters.payloads.memory import memory_at
from kvtier_adapters.payloads.options import plug_options
from kvtier_adapters.payloads.runner import Job, Runner
from kvtier_adapters.payloads.store import PlugStore
from kvtier_adapters.payloads.work import Steps

OPTIONS = "kvtier"

#: The connector has a method ``list``, which hides the type where the methods are.
Listed = list[Any]
Flags = list[bool]


class KVTierConnector(RemoteConnector):  # type: ignore[misc]
    """Chunks of one engine process, under LMCache's own keys.

    Every chunk is kept in the size of a full one; the seal behind it tells how much of it counts.
    Whatever goes wrong is a miss, or a chunk that is not stored. LMCache may give up a call: its
    buffer is held until nothing touches it any more.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any
    ) -> None:
        """Open the cache that ``extra_config["kvtier"]`` describes.

        Raises ``KVTierError`` for options that cannot be; LMCache logs it and goes on without.
        """
        metadata = local_cpu_backend.metadata
        super().__init__(config, metadata)
        _check(config)
        options = plug_options((config.extra_config or {}).get(OPTIONS), f"extra_config.{OPTIONS}")
        self._loop, self._cpu = loop, local_cpu_backend
        self._layout = layout_text(self.meta_shapes, self.meta_dtypes)
        clock = SystemClock()
        self._complaints = Complaints("KVTier below LMCache", clock)
        rank = f"rank-{metadata.worker_id}-of-{metadata.world_size}"
        self._store = PlugStore(options, SYSTEM, folder=rank, clock=clock)
        self._face = self._store.face(CONNECTOR_SCHEME)
        self._loads = Runner("kvtier-lmcache-load", self._complaints)
        self._stores = Runner(
            "kvtier-lmcache-store", self._complaints, active_max=STORES_ACTIVE_MAX
        )
        for runner in (self._loads, self._stores):
            self._store.listen(runner.wake)
        self._padding = memoryview(bytes(self.full_chunk_size_bytes))

    async def exists(self, key: Any) -> bool:
        """Tell whether a chunk is held."""
        return await self._prefix([key]) == 1

    def exists_sync(self, key: Any) -> bool:
        """As ``exists``, in the calling thread."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """Yes."""
        return True

    def batched_contains(self, keys: Listed) -> int:
        """Count the chunks before the first that is not held; waits for a tier, for a while."""
        names = _names(keys)
        return self._store.run(self._face.prefix(names, at_once=len(names) or 1))

    def support_batched_async_contains(self) -> bool:
        """Yes."""
        return True

    async def batched_async_contains(self, lookup_id: str, keys: Listed, pin: Any = None) -> int:
        """Count the chunks before the first that is not held. Nothing is pinned."""
        del lookup_id, pin
        return await self._prefix(keys)

    async def get(self, key: Any) -> Any:
        """Return a chunk in memory of LMCache's, or None."""
        return (await self._get([key]))[0]

    def support_batched_get(self) -> bool:
        """Yes."""
        return True

    async def batched_get(self, keys: Listed) -> Listed:
        """Return chunks, None for each that is not there."""
        return await self._get(keys)

    def support_batched_get_non_blocking(self) -> bool:
        """Yes."""
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: Listed) -> Listed:
        """Return the chunks before the first that is not there."""
        del lookup_id
        objects = await self._get(keys)
        missing = objects.index(None) if None in objects else len(objects)
        for late in objects[missing:]:
            if late is not None:
                late.ref_count_down()
        return objects[:missing]

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk; the buffer is free when this returns."""
        await self._put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Yes."""
        return True

    async def batched_put(self, keys: Listed, memory_objs: Listed) -> None:
        """Store chunks; the buffers are free when this returns."""
        await self._put(keys, memory_objs)

    def remove_sync(self, key: Any) -> bool:
        """Forget a chunk; False: it was not there."""
        held = self.exists_sync(key)
        self._face.delete(_names([key]))
        return held

    async def list(self) -> Listed:
        """Return nothing: KVTier keeps digests of keys, not the keys."""
        return []

    async def close(self) -> None:
        """End what is under way, then close the cache; blocks a thread, not the loop."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._store.cancel()
        self._loads.close()
        self._stores.close()
        self._store.close()

    async def _prefix(self, keys: Sequence[Any]) -> int:
        names = _names(keys)
        future: Future[int] = Future()
        steps = self._face.prefix(names, at_once=len(names) or 1)
        self._loads.submit(Job(steps, lambda count: future.set_result(count or 0)))
        return await asyncio.shield(asyncio.wrap_future(future))

    async def _get(self, keys: Sequence[Any]) -> Listed:
        loading = Loading(self, keys)
        self._loads.submit(Job(loading.steps(), loading.end))
        try:
            return await asyncio.shield(asyncio.wrap_future(loading.future))
        except asyncio.CancelledError:
            loading.give_up()
            raise

    async def _put(self, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        future: Future[None] = Future()
        items = [(name, self._sealed(one)) for name, one in zip(_names(keys), objects, strict=True)]
        fitting = [(name, pieces) for name, pieces in items if pieces is not None]
        if len(fitting) < len(items):
            self._complaints.tell("size", "a chunk of a size that its layout cannot have")
        for one in objects:
            one.ref_count_up()  # Until nothing reads it, whoever gives up the call.

        def ended(stored: Flags | None) -> None:
            for one in objects:
                one.ref_count_down()
            if not stored or not all(stored):
                self._complaints.tell("not_stored", "a chunk was not stored")
            future.set_result(None)

        self._stores.submit(Job(self._face.put(fitting), ended))
        await asyncio.shield(asyncio.wrap_future(future))

    def _sealed(self, memory: Any) -> tuple[memoryview, ...] | None:
        """The pieces of a chunk's payload, of one size for all; None: it does not fit."""
        nbytes = memory.get_size()
        full = self.full_chunk_size_bytes
        if not 0 < nbytes <= full or nbytes % self.single_token_size:
            return None
        data = memory_at(memory.data_ptr, nbytes)
        return data, self._padding[nbytes:], memoryview(seal(nbytes, self._layout))

    def room(self) -> Any:
        """Return a buffer of LMCache's for a full chunk; None: there is no room now."""
        shapes, dtypes, form = self.meta_shapes, self.meta_dtypes, self.meta_fmt
        return self._cpu.allocate(shapes, dtypes, form, busy_loop=False)

    def load(self, keys: Sequence[Any], into: Sequence[Any]) -> Steps[Flags]:
        """Fill buffers, each of a full chunk, and cut them to what counts of them."""
        seals = [bytearray(SEAL_BYTES) for _ in keys]
        full = self.full_chunk_size_bytes
        targets = [
            (memory_at(memory.data_ptr, full), found)
            for memory, found in zip(into, seals, strict=True)
        ]
        names = _names(keys)
        filled = yield from self._face.get(names, targets)
        for number, (memory, found) in enumerate(zip(into, seals, strict=True)):
            nbytes = sealed_bytes(found, self._layout) if filled[number] else None
            if filled[number] and not nbytes:
                self._face.delete([names[number]])
                text = "chunks of another layout under the same keys; give each its own weights_id"
                self._complaints.tell("other_layout", text)
            filled[number] = bool(nbytes)
            if nbytes:
                self.reshape_partial_chunk(memory, nbytes)
        return filled


class Loading:
    """Chunks on their way into buffers that are given back if nobody takes them."""

    def __init__(self, connector: KVTierConnector, keys: Sequence[Any]) -> None:
        """Prepare to load; ``future`` gives a buffer for each key, or None."""
        self.future: Future[list[Any]] = Future()
        self._connector, self._keys = connector, keys
        self._buffers: dict[int, Any] = {}
        self._given_up = False
        self._lock = threading.Lock()

    def steps(self) -> Steps[list[bool]]:
        """Take buffers as far as there is room, and fill them."""
        for number in range(len(self._keys)):
            buffer = self._connector.room()
            if buffer is None:
                break
            self._buffers[number] = buffer
        keys = [self._keys[number] for number in self._buffers]
        return (yield from self._connector.load(keys, list(self._buffers.values())))

    def end(self, filled: list[bool] | None) -> None:
        """Give the buffers that are filled to whoever waits, the others back."""
        objects: list[Any] = [None] * len(self._keys)
        for (number, buffer), there in zip(
            self._buffers.items(), filled or [False] * len(self._buffers), strict=True
        ):
            if there:
                objects[number] = buffer
            else:
                buffer.ref_count_down()
        with self._lock:
            if not self._given_up:
                self.future.set_result(objects)
                return
        _give_back(objects)

    def give_up(self) -> None:
        """Have the buffers given back, now or when nothing writes there any more."""
        with self._lock:
            self._given_up = True
            done = self.future.done()
        if done:
            _give_back(self.future.result())


def _give_back(objects: Sequence[Any]) -> None:
    for buffer in objects:
        if buffer is not None:
            buffer.ref_count_down()


def _names(keys: Sequence[Any]) -> list[bytes]:
    return [key.to_string().encode() for key in keys]


def _check(config: Any) -> None:
    """Refuse what LMCache can be told and this connector cannot carry."""
    if config.use_layerwise:
        raise ConfigError(
            "use_layerwise = True: KVTierConnector takes whole chunks; allowed is False"
        )
    if config.remote_serde not in {None, "naive"}:
        raise ConfigError(
            f"remote_serde = {config.remote_serde!r}: KVTierConnector takes chunks as they are; "
            "allowed is 'naive'"
        )
