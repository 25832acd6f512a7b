"""What this cache has written to one remote for tenants and has not heard to be gone.

A remote may be shared, and let things go by itself: these books say whose bytes this cache has put
there, not what lies there. Each host counts what it wrote itself, so that nothing counts twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kvtier.types import ChunkKey, ShardId


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """A chunk of one root. ``number`` is its place in the order of writes."""

    root: bytes
    nbytes: int
    shards: frozenset[ShardId]
    number: int


class Written:
    """Used under the cache's lock. Beyond ``chunks_max`` the oldest count no more."""

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._chunks: OrderedDict[ChunkKey, WrittenChunk] = OrderedDict()  # The oldest first.
        self._roots: dict[bytes, dict[ChunkKey, int]] = {}  # By root, the number of each.
        self._bytes: dict[bytes, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, key: ChunkKey) -> WrittenChunk | None:
        """Return what was written of a chunk."""
        return self._chunks.get(key)

    def note(self, key: ChunkKey, root: bytes, nbytes: int, shards: frozenset[ShardId]) -> None:
        """Take in that a chunk was written, in place of what there was of it."""
        self.drop(key)
        self._chunks[key] = WrittenChunk(root, nbytes, shards, self._next)
        self._roots.setdefault(root, {})[key] = self._next
        self._bytes[root] = self._bytes.get(root, 0) + nbytes
        self._next += 1
        while len(self._chunks) > self._chunks_max:
            self.drop(next(iter(self._chunks)))

    def drop(self, key: ChunkKey) -> int:
        """Count a chunk no more; return the bytes that it counted."""
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return 0
        del self._roots[chunk.root][key]
        self._bytes[chunk.root] -= chunk.nbytes
        if not self._roots[chunk.root]:
            del self._roots[chunk.root], self._bytes[chunk.root]
        return chunk.nbytes

    def bytes_of(self, root: bytes) -> int:
        """Return the bytes of a root's chunks."""
        return self._bytes.get(root, 0)

    def keys_of(self, roots: Collection[bytes]) -> Iterator[tuple[int, ChunkKey]]:
        """Iterate over the chunks of some roots with their numbers, each root's oldest first."""
        for root in roots:
            for key, number in self._roots.get(root, {}).items():
                yield number, key

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        found: dict[bytes, int] = {}
        for key, chunk in self._chunks.items():
            found[chunk.root] = found.get(chunk.root, 0) + chunk.nbytes
            if self._roots[chunk.root].get(key) != chunk.number:
                raise AssertionError(f"{key.hex()} is not among those of its root")
        if found != self._bytes or len(self._chunks) != sum(map(len, self._roots.values())):
            raise AssertionError(f"{self._bytes} bytes as counted, {found} found")
