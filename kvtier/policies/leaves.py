"""Held chunks as a tree whose leaves leave in the order of their last use.

What ``lru`` and ``arc`` have in common. A leaf is a chunk with no held child.

A queue holds everything, leaf or not, in order of use, so noting a use is one move to its end.
Whoever looks for a victim walks from its front and sets aside what must not leave: chunks with
children, pinned ones. All that is set aside was used before all that is left in the queue, and a
number counts in which order it was set aside, that is, used. So when a chunk that was set aside
becomes a leaf, it waits in a heap by that number, and the heap comes before the queue. A use takes
a chunk back to the end of the queue. Each use sets a chunk aside at most once; where sequences are
touched from their last chunk to their first, the front of the queue is a leaf and nothing is.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from kvtier.errors import ConfigError
from kvtier.types import ChunkKey, Entry

# A heap is cleaned when stale items outnumber live ones by this factor.
_HEAP_SLACK = 4
_HEAP_MIN = 64


class Node:
    """A held chunk, or one that stands for the parent of held ones (``queue`` is below 0; then
    its entry means nothing).

    ``aside`` is 0 in the queue, else the number of its setting aside; below 0 for what lost an
    ancestor and was not used since, which leaves before all. ``child`` is the first child, and
    ``before`` and ``after`` are the siblings.
    """

    __slots__ = ("after", "aside", "before", "child", "entry", "parent", "queue", "used_at")

    def __init__(self, entry: Entry, queue: int) -> None:
        self.entry = entry
        self.queue = queue
        self.aside = 0
        self.used_at = 0.0
        self.parent: Node | None = None
        self.child: Node | None = None
        self.before: Node | None = None
        self.after: Node | None = None


_ABSENT = -1
_Heap = list[tuple[int, ChunkKey]]


class Leaves:
    """``queue_count`` queues. ``pinned`` tells which chunks must not leave now.

    Raises ``ConfigError`` for a capacity that is not above 0. A use costs O(1), an eviction O(1)
    and O(log n) for each chunk that was set aside; both amortised.
    """

    def __init__(
        self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool], queue_count: int = 1
    ) -> None:
        if capacity_bytes <= 0:
            raise ConfigError(f"policy capacity is {capacity_bytes}; it must be above 0 bytes")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.queue_bytes = [0] * queue_count
        self._pinned = pinned
        self._nodes: dict[ChunkKey, Node] = {}
        self._queues: list[OrderedDict[ChunkKey, Node]] = [
            OrderedDict() for _ in range(queue_count)
        ]
        # (number, key), stale items among them: one is live iff its node is a leaf of that
        # number. The last heap is that of the lost.
        self._heaps: list[_Heap] = [[] for _ in range(queue_count + 1)]
        self._spared: list[Node] = []
        self._aside_count = 0
        # Counts down: what lost its parent is older than everything that was ever used.
        self._lost_clock = 0
        # Parents that are not held, in case they come back.
        self._absent: dict[ChunkKey, Node] = {}

    def get(self, key: ChunkKey) -> Node | None:
        """Return what is held under a key."""
        return self._nodes.get(key)

    def add(self, entry: Entry, queue: int, now: float) -> Node:
        """Hold an entry, as the latest used of a queue. The key is not held yet."""
        assert entry.key not in self._nodes, "admit of a key that is held"
        node = self._absent.pop(entry.key, None) if self._absent else None
        if node is None:
            node = Node(entry, queue)
        else:
            node.entry, node.queue, node.aside = entry, queue, 0
        node.used_at = now
        self._hold(node)
        self._queues[queue][entry.key] = node
        return node

    def use(self, node: Node, queue: int, now: float) -> None:
        """Make a held node the latest used of a queue."""
        key = node.entry.key
        node.used_at = now
        if node.aside:
            node.aside = 0
            self._queues[queue][key] = node
        elif queue == node.queue:
            self._queues[queue].move_to_end(key)
            return
        else:
            del self._queues[node.queue][key]
            self._queues[queue][key] = node
        if queue != node.queue:
            self.queue_bytes[node.queue] -= node.entry.nbytes
            self.queue_bytes[queue] += node.entry.nbytes
            node.queue = queue

    def evict(self, queue: int, keep: ChunkKey) -> Node | None:
        """Take out the leaf of a queue that was used longest ago, is not pinned and not ``keep``.

        What is lost goes first, whatever its queue. None when there is neither. End with
        ``settle`` or ``roll_back``.
        """
        for heap in (self._heaps[-1], self._heaps[queue]):
            while heap:
                number, key = heapq.heappop(heap)
                node = self._nodes.get(key)
                if node is None or node.aside != number or node.child is not None:
                    continue
                if key == keep or self._pinned(key):
                    self._spared.append(node)
                    continue
                self._release(node)
                return node
        waiting = self._queues[queue]
        while waiting:
            key, node = waiting.popitem(last=False)
            self._aside_count += 1
            node.aside = self._aside_count
            if node.child is not None:
                continue
            if key == keep or self._pinned(key):
                self._spared.append(node)
                continue
            self._release(node)
            return node
        return None

    def settle(self) -> None:
        """End a decision: what stayed for being pinned waits again."""
        for node in self._spared:
            self._push_if_leaf(node)
        self._spared.clear()

    def roll_back(self, evicted: list[Node], added: Node) -> None:
        """End a decision as if it had not begun."""
        self.settle()
        self._release(added)
        for node in reversed(evicted):
            self._hold(node)
            self._push_if_leaf(node)

    def remove(self, key: ChunkKey) -> None:
        """Forget a key, if it is held. What descended from it becomes first to leave."""
        node = self._nodes.get(key)
        if node is None:
            return
        self._release(node)
        todo = [node.child] if node.child is not None else []
        while todo:
            each: Node | None = todo.pop()
            while each is not None:
                self._lost_clock -= 1
                if not each.aside:
                    del self._queues[each.queue][each.entry.key]
                each.aside = self._lost_clock
                if each.child is not None:
                    todo.append(each.child)
                self._push_if_leaf(each)
                each = each.after

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        below: dict[ChunkKey | None, set[ChunkKey]] = {}
        totals = [0] * len(self.queue_bytes)
        for key, node in self._nodes.items():
            below.setdefault(node.entry.parent, set()).add(key)
            totals[node.queue] += node.entry.nbytes
            waits = key in self._queues[node.queue]
            if node.aside and node.child is None:
                waits = (node.aside, key) in self._heap_of(node)
            elif node.aside:
                waits = not waits
            if not waits:
                raise AssertionError(f"{key.hex()} cannot be found for eviction")
        if totals != self.queue_bytes or self.used_bytes != sum(totals):
            raise AssertionError(f"used {self.queue_bytes}, held {totals}")
        if self.used_bytes > self.capacity_bytes:
            raise AssertionError(f"used {self.used_bytes} of {self.capacity_bytes}")
        below.pop(None, None)
        parents = {**self._absent, **self._nodes}
        found = {key: _children(node) for key, node in parents.items() if node.child is not None}
        if found != below or any(node.child is None for node in self._absent.values()):
            raise AssertionError("the links between chunks are not what is held")

    def _hold(self, node: Node) -> None:
        entry = node.entry
        key, parent_key = entry.key, entry.parent
        self._nodes[key] = node
        self.queue_bytes[node.queue] += entry.nbytes
        self.used_bytes += entry.nbytes
        if parent_key is None:
            return
        parent = self._nodes.get(parent_key) or self._absent.get(parent_key)
        if parent is None:
            parent = self._absent[parent_key] = Node(entry, _ABSENT)
        node.parent = parent
        first = parent.child
        if first is not None:
            first.before = node
        node.after = first
        parent.child = node

    def _release(self, node: Node) -> None:
        entry = node.entry
        del self._nodes[entry.key]
        if not node.aside:
            del self._queues[node.queue][entry.key]
        self.queue_bytes[node.queue] -= entry.nbytes
        self.used_bytes -= entry.nbytes
        if node.child is not None:
            self._absent[entry.key] = node
            node.queue = _ABSENT
        parent, before, after = node.parent, node.before, node.after
        node.parent = node.before = node.after = None
        if parent is None:
            return
        if after is not None:
            after.before = before
        if before is not None:
            before.after = after
            return
        parent.child = after
        if after is not None:
            return
        if parent.queue == _ABSENT:
            assert entry.parent is not None
            del self._absent[entry.parent]
        elif parent.aside:
            self._push_if_leaf(parent)

    def _push_if_leaf(self, node: Node) -> None:
        """Let a node that was set aside wait for eviction, if it is a leaf."""
        if node.child is not None:
            return
        heap = self._heap_of(node)
        if len(heap) > _HEAP_MIN + _HEAP_SLACK * len(self._nodes):
            # A leaf that got and lost children stands here once for each time: keep it once.
            heap[:] = {item for item in heap if self._is_live(item)}
            heapq.heapify(heap)
        heapq.heappush(heap, (node.aside, node.entry.key))

    def _heap_of(self, node: Node) -> _Heap:
        return self._heaps[-1 if node.aside < 0 else node.queue]

    def _is_live(self, item: tuple[int, ChunkKey]) -> bool:
        node = self._nodes.get(item[1])
        return node is not None and node.aside == item[0] and node.child is None


def _children(node: Node) -> set[ChunkKey]:
    found: set[ChunkKey] = set()
    child = node.child
    while child is not None:
        found.add(child.entry.key)
        child = child.after
    return found
