"""Caches over remotes that do what a test says, with doubles of an engine beside them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvtier.cache.below.remote_epochs import EPOCH_KEYS
from kvtier.cache.cache import Cache
from kvtier.cache.match import Pending, Ready
from kvtier.config import CacheConfig, DiskConfig, RemoteConfig
from kvtier.errors import ConnectorError
from kvtier.interfaces import Clock, Connector, ReadOutcome
from kvtier.testing.engine_double import EngineDouble, wait_until
from kvtier.types import (
    ChunkKey,
    KeyInfo,
    KVLayout,
    Namespace,
    Placement,
    ReadRequest,
    Tier,
    WriteItem,
)
from kvtier_connectors.memory import MemoryConnector
from tests.lib.cache_setup import (
    BLOCK,
    CHUNK,
    CHUNK_BYTES,
    LAYOUT,
    ErrorLog,
    ranks,
    settle,
    tier_stats,
    written,
)

T = TypeVar("T")


class ToyRemote:
    """A connector over memory. ``twist`` turns an operation's answer into another one, or raises.

    An operation in ``held`` waits, before it does anything, until ``release``. What is done with
    records of epochs is an operation of its own, ``epochs``, whatever it is.
    """

    def __init__(self) -> None:
        self.store = MemoryConnector()
        self.twist: dict[str, Callable[[Any], Any]] = {}
        self.held: set[str] = set()
        self.loses = False  # Writes come to nothing.
        self.calls: Counter[str] = Counter()
        self.batches: list[tuple[str, int]] = []
        self.written: list[bytes] = []
        self.closed = False
        self._changed = threading.Condition()

    def hold(self, *operations: str) -> None:
        with self._changed:
            self.held.update(operations)

    def release(self, *operations: str) -> None:
        """Let go on what is held; without ``operations``, all of it."""
        with self._changed:
            self.held.difference_update(operations or set(self.held))
            self._changed.notify_all()

    def wait_for_calls(self, operation: str, count: int) -> None:
        wait_until(lambda: self.calls[operation] >= count, f"{operation} is not called")

    def count(self, operation: str) -> int:
        """Keys that an operation was called for."""
        return sum(count for name, count in self.batches if name == operation)

    def put_epochs(self, *copies: bytes) -> None:
        """Somebody else writes records of epochs, the same or one for each copy."""
        for key, copy in zip(EPOCH_KEYS, copies * 2, strict=False):
            self.put(key, copy)

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return await self._answer("contains", len(keys), lambda: self.store.contains(keys))

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        operation = self._operation("read", [request.key for request in requests])
        return await self._answer(operation, len(requests), lambda: self.store.read(requests, into))

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        async def write() -> list[ConnectorError | None]:
            if operation == "write":
                self.written += [item.key for item in items]
            return [None for _ in items] if self.loses else await self.store.write(items)

        operation = self._operation("write", [item.key for item in items])
        return await self._answer(operation, len(items), write)

    async def delete(self, keys: Sequence[bytes]) -> None:
        operation = self._operation("delete", keys)
        await self._answer(operation, len(keys), lambda: self.store.delete(keys))

    async def close(self) -> None:
        self.closed = True

    async def list(self, prefix: bytes) -> AsyncIterator[KeyInfo]:
        self.calls["list"] += 1
        if "list" in self.twist:
            self.twist["list"](None)
        async for info in self.store.list(prefix):
            yield info

    def _operation(self, name: str, keys: Sequence[bytes]) -> str:
        return "epochs" if set(keys) <= set(EPOCH_KEYS) else name

    async def _answer(self, operation: str, count: int, work: Callable[[], Awaitable[T]]) -> T:
        self.calls[operation] += 1
        self.batches.append((operation, count))
        if operation in self.held:
            await asyncio.to_thread(self._wait, operation)
        answer = await work()
        if operation in self.twist:
            answer = self.twist[operation](answer)
        return answer

    def _wait(self, operation: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: operation not in self.held)

    def objects(self) -> dict[bytes, bytes]:
        """What lies there beside records of epochs; a copy."""
        return {key: data for key, data in self._all().items() if key not in EPOCH_KEYS}

    def epochs(self) -> dict[bytes, bytes]:
        """The records of epochs that lie there; a copy."""
        return {key: data for key, data in self._all().items() if key in EPOCH_KEYS}

    def _all(self) -> dict[bytes, bytes]:
        async def gather() -> dict[bytes, bytes]:
            infos = [info async for info in self.store.list(b"")]
            requests = [ReadRequest(info.key, 0, info.nbytes) for info in infos]
            buffers = [bytearray(info.nbytes) for info in infos]
            await self.store.read(requests, [memoryview(buffer) for buffer in buffers])
            return {info.key: bytes(b) for info, b in zip(infos, buffers, strict=True)}

        return asyncio.run(gather())

    def put(self, key: bytes, data: bytes) -> None:
        """Somebody else writes an object."""
        asyncio.run(self.store.write([WriteItem(key, memoryview(data))]))

    def drop(self, key: bytes) -> None:
        """Somebody else, or the store itself, lets an object go."""
        asyncio.run(self.store.delete([key]))


@dataclass
class RemoteLab:
    """Opens caches over ``remotes``, which outlive them. Every test ends with ``close_all``."""

    folder: Path
    remotes: list[ToyRemote] = field(default_factory=lambda: [ToyRemote()])
    #: What stands between a cache and its remotes.
    wrap: Callable[[Connector], Connector] = lambda inner: inner
    engines: list[EngineDouble] = field(default_factory=list)
    errors: list[logging.LogRecord] = field(default_factory=list)

    @property
    def remote(self) -> ToyRemote:
        """The first one."""
        return self.remotes[0]

    def open(
        self,
        layout: KVLayout = LAYOUT,
        *,
        dram_chunks: int = 32,
        disk_chunks: int | None = None,
        placements: tuple[Placement, ...] = ranks(1),
        clock: Clock | None = None,
        salt: str = "",
        load_deadline_s: float = 5.0,
        pending_deadline_s: float = 5.0,
        block_count: int = 128,
        codec: str = "raw",
        quota_chunks: int = 0,
        **how: Any,
    ) -> EngineDouble:
        """Open a cache; ``how`` goes to each remote's config."""
        disk = None
        if disk_chunks is not None:
            disk = DiskConfig(str(self.folder / "disk"), disk_chunks * CHUNK_BYTES)
        config = CacheConfig(
            dram_bytes=dram_chunks * CHUNK_BYTES,
            disk=disk,
            remotes=tuple(RemoteConfig(f"toy://{n}", **how) for n in range(len(self.remotes))),
            slab_bytes=4096,
            workers=placements,
            codec=codec,
            load_deadline_s=load_deadline_s,
            pending_deadline_s=pending_deadline_s,
            tenant_quota_bytes=quota_chunks * CHUNK_BYTES,
        )

        def connect(url: str) -> Connector:
            return self.wrap(self.remotes[int(url.removeprefix("toy://"))])

        cache = Cache(config, clock=clock, connect=connect)
        engine = EngineDouble(
            cache,
            Namespace("weights", layout, tenant_salt=salt),
            placements=placements,
            block_tokens=BLOCK,
            block_count=block_count,
            clock=clock,
        )
        self.engines.append(engine)
        return engine

    def filled(self, tokens: range, layout: KVLayout = LAYOUT, **how: Any) -> EngineDouble:
        """Store a sequence, restart as ``how`` says: it lies in the remotes alone."""
        chunks = len(tokens) // CHUNK
        engine = self.open(
            layout,
            dram_chunks=chunks + 32,
            block_count=2 * chunks + 32,
            placements=how.get("placements", ranks(1)),
        )
        engine.store(engine.sequence(tokens))
        written(engine)
        self.close(engine)
        return self.open(layout, **how)

    def close(self, engine: EngineDouble, *, timeout_s: float = 10.0) -> None:
        """Wait until nothing moves, look that nothing is left over, and close."""
        settle(engine)
        self.engines.remove(engine)
        engine.close()
        engine.cache.close(timeout_s=timeout_s)

    def close_all(self) -> None:
        for remote in self.remotes:
            remote.twist.clear()
            remote.loses = False
            remote.release()
        for engine in list(self.engines):
            self.close(engine)
        messages = [record.getMessage() for record in self.errors]
        assert not messages, messages


@contextlib.contextmanager
def remote_lab(folder: Path) -> Iterator[RemoteLab]:
    """Give a lab to a test, and look in the end that nothing is left and nothing broke."""
    lab = RemoteLab(folder)
    log = ErrorLog(lab.errors)
    logging.getLogger("kvtier").addHandler(log)
    yield lab
    lab.close_all()
    logging.getLogger("kvtier").removeHandler(log)


def remote_counters(engine: EngineDouble) -> Any:
    return tier_stats(engine.cache, Tier.REMOTE).counters


def first_answer(engine: EngineDouble, tokens: range) -> Ready | Pending:
    """The first answer of a lookup."""
    return engine.cache.match(engine.sequence(tokens))


def tiers_of(match: Ready) -> list[Tier]:
    return [hit.tier for hit in match.hits]


def tokens_of(chunks: int, start: int = 0) -> range:
    return range(start, start + chunks * CHUNK)


def chunk_of(key: ChunkKey, objects: dict[bytes, bytes]) -> list[bytes]:
    """The object keys of a chunk."""
    return sorted(each for each in objects if each.startswith(key))
