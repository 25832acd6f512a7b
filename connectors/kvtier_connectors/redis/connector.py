"""The connector behind the Redis URLs: calls of an event loop, done in threads that wait."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Self, TypeVar

from kvtier.errors import ConnectorError
from kvtier.interfaces import ReadOutcome
from kvtier.types import KeyInfo, ReadRequest, WriteItem
from kvtier_connectors.redis.known import Known
from kvtier_connectors.redis.lanes import Lanes
from kvtier_connectors.redis.link import ended_by
from kvtier_connectors.redis.operations import Operations
from kvtier_connectors.redis.settings import Settings, parse_url
from kvtier_connectors.redis.topology import open_topology
from kvtier_connectors.threads import Halt, Threads, call_s_max

_T = TypeVar("_T")


class RedisConnector:
    """A ``Connector`` and ``Listable`` over Redis (6.2 or newer) or Valkey.

    A large object lies in values of 1020 KiB under a name drawn for each write, and a small header
    that is written last; so readers see the old object, the new one or none, and an object of which
    the server has evicted a part is a miss. Needs no transaction; scripts only to clear up.

    With ``ttl_s`` an object goes that long after it was written; without, when the server evicts
    it. Used from one event loop: sockets are waited for in threads of our own. A cancelled call
    breaks off its connections and returns when nothing touches its buffers any more; a connection
    that is just being made takes until ``connect_timeout_s``.
    """

    def __init__(self, settings: Settings) -> None:
        """Does not connect yet."""
        self._settings = settings
        self._topology = open_topology(settings)
        self._known = Known()
        self._threads = Threads(settings.connections, "kvtier-redis")
        self._lanes = Lanes(settings, self._topology, self._threads.executor)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``redis://user:password@host:6379/0?prefix=…``; the guide lists all options."""
        return cls(parse_url(url))

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell whose header is there; a fault is no."""
        found = await self._call(lambda operations: operations.contains(keys))
        return [False] * len(keys) if isinstance(found, ConnectorError) else found

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Fill the buffers. A range that ends behind the object gives what there is of it."""
        nbytes = sum(request.nbytes for request in requests)
        found = await self._call(lambda operations: operations.read(requests, into), nbytes)
        return [found for _ in requests] if isinstance(found, ConnectorError) else found

    async def write(self, items: Sequence[WriteItem]) -> list[ConnectorError | None]:
        """Write all parts, then the headers, then clear up what the headers replaced."""
        nbytes = sum(item.data.nbytes for item in items)
        found = await self._call(lambda operations: operations.write(items), nbytes)
        return [found for _ in items] if isinstance(found, ConnectorError) else found

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the headers, then their parts."""
        await self._call(lambda operations: operations.delete(keys))

    async def close(self) -> None:
        """Close the connections; what runs is finished and closed then."""
        self._threads.close()
        self._lanes.close()

    async def list(self, prefix: bytes) -> AsyncIterator[KeyInfo]:
        """Scan every node for headers, and read them.

        Raises ``ConnectorError`` where a node cannot be read. An object that comes or goes
        meanwhile may or may not be told; one that moves between nodes may be told twice.
        """
        nodes = await self._call(lambda _: self._lanes.nodes())
        if isinstance(nodes, ConnectorError):
            raise nodes
        for node in nodes:
            cursor: int | None = None
            while cursor != 0:
                step = partial(Operations.listed, node=node, cursor=cursor or 0, prefix=prefix)
                found = await self._call(step)
                if isinstance(found, ConnectorError):
                    raise found
                cursor, infos = found
                for info in infos:
                    yield info

    async def _call(
        self, function: Callable[[Operations], _T], nbytes: int = 0
    ) -> _T | ConnectorError:
        """Have one thread do it all; return what it returns, or why it could not be done.

        What takes much longer than so many bytes may is broken off, as when it is cancelled.
        """

        def do(call: Callable[[Operations], _T], halt: Halt) -> _T:
            with ended_by(halt):
                run = partial(self._lanes.run, halt=halt)
                return call(Operations(self._settings, self._topology, self._known, run))

        silence_s = self._settings.connect_timeout_s + self._settings.timeout_s
        limit_s = call_s_max(silence_s, nbytes)
        (found,) = await self._threads.each(do, [function], shares_max=1, limit_s=limit_s)
        return found
