"""Which server holds a key: one, the master that sentinels name, or a node of a cluster. Blocks."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Final, Protocol

from redis import Redis
from redis import exceptions as redis_errors
from redis.crc import key_slot
from redis.sentinel import Sentinel

from kvtier.clock import SystemClock
from kvtier.interfaces import Clock
from kvtier_connectors.redis.link import pool_of, redis_expected
from kvtier_connectors.redis.settings import Kind, Node, Settings

#: A map of the servers that is younger is not fetched again, however many calls fail.
REFRESH_S_MIN: Final = 0.25


class Topology(Protocol):
    """Knows the servers. Only ``refresh`` blocks; it may be called from several threads."""

    def slot_of(self, name: bytes) -> int:
        """Return the slot of a key; keys of one slot lie on one node."""
        ...

    def node_of(self, slot: int) -> Node | None:
        """Return the node that holds a slot; None: not known."""
        ...

    def moved(self, slot: int, node: Node) -> None:
        """Take in that a node has said where a slot lies now."""
        ...

    def refresh(self) -> None:
        """Ask the servers, at first and when a node failed or is no master any more.

        Raises ``RedisError`` and ``OSError``; what was known stays known then.
        """
        ...

    def primaries(self) -> list[Node]:
        """Return every node that is known to hold keys."""
        ...


def open_topology(settings: Settings, clock: Clock | None = None) -> Topology:
    """Return the topology of that kind; no server is asked yet."""
    if settings.kind is Kind.CLUSTER:
        return ClusterNodes(settings, clock or SystemClock())
    if settings.kind is Kind.SENTINEL:
        return SentinelMaster(settings)
    return OneNode(settings.nodes[0])


class OneNode:
    """A server that is alone, and is never moved."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def slot_of(self, name: bytes) -> int:
        """One slot for everything."""
        del name
        return 0

    def node_of(self, slot: int) -> Node | None:
        """Return the server."""
        del slot
        return self._node

    def moved(self, slot: int, node: Node) -> None:
        """Nothing to learn: a server that speaks of slots is part of a cluster."""

    def refresh(self) -> None:
        """Nothing to ask."""

    def primaries(self) -> list[Node]:
        """Return the server."""
        return [self._node]


class SentinelMaster:
    """The master that the sentinels name."""

    def __init__(self, settings: Settings) -> None:
        asked = replace(settings, login=settings.sentinel_login, database=0)
        self._sentinel = Sentinel([])
        self._sentinel.sentinels = [client_of(asked, node) for node in settings.nodes]
        self._service = settings.service
        self._lock = threading.Lock()
        self._master: Node | None = None

    def slot_of(self, name: bytes) -> int:
        """One slot for everything."""
        del name
        return 0

    def node_of(self, slot: int) -> Node | None:
        """Return the master."""
        del slot
        return self._master

    def moved(self, slot: int, node: Node) -> None:
        """Nothing to learn: masters have no slots."""

    def refresh(self) -> None:
        """Ask the sentinels, one after the other."""
        with self._lock, redis_expected():
            try:
                host, port = self._sentinel.discover_master(self._service)
            finally:
                # A call that ends breaks off what it has connected itself; nor would close() do it.
                for client in self._sentinel.sentinels:
                    client.close()
            self._master = Node(str(host), int(port))

    def primaries(self) -> list[Node]:
        """Return the master."""
        return [self._master] if self._master else []


class ClusterNodes:
    """The nodes of a cluster by slot, as one of them tells."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[int, Node] = {}
        self._asked_at = float("-inf")

    def slot_of(self, name: bytes) -> int:
        """Return the hash slot, from what stands between the braces."""
        return key_slot(name)

    def node_of(self, slot: int) -> Node | None:
        """Return the node of a slot."""
        return self._nodes.get(slot)

    def moved(self, slot: int, node: Node) -> None:
        """Believe the node that sent us on."""
        self._nodes[slot] = node

    def refresh(self) -> None:
        """Fetch the map from the first node that answers, unless somebody just has."""
        with self._lock:
            if self._clock.now() - self._asked_at < REFRESH_S_MIN:
                return
            last: Exception = redis_errors.ClusterDownError("no node of the cluster knows its map")
            for node in dict.fromkeys((*self._nodes.values(), *self._settings.nodes)):
                try:
                    found = slots_from(self._settings, node)
                except (redis_errors.RedisError, OSError) as error:
                    last = error
                    continue
                if found:
                    self._nodes = found
                    self._asked_at = self._clock.now()
                    return
            raise last

    def primaries(self) -> list[Node]:
        """Return the nodes that hold a slot."""
        return list(dict.fromkeys(self._nodes.values()))


def client_of(settings: Settings, node: Node) -> Redis:
    """Return a client of redis-py for what is no payload; the caller closes it."""
    return Redis.from_pool(pool_of(settings, node))


def slots_from(settings: Settings, node: Node) -> dict[int, Node]:
    """Return the cluster's map as one node has it; empty when it knows of none."""
    found: dict[int, Node] = {}
    with redis_expected(), client_of(settings, node) as client:
        answer: Any = client.execute_command("CLUSTER SLOTS")
        for first, last, (host, port, *_), *_ in answer:
            name = host.decode() if isinstance(host, bytes) else host
            # A node that does not know its own name leaves it out: it is the one that was asked.
            owner = Node(name or node.host, int(port))
            found.update(dict.fromkeys(range(first, last + 1), owner))
    return found
