"""Least recently used by bytes, leaves first.

Callers touch a sequence from its last chunk to its first, so that the deepest suffix ages first;
the leaf rule then rarely changes the order and always keeps what is held reachable.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.policies.leaves import Leaves, Node
from kvtier.types import ChunkKey, Entry, Features


class LRU:
    """An ``EvictionPolicy``. Owned by its tier and called under the tier's lock.

    ``pinned`` tells which chunks must not leave now. A decision costs O(log n) amortised.
    """

    def __init__(self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]) -> None:
        """Raise ``ConfigError`` for a capacity that is not above 0."""
        self._leaves = Leaves(capacity_bytes, pinned)

    @property
    def used_bytes(self) -> int:
        """Bytes of everything held."""
        return self._leaves.used_bytes

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        """See ``EvictionPolicy.admit``."""
        leaves = self._leaves
        if entry.nbytes > leaves.capacity_bytes:
            return None
        added = leaves.add(entry, 0, now)
        evicted: list[Node] = []
        while leaves.used_bytes > leaves.capacity_bytes:
            node = leaves.evict(0, entry.key)
            if node is None:
                leaves.roll_back(evicted, added)
                return None
            evicted.append(node)
        leaves.settle()
        return [node.entry.key for node in evicted]

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        """See ``EvictionPolicy.touch``."""
        del features
        node = self._leaves.get(key)
        if node is not None:
            self._leaves.use(node, 0, now)

    def remove(self, key: ChunkKey) -> None:
        """See ``EvictionPolicy.remove``. What descended from the key becomes first to leave."""
        self._leaves.remove(key)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        self._leaves.check_integrity()
