"""ARC: recency and frequency in a balance that adapts itself, by bytes, leaves first.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4; the
names T1, T2, B1, B2, p and c are the paper's. Where an entry is larger than one unit, a step of the
paper is repeated until there is room; where the entry that the paper names is no leaf, or is
pinned, the next one of its list goes, and of the other list if there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvtier.policies.leaves import Leaves, Node
from kvtier.types import ChunkKey, Entry, Features

# T1 holds what was used once, T2 what was used again.
_T1: Final = 0
_T2: Final = 1


class _Ghosts:
    """B1 or B2: keys that left, with their size, the one that left longest ago first."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._sizes: dict[ChunkKey, int] = {}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._sizes

    def add(self, key: ChunkKey, nbytes: int) -> None:
        self._sizes[key] = nbytes
        self.nbytes += nbytes

    def discard(self, key: ChunkKey) -> None:
        self.nbytes -= self._sizes.pop(key, 0)

    def shrink(self, nbytes_max: int) -> None:
        """Forget the oldest until at most ``nbytes_max`` are left."""
        while self._sizes and self.nbytes > nbytes_max:
            self.discard(next(iter(self._sizes)))


class ARC:
    """An ``EvictionPolicy``. Owned by its tier and called under the tier's lock.

    ``pinned`` tells which chunks must not leave now. A touch at the instant of the last access
    belongs to that access, so it makes nothing frequent.
    """

    def __init__(self, capacity_bytes: int, pinned: Callable[[ChunkKey], bool]) -> None:
        """Raise ``ConfigError`` for a capacity that is not above 0."""
        self._leaves = Leaves(capacity_bytes, pinned, queue_count=2)
        self._b1 = _Ghosts()
        self._b2 = _Ghosts()
        self._p = 0.0

    @property
    def used_bytes(self) -> int:
        """Bytes of everything held."""
        return self._leaves.used_bytes

    def admit(self, entry: Entry, now: float) -> list[ChunkKey] | None:
        """See ``EvictionPolicy.admit``. Cases II, III and IV of the paper."""
        leaves, c = self._leaves, self._leaves.capacity_bytes
        if entry.nbytes > c:
            return None
        in_b1, in_b2 = entry.key in self._b1, entry.key in self._b2
        p = self._p
        if in_b1:
            p = min(float(c), p + entry.nbytes * max(1.0, self._b2.nbytes / self._b1.nbytes))
        elif in_b2:
            p = max(0.0, p - entry.nbytes * max(1.0, self._b1.nbytes / self._b2.nbytes))
        is_new = not (in_b1 or in_b2)
        node = leaves.add(entry, _T1 if is_new else _T2, now)
        evicted: list[Node] = []
        ghosts: list[Node] = []
        while leaves.used_bytes > c:
            # What T1 holds beside the entry, which stands in T1 or T2 already.
            t1_bytes = leaves.queue_bytes[_T1] - (entry.nbytes if is_new else 0)
            # Case IV, A: T1 alone fills c, so its oldest leaves no ghost.
            ghostless = is_new and t1_bytes + entry.nbytes > c
            in_t1 = t1_bytes > 0 and (t1_bytes > p or (in_b2 and t1_bytes == p))
            first, second = (_T1, _T2) if ghostless or in_t1 else (_T2, _T1)
            victim = leaves.evict(first, entry.key) or leaves.evict(second, entry.key)
            if victim is None:
                leaves.roll_back(evicted, node)
                return None
            evicted.append(victim)
            if not ghostless:
                ghosts.append(victim)
        leaves.settle()
        self._p = p
        self._note_ghosts(entry.key, ghosts)
        return [victim.entry.key for victim in evicted]

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        """See ``EvictionPolicy.touch``. Case I of the paper."""
        del features
        node = self._leaves.get(key)
        if node is not None:
            self._leaves.use(node, node.queue if node.used_at == now else _T2, now)

    def remove(self, key: ChunkKey) -> None:
        """See ``EvictionPolicy.remove``. What descended from the key becomes first to leave."""
        self._leaves.remove(key)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        leaves, c = self._leaves, self._leaves.capacity_bytes
        leaves.check_integrity()
        l1 = leaves.queue_bytes[_T1] + self._b1.nbytes
        total = leaves.used_bytes + self._b1.nbytes + self._b2.nbytes
        if l1 > c or total > 2 * c:
            raise AssertionError(f"L1 has {l1} bytes and all lists {total}, with c = {c}")
        if not 0 <= self._p <= c:
            raise AssertionError(f"p is {self._p}, with c = {c}")

    def _note_ghosts(self, key: ChunkKey, victims: list[Node]) -> None:
        """Bring B1 and B2 up to date: the directory holds at most c in L1 and 2c in all."""
        leaves, c = self._leaves, self._leaves.capacity_bytes
        self._b1.discard(key)
        self._b2.discard(key)
        for victim in victims:
            ghosts = self._b1 if victim.queue == _T1 else self._b2
            ghosts.add(victim.entry.key, victim.entry.nbytes)
        self._b1.shrink(c - leaves.queue_bytes[_T1])
        self._b2.shrink(2 * c - leaves.used_bytes - self._b1.nbytes)
