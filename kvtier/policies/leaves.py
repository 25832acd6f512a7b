"""Held chunks as a tree whose leaves wait in queues, the one that was used longest ago in front.

What ``lru`` and ``arc`` have in common. A leaf is a chunk with no held child.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.errors import ConfigError
from kvtier.types import ChunkKey, Entry

# A queue is cleaned when stale items outnumber live ones by this factor.
_HEAP_SLACK = 4
_HEAP_MIN = 64


@dataclass(slots=True)
class Node:
    """A held chunk: its queue, the number and time of its latest use.

    ``lost`` is what lost an ancestor and was not used since: it waits in a queue before all.
    """

    entry: Entry
    queue: int
    stamp: int
    used_at: float
    lost: bool = False
    children: dict[ChunkKey, None] = field(default_factory=dict)  # an ordered set


class Leaves:
    """``queue_count`` queues. ``pinned`` tells which chunks must not leave now.

    Raises ``ConfigError`` for a capacity that is not above 0. A decision costs O(log n) amortised.
    """

    def __init__(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool], queue_count: int = 1
    ) -> None:
        if capacity_bytes <= 0:
            raise ConfigError(f"policy capacity is {capacity_bytes}; it must be above 0 bytes")
        self.capacity_bytes = capacity_bytes
        self.queue_bytes = [0] * queue_count
        self._pinned = pinned
        self._nodes: dict[ChunkKey, Node] = {}
        # (stamp, key), stale items among them: one is live iff its node is a leaf of that stamp.
        # The last queue is that of the lost.
        self._queues: list[list[tuple[int, ChunkKey]]] = [[] for _ in range(queue_count + 1)]
        self._spared: list[tuple[int, ChunkKey]] = []
        self._clock = 0
        # Counts down: what lost its parent is older than everything that was ever used.
        self._orphan_clock = 0
        # Children of parents that are not held, in case a parent comes back.
        self._orphans: dict[ChunkKey, dict[ChunkKey, None]] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of everything held."""
        return sum(self.queue_bytes)

    def get(self, key: ChunkKey) -> Node | None:
        """Return what is held under a key."""
        return self._nodes.get(key)

    def add(self, entry: Entry, queue: int, now: float) -> Node:
        """Hold an entry, as the latest used of a queue. The key is not held yet."""
        assert entry.key not in self._nodes, "admit of a key that is held"
        self._clock += 1
        node = Node(entry, queue, self._clock, now)
        self._hold(node)
        return node

    def use(self, node: Node, queue: int, now: float) -> None:
        """Make a held node the latest used of a queue."""
        self._clock += 1
        node.stamp = self._clock
        node.used_at = now
        node.lost = False
        if queue != node.queue:
            self.queue_bytes[node.queue] -= node.entry.nbytes
            self.queue_bytes[queue] += node.entry.nbytes
            node.queue = queue
        self._push_if_leaf(node)

    def evict(self, queue: int, keep: ChunkKey) -> Node | None:
        """Take out the leaf of a queue that was used longest ago, is not pinned and not ``keep``.

        What is lost goes first, whatever its queue. None when there is neither. End with
        ``settle`` or ``roll_back``.
        """
        for heap in (self._queues[-1], self._queues[queue]):
            while heap:
                item = heapq.heappop(heap)
                node = self._live(item, heap)
                if node is None:
                    continue
                if item[1] == keep or self._pinned(item[1]):
                    self._spared.append(item)
                    continue
                self._release(node)
                return node
        return None

    def settle(self) -> None:
        """End a decision: what stayed for being pinned waits again."""
        for stamp, key in self._spared:
            heapq.heappush(self._queue_of(self._nodes[key]), (stamp, key))
        self._spared.clear()

    def roll_back(self, evicted: list[Node], added: Node) -> None:
        """End a decision as if it had not begun."""
        self.settle()
        self._release(added)
        for node in reversed(evicted):
            self._hold(node)

    def remove(self, key: ChunkKey) -> None:
        """Forget a key, if it is held. What descended from it becomes first to leave."""
        node = self._nodes.get(key)
        if node is None:
            return
        self._release(node)
        orphans = list(node.children)
        while orphans:
            child = self._nodes[orphans.pop()]
            self._orphan_clock -= 1
            child.stamp = self._orphan_clock
            child.lost = True
            self._push_if_leaf(child)
            orphans.extend(child.children)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        live = {
            item[1] for heap in self._queues for item in heap if self._live(item, heap) is not None
        }
        children: dict[ChunkKey, dict[ChunkKey, None]] = {}
        totals = [0] * len(self.queue_bytes)
        for key, node in self._nodes.items():
            if node.entry.parent is not None:
                children.setdefault(node.entry.parent, {})[key] = None
            totals[node.queue] += node.entry.nbytes
        for key, node in self._nodes.items():
            if node.children != children.get(key, {}):
                raise AssertionError(f"children of {key.hex()} are not what is held")
            if not node.children and key not in live:
                raise AssertionError(f"leaf {key.hex()} cannot be found for eviction")
        if totals != self.queue_bytes or sum(totals) > self.capacity_bytes:
            raise AssertionError(
                f"used {self.queue_bytes}, held {totals}, of {self.capacity_bytes}"
            )
        lost = {k: c for k, c in children.items() if k not in self._nodes}
        if self._orphans != lost:
            raise AssertionError("orphans are not what is held without its parent")

    def _hold(self, node: Node) -> None:
        entry = node.entry
        self._nodes[entry.key] = node
        self.queue_bytes[node.queue] += entry.nbytes
        node.children = self._orphans.pop(entry.key, {})
        self._siblings(entry)[entry.key] = None
        self._push_if_leaf(node)

    def _release(self, node: Node) -> None:
        entry = node.entry
        del self._nodes[entry.key]
        self.queue_bytes[node.queue] -= entry.nbytes
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

    def _push_if_leaf(self, node: Node) -> None:
        if node.children:
            return
        heap = self._queue_of(node)
        if len(heap) > _HEAP_MIN + _HEAP_SLACK * len(self._nodes):
            # A leaf that got and lost children stands here once for each time: keep it once.
            heap[:] = {item for item in heap if self._live(item, heap) is not None}
            heapq.heapify(heap)
        heapq.heappush(heap, (node.stamp, node.entry.key))

    def _queue_of(self, node: Node) -> list[tuple[int, ChunkKey]]:
        return self._queues[-1 if node.lost else node.queue]

    def _live(self, item: tuple[int, ChunkKey], heap: list[tuple[int, ChunkKey]]) -> Node | None:
        stamp, key = item
        node = self._nodes.get(key)
        if node is None or node.stamp != stamp or node.children:
            return None
        return node if self._queue_of(node) is heap else None
