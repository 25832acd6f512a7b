"""Least recently used by bytes, leaves first.

Callers touch a sequence from its last chunk to its first, so that the deepest suffix ages first;
the leaf rule then rarely changes the order and always keeps what is held reachable.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.errors import ConfigError
from kvtier.types import ChunkKey, Entry, Features

# The heap of leaves is rebuilt when stale items outnumber live ones by this factor.
_HEAP_SLACK = 4
_HEAP_MIN = 64


@dataclass(slots=True)
class _Node:
    entry: Entry
    stamp: int
    children: dict[ChunkKey, None] = field(default_factory=dict)  # an ordered set


class LRU:
    """An ``EvictionPolicy``. Owned by its tier and called under the tier's lock.

    ``pinned`` tells which chunks must not leave now. A decision costs O(log n) amortised.
    """

    def __init__(self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]) -> None:
        if capacity_bytes <= 0:
            raise ConfigError(f"policy capacity is {capacity_bytes}; it must be above 0 bytes")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._pinned = pinned
        self._nodes: dict[ChunkKey, _Node] = {}
        # (stamp, key), stale items among them: one is live iff its node is a leaf of that stamp.
        self._leaves: list[tuple[int, ChunkKey]] = []
        self._clock = 0
        # Counts down: what lost its parent is older than everything that was ever touched.
        self._orphan_clock = 0
        # Children of parents that were removed, in case a parent comes back.
        self._orphans: dict[ChunkKey, dict[ChunkKey, None]] = {}

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        """See ``EvictionPolicy.admit``. ``now`` is not used: order is time enough."""
        del now
        assert entry.key not in self._nodes, "admit of a key that is held"
        if entry.nbytes > self.capacity_bytes:
            return None
        self._insert(entry)
        victims: list[ChunkKey] = []
        spared: list[tuple[int, ChunkKey]] = []
        evicted: list[_Node] = []
        while self.used_bytes > self.capacity_bytes and self._leaves:
            item = heapq.heappop(self._leaves)
            node = self._live(item)
            if node is None:
                continue
            if item[1] == entry.key or self._pinned(item[1]):
                spared.append(item)
                continue
            self._forget(node)
            victims.append(item[1])
            evicted.append(node)
        for item in spared:
            heapq.heappush(self._leaves, item)
        if self.used_bytes > self.capacity_bytes:
            self._forget(self._nodes[entry.key])
            for node in reversed(evicted):
                self._restore(node)
            return None
        return victims

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        """See ``EvictionPolicy.touch``."""
        del now, features
        node = self._nodes.get(key)
        if node is None:
            return
        self._clock += 1
        node.stamp = self._clock
        self._push_if_leaf(node)

    def remove(self, key: ChunkKey) -> None:
        """See ``EvictionPolicy.remove``. What descended from the key becomes first to leave."""
        node = self._nodes.get(key)
        if node is None:
            return
        self._forget(node)
        orphans = list(node.children)
        while orphans:
            child = self._nodes[orphans.pop()]
            self._orphan_clock -= 1
            child.stamp = self._orphan_clock
            self._push_if_leaf(child)
            orphans.extend(child.children)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        live = {item[1] for item in self._leaves if self._live(item) is not None}
        children: dict[ChunkKey, dict[ChunkKey, None]] = {}
        for key, node in self._nodes.items():
            if node.entry.parent is not None:
                children.setdefault(node.entry.parent, {})[key] = None
        total = 0
        for key, node in self._nodes.items():
            total += node.entry.nbytes
            if node.children != children.get(key, {}):
                raise AssertionError(f"children of {key.hex()} are not what is held")
            if not node.children and key not in live:
                raise AssertionError(f"leaf {key.hex()} cannot be found for eviction")
        if total != self.used_bytes or total > self.capacity_bytes:
            raise AssertionError(f"used {self.used_bytes}, held {total}, of {self.capacity_bytes}")
        lost = {k: c for k, c in children.items() if k not in self._nodes}
        if self._orphans != lost:
            raise AssertionError("orphans are not what is held without its parent")

    def _insert(self, entry: Entry) -> None:
        self._clock += 1
        self._restore(_Node(entry, self._clock))

    def _restore(self, node: _Node) -> None:
        entry = node.entry
        self._nodes[entry.key] = node
        self.used_bytes += entry.nbytes
        node.children = self._orphans.pop(entry.key, {})
        self._siblings(entry)[entry.key] = None
        self._push_if_leaf(node)

    def _forget(self, node: _Node) -> None:
        entry = node.entry
        del self._nodes[entry.key]
        self.used_bytes -= entry.nbytes
        if node.children:
            self._orphans[entry.key] = node.children
        siblings = self._siblings(entry)
        siblings.pop(entry.key, None)
        if entry.parent is None:
            return
        parent = self._nodes.get(entry.parent)
        if parent is not None:
            self._push_if_leaf(parent)
        elif not siblings:
            del self._orphans[entry.parent]

    def _siblings(self, entry: Entry) -> dict[ChunkKey, None]:
        """Return the held children of the entry's parent, whether the parent is held or not."""
        if entry.parent is None:
            return {}
        parent = self._nodes.get(entry.parent)
        if parent is not None:
            return parent.children
        return self._orphans.setdefault(entry.parent, {})

    def _push_if_leaf(self, node: _Node) -> None:
        if node.children:
            return
        if len(self._leaves) > _HEAP_MIN + _HEAP_SLACK * len(self._nodes):
            # A leaf that got and lost children stands here once for each time: keep it once.
            self._leaves = list({item for item in self._leaves if self._live(item) is not None})
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.stamp, node.entry.key))

    def _live(self, item: tuple[int, ChunkKey]) -> _Node | None:
        stamp, key = item
        node = self._nodes.get(key)
        if node is None or node.stamp != stamp or node.children:
            return None
        return node
