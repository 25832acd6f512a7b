"""What a cache has put into its remotes for tenants: counted, and taken back."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import Final

from kvtier.cache.below.remote_source import Remote
from kvtier.constants import GIVE_WAY_ROWS_MAX
from kvtier.keys import shard_key
from kvtier.types import ChunkKey, ShardId

#: The shard of a chunk that has but one.
_ONLY: Final = ShardId(0, 0, 0)


class InRemotes:
    """An ``Afar`` over all remotes of a cache. Used under the cache's lock."""

    def __init__(self, remotes: Sequence[Remote], writes: Callable[[ChunkKey], bool]) -> None:
        """``writes`` tells of a chunk that is being written to any of them now."""
        self._remotes = remotes
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
        """See ``Afar.leave``."""
        if self._writes(key):
            return 0
        freed = 0
        for remote in self._remotes:
            chunk = remote.tier.written.get(key)
            if chunk is not None:
                freed += chunk.nbytes
                delete_from(remote, key)
        return freed


def delete_from(remote: Remote, key: ChunkKey, shards: Collection[ShardId] = ()) -> None:
    """Have a chunk deleted in a remote, as far as is known what there is of it; unconfirmed.

    ``shards`` are some that it may have there.
    """
    written = remote.tier.written.get(key)
    known = (remote.tier.shards(key) or (), written.shards if written else (), shards, (_ONLY,))
    remote.tier.lose(key)
    objects = [shard_key(key, shard) for shard in sorted(set().union(*known))]
    remote.channel.submit(remote.channel.delete(objects))
