"""What is to be deleted in one remote: kept until it was asked for, and again where that failed."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from kvtier.cache.below.remote_source import Remote
from kvtier.cache.executor import Executor, Fault
from kvtier.constants import DELETION_CHUNKS_MAX, DELETIONS_WAITING_MAX
from kvtier.keys import shard_key
from kvtier.types import ChunkKey, ShardId, ShardKey

#: The shard of a chunk that has but one.
_ONLY: Final = ShardId(0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A chunk's objects, and the bytes that counted for its root; none where nobody counted."""

    root: bytes
    nbytes: int
    objects: tuple[ShardKey, ...]


class Deletions:
    """Owns the deletions of one remote. Used under the cache's lock, which its callbacks take.

    One call at a time, while the remote answers. A connector tells nobody whether an object is
    gone: what it was asked for without a fault counts as done.
    """

    def __init__(self, remote: Remote, executor: Executor, lock: threading.Lock) -> None:
        self._remote = remote
        self._executor = executor
        self._lock = lock
        self._waiting: dict[ChunkKey, _Leaving] = {}
        self._going: dict[ChunkKey, _Leaving] = {}
        self._kept: set[ChunkKey] = set()  # Written while their deletion is on its way.
        self._bytes: Counter[bytes] = Counter()

    @property
    def full(self) -> bool:
        """True when none may be added: whoever wants to has to come again."""
        return self.count >= DELETIONS_WAITING_MAX

    @property
    def count(self) -> int:
        """Chunks that are still to go."""
        return len(self._waiting) + len(self._going)

    def bytes_of(self, root: bytes) -> int:
        """Return the bytes that were counted for a root and may still lie there."""
        return self._bytes[root]

    def add(self, key: ChunkKey, shards: Collection[ShardId] = ()) -> None:
        """Have a chunk deleted, as far as is known what there is of it; it counts no more.

        ``shards`` are some that it may have there. Not when ``full``.
        """
        assert not self.full, "the caller has looked"
        tier = self._remote.tier
        written = tier.written.get(key)
        known = (tier.shards(key) or (), written.shards if written else (), shards, (_ONLY,))
        objects = tuple(shard_key(key, shard) for shard in sorted(set().union(*known)))
        root, nbytes = (written.root, written.nbytes) if written else (b"", 0)
        tier.lose(key)
        if key in self._waiting:
            self._gone(self._waiting.pop(key))
        self._waiting[key] = _Leaving(root, nbytes, objects)
        self._bytes[root] += nbytes
        self.pump()

    def forget(self, key: ChunkKey) -> None:
        """Note that a chunk is to be there again: it is being written."""
        if key in self._going:
            self._kept.add(key)
        if (leaving := self._waiting.pop(key, None)) is not None:
            self._gone(leaving)

    def pump(self) -> None:
        """Send what waits, if nothing is on its way."""
        if self._going or not self._waiting or not self._remote.tier.answers:
            return
        self._going = dict(itertools.islice(self._waiting.items(), DELETION_CHUNKS_MAX))
        for key in self._going:
            del self._waiting[key]

        def done(outcome: Fault | None) -> None:
            with self._lock:
                going, self._going = self._going, {}
                kept, self._kept = self._kept, set()
                if outcome is None:
                    for leaving in going.values():
                        self._gone(leaving)
                    self.pump()
                else:
                    self._remote.tier.failed(outcome)
                    self._again(going, kept)

        channel = self._remote.channel
        objects = [name for each in self._going.values() for name in each.objects]
        self._executor.watch(
            channel.submit(channel.delete(objects)), done, deadline=math.inf, late=done
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the books do not agree with themselves."""
        found: Counter[bytes] = Counter()
        for leaving in (*self._waiting.values(), *self._going.values()):
            found[leaving.root] += leaving.nbytes
        if found != self._bytes:
            raise AssertionError("bytes are counted that are not to go, or the other way round")

    def _again(self, going: dict[ChunkKey, _Leaving], kept: set[ChunkKey]) -> None:
        """Have what did not go be the first to go, but for what was added or written since."""
        for key in going.keys() & (self._waiting.keys() | kept):
            self._gone(going.pop(key))
        self._waiting = going | self._waiting

    def _gone(self, leaving: _Leaving) -> None:
        self._bytes[leaving.root] -= leaving.nbytes
        if not self._bytes[leaving.root]:
            del self._bytes[leaving.root]
