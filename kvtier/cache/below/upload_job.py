"""A few chunks on their way from DRAM to one remote: what is done with them, without the lock.

::

    prepare    which are there? ──► seal the others, encode them where that saves enough
    (room is made for what comes of it, under the lock)
    send       delete what gives way ──► write
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.cache.below.encoder import ChunkEncoder, EncodedChunk
from kvtier.cache.executor import Executor
from kvtier.errors import KVTierError
from kvtier.keys import shard_key
from kvtier.shard_format import ShardDescription, seal
from kvtier.tiers.dram import DramRecord
from kvtier.tiers.index import Lease
from kvtier.tiers.remote.channel import Channel
from kvtier.tiers.remote.holdings import RemoteRecord
from kvtier.types import Entry, KVLayout, ShardId, ShardKey, Slot, WriteItem


@dataclass(frozen=True, slots=True)
class Waiting:
    """A chunk to be written. ``number`` is its place in the order of stores: parents first."""

    entry: Entry
    layout: KVLayout
    number: int
    tries: int = 0


@dataclass(slots=True, eq=False)
class Outbound:
    """A chunk on its way: what it is written from, and where to.

    ``stored`` is what is written, once that is known; ``place`` the room that was made for it.
    With ``spoiled`` it is written whatever is there. ``was_there`` None: that is not known yet.
    """

    waiting: Waiting
    record: DramRecord
    slots: dict[ShardId, memoryview]
    descriptions: dict[ShardId, ShardDescription]
    stored: EncodedChunk
    spoiled: bool = False
    place: RemoteRecord | None = None
    outcome: KVTierError | None = None
    was_there: bool | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the remote."""
        return sum(self.stored.sizes.values())

    @property
    def objects(self) -> list[ShardKey]:
        """The keys of its shards there."""
        return [shard_key(self.record.entry.key, shard) for shard in self.slots]


@dataclass(slots=True, eq=False)
class UploadJob:
    """Owns what its chunks pin until ``end``; its coroutines run in the channel's loop, in turn."""

    chunks: Sequence[Outbound]
    lease: Lease[Slot]
    channel: Channel
    executor: Executor
    encoder: ChunkEncoder | None
    started: float
    deadline: float

    async def prepare(self) -> None:
        """Find out what is there, seal or encode the rest.

        A chunk that cannot be sealed has that as its outcome. Raises ``ConnectorError``.
        """
        there = iter(await self.channel.contains([k for c in self.chunks for k in c.objects]))
        for chunk in self.chunks:
            found = [next(there) for _ in chunk.slots]
            chunk.was_there = all(found) and not chunk.spoiled
        making = [
            asyncio.wrap_future(self.executor.prepare(partial(_make, chunk, self.encoder)))
            for chunk in self.chunks
            if not chunk.was_there
        ]
        # All of them to their end, whatever becomes of one: until then slots are read.
        for end in await asyncio.gather(*making, return_exceptions=True):
            if end is not None:
                raise end

    async def send(self, going: Sequence[ShardKey]) -> None:
        """Delete what gives way, write what is lacking; each chunk gets its outcome.

        Returns once the connector has given back all that was lent to it. Raises
        ``ConnectorError`` where nothing was written.
        """
        if going:
            await self.channel.delete(going)
        lacking = [c for c in self.chunks if c.outcome is None and not c.was_there]
        writes = [
            (chunk, WriteItem(shard_key(chunk.record.entry.key, shard), data))
            for chunk in lacking
            for shard, data in chunk.stored.shards.items()
        ]
        ends = await asyncio.gather(
            *(self.channel.write(item, deadline=self.deadline) for _, item in writes),
            return_exceptions=True,
        )
        for (chunk, _), end in zip(writes, ends, strict=True):
            if isinstance(end, KVTierError):
                chunk.outcome = chunk.outcome or end
            elif isinstance(end, BaseException):
                raise end

    def end(self) -> None:
        """Give back what the chunks pin and hold; nobody reads it any more."""
        self.lease.release()
        for chunk in self.chunks:
            self.give_back(chunk)

    def give_back(self, chunk: Outbound) -> None:
        """Give back what a chunk is written from beside its slots."""
        if self.encoder is not None:
            self.encoder.give_back(chunk.stored)
        chunk.stored = sealed(chunk.slots)


def sealed(slots: dict[ShardId, memoryview]) -> EncodedChunk:
    """Return a chunk that is written as it lies in DRAM."""
    return EncodedChunk(slots, ())


def _make(chunk: Outbound, encoder: ChunkEncoder | None) -> None:
    try:
        if encoder is not None:
            chunk.stored = encoder.encode(chunk.slots, chunk.descriptions)
            return
        for shard, description in chunk.descriptions.items():
            seal(chunk.slots[shard], description)
    except KVTierError as error:
        chunk.outcome = error
