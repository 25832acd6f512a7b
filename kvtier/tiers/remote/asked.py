"""What a remote has said of chunks, for as long as it is believed. Pure: no I/O, no lock, no clock.

Somebody else may write to the remote or let chunks go, so nothing is known for ever: a chunk that
was there is believed to be for ``there_s``, one that was not to be absent for ``absent_s``. What a
read finds out ends both at once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvtier.types import ChunkKey, ShardId

_NOTHING: frozenset[ShardId] = frozenset()


@dataclass(frozen=True, slots=True)
class _Said:
    shards: frozenset[ShardId]
    until: float


class Asked:
    """Bounded knowledge by chunk; what was learned longest ago is forgotten first."""

    def __init__(self, *, there_s: float, absent_s: float, chunks_max: int) -> None:
        self._there_s = there_s
        self._absent_s = absent_s
        self._chunks_max = chunks_max
        self._said: OrderedDict[ChunkKey, _Said] = OrderedDict()

    def __len__(self) -> int:
        return len(self._said)

    def shards(self, key: ChunkKey, now: float) -> frozenset[ShardId] | None:
        """Return the shards of a chunk that are there, none at all included; None: not known."""
        said = self._said.get(key)
        return said.shards if said is not None and now < said.until else None

    def learn(self, key: ChunkKey, shards: frozenset[ShardId], now: float) -> None:
        """Take an answer in: which shards of a chunk are there."""
        until = now + (self._there_s if shards else self._absent_s)
        self._said[key] = _Said(shards, until)
        self._said.move_to_end(key)
        if len(self._said) > self._chunks_max:
            self._said.popitem(last=False)

    def learn_absent(self, key: ChunkKey, now: float) -> None:
        """Take in that a chunk is not there, or is there and of no use."""
        self.learn(key, _NOTHING, now)

    def forget_absent(self) -> None:
        """Believe no absence any more: a remote that fails finds nothing."""
        for key in [key for key, said in self._said.items() if not said.shards]:
            del self._said[key]
