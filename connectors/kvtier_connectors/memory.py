"""``memory://name``: objects in this process's memory, for tests and examples."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from typing import Final, Self
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from kvtier.config import url_options
from kvtier.errors import ConnectorError, ConnectorUnavailableError
from kvtier.interfaces import ReadOutcome
from kvtier.types import KeyInfo, ReadRequest, WriteItem


class _Store:
    """Objects by key. Values are immutable, so a reader needs no lock while it copies."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[bytes, bytes] = {}


# A name is shared by the connectors of this process that are open at the same time.
_NAMED: Final[WeakValueDictionary[str, _Store]] = WeakValueDictionary()
_NAMED_LOCK: Final = threading.Lock()


class MemoryConnector:
    """A ``Connector`` and ``Listable`` over a dict. Safe to use from several threads and loops.

    With a name, connectors of one process share what they hold as long as one of them is open;
    without, each has its own.
    """

    def __init__(self, name: str = "") -> None:
        """Open the store of that name, or a private one."""
        with _NAMED_LOCK:
            store = _NAMED.setdefault(name, _Store()) if name else _Store()
        self._store: _Store | None = store

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``memory://`` or ``memory://name``. There are no options."""
        url_options(url, ())
        return cls(urlsplit(url).netloc)

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell for each key whether an object lies there now. A closed connector holds nothing."""
        objects = self._store.objects if self._store else {}
        return [key in objects for key in keys]

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Fill the buffers. A range that ends behind the object gives what there is of it."""
        return [
            self._read_one(request, buffer) for request, buffer in zip(requests, into, strict=True)
        ]

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Keep a copy of each object."""
        if self._store is None:
            return [_closed() for _ in items]
        for item in items:
            data = bytes(item.data)
            with self._store.lock:
                self._store.objects[bytes(item.key)] = data
        return [None for _ in items]

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Remove what is there."""
        if self._store is None:
            return
        with self._store.lock:
            for key in keys:
                self._store.objects.pop(key, None)

    async def close(self) -> None:
        """Let go of the store."""
        self._store = None

    async def list(self, prefix: bytes) -> AsyncIterator[KeyInfo]:
        """Iterate over a snapshot of what is held now."""
        if self._store is None:
            return
        with self._store.lock:
            held = list(self._store.objects.items())
        for key, data in held:
            if key.startswith(prefix):
                yield KeyInfo(key, len(data))

    def _read_one(self, request: ReadRequest, buffer: memoryview) -> ReadOutcome:
        if self._store is None:
            return _closed()
        data = self._store.objects.get(request.key)
        if data is None:
            return None
        part = memoryview(data)[request.offset : request.offset + request.nbytes]
        buffer[: len(part)] = part
        return len(part)


def _closed() -> ConnectorUnavailableError:
    return ConnectorUnavailableError("the connector is closed")
