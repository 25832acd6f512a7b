"""A store behind a URL, as somebody sees it who has nothing to do with the caches over it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvtier.cache.below.remote_epochs import EPOCH_KEYS
from kvtier.interfaces import Connector, Listable
from kvtier.registry import connect
from kvtier.types import KeyInfo, ReadRequest, WriteItem

T = TypeVar("T")


class Store:
    """Whatever a connector reaches. One in memory lasts as long as this."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._keeper = connect(url)

    def _do(self, work: Callable[[Connector], Awaitable[T]]) -> T:
        async def done() -> T:
            connector = connect(self.url)
            found = await work(connector)
            await connector.close()
            return found

        return asyncio.run(done())

    def listed(self) -> list[KeyInfo]:
        async def gather(connector: Connector) -> list[KeyInfo]:
            assert isinstance(connector, Listable)
            found = [info async for info in connector.list(b"")]
            return [info for info in found if info.key not in EPOCH_KEYS]

        return self._do(gather)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.listed())

    def get(self, info: KeyInfo) -> bytearray:
        return self.read(info.key, info.nbytes)

    def read(self, key: bytes, nbytes_max: int) -> bytearray:
        data = bytearray(nbytes_max)
        request = ReadRequest(key, 0, nbytes_max)
        (count,) = self._do(lambda connector: connector.read([request], [memoryview(data)]))
        assert isinstance(count, int), count
        return data[:count]

    def put(self, key: bytes, data: bytes) -> None:
        self._do(lambda connector: connector.write([WriteItem(key, memoryview(data))]))

    def empty(self) -> None:
        keys = [info.key for info in self.listed()]
        self._do(lambda connector: connector.delete(keys))
