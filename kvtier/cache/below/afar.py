"""What a cache has put into its remotes for tenants: counted, and taken back."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence

from kvtier.cache.below.deletions import Deletions
from kvtier.cache.below.remote_source import Remote
from kvtier.constants import GIVE_WAY_ROWS_MAX
from kvtier.types import ChunkKey


class InRemotes:
    """An ``Afar`` over all remotes of a cache. Used under the cache's lock."""

    def __init__(
        self,
        remotes: Sequence[Remote],
        deletions: Sequence[Deletions],
        writes: Callable[[ChunkKey], bool],
    ) -> None:
        """``writes`` tells of a chunk that is being written to any of them now."""
        self._remotes = remotes
        self._deletions = deletions
        self._writes = writes

    def bytes_of(self, root: bytes) -> int:
        """See ``Afar.bytes_of``."""
        return sum(remote.tier.written.bytes_of(root) for remote in self._remotes)

    def keys_of(self, roots: Collection[bytes]) -> list[ChunkKey]:
        """See ``Afar.keys_of``. Numbers of several remotes are as good as times."""
        found = (each for remote in self._remotes for each in remote.tier.written.keys_of(roots))
        oldest = heapq.nsmallest(GIVE_WAY_ROWS_MAX, found)
        return list(dict.fromkeys(key for _, key in oldest))

    def holds(self, key: ChunkKey) -> bool:
        """See ``Afar.holds``."""
        return any(remote.tier.written.get(key) is not None for remote in self._remotes)

    def leave(self, key: ChunkKey) -> int:
        """See ``Afar.leave``. While too much is to be deleted it stays, and counts."""
        if self._writes(key) or any(deletions.full for deletions in self._deletions):
            return 0
        freed = 0
        for remote, deletions in zip(self._remotes, self._deletions, strict=True):
            chunk = remote.tier.written.get(key)
            if chunk is not None:
                freed += chunk.nbytes
                deletions.add(key)
        return freed

    def going_bytes_of(self, root: bytes) -> int:
        """See ``Afar.going_bytes_of``."""
        return sum(deletions.bytes_of(root) for deletions in self._deletions)
