"""Letting a chunk go from every tier because somebody asks for it."""

from __future__ import annotations

from kvtier.cache.below.remote_room import RemoteRoom
from kvtier.cache.below.writeout import Writeout
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.index import State
from kvtier.types import ChunkKey


def remove(
    key: ChunkKey,
    dram: DramTier,
    disk: DiskTier | None,
    writeout: Writeout | None,
    room: RemoteRoom | None = None,
) -> bool:
    """Take a chunk out of sight; under the cache's lock. False: not all of it could go yet.

    So it is as long as a remote has too much to delete.

    Files are unlinked in the background. What a write, a fill or a store has under way comes to
    its end first.
    """
    record = dram.index.get(key)
    if record is not None and record.state is State.FILLING:
        return False
    if room is not None and (room.writes(key) or not room.deletes):
        return False
    on_disk = disk.ready(key) if disk is not None and room is not None else None
    shards = {shard for held in (record, on_disk) if held is not None for shard in held.places}
    if disk is not None and disk.holds(key):
        disk.displace(key, ())
        if disk.holds(key):
            return False  # It is being written or read.
        if writeout is not None:
            writeout.left_disk(key)
    if room is not None:
        room.left_dram(key)
        room.remove(key, shards)
    if record is not None and record.pins:
        dram.abandon(record)
        if writeout is not None:
            writeout.drop(key)
    elif record is not None:
        dram.leave(record)
    return True
