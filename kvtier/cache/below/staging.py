"""DRAM that is no tier: chunks pass through it on their way down and up, and none stays.

A chunk leaves once nobody reads it and no tier below is still to be given it. While it is owed to
one that takes writes it does not give way to others, for else a long prompt would push its own
beginning out; what is owed to a tier that fails does.
"""

from __future__ import annotations

from kvtier.cache.below.rooms import Rooms
from kvtier.cache.tenancy.pins import KeptKeys
from kvtier.interfaces import Clock
from kvtier.tiers.dram import DramTier
from kvtier.tiers.index import State
from kvtier.types import ChunkKey


class OwedKeys(KeptKeys):
    """What must stay in a staging area: what is owed. Nothing can be pinned there."""

    def __init__(self, rooms: Rooms, clock: Clock) -> None:
        super().__init__(0, clock)
        self._rooms = rooms

    def keeps(self, key: ChunkKey) -> bool:
        """Tell whether a chunk must stay now."""
        return self._rooms.owes(key)


def sweep(dram: DramTier, rooms: Rooms) -> None:
    """Let all chunks leave that have arrived, above or below; under the cache's lock."""
    for record in list(dram.index):
        key = record.entry.key
        if record.state is State.READY and not record.pins and not rooms.waits(key):
            dram.leave(record)
