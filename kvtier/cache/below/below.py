"""What lies below DRAM, for whoever wants a chunk brought up: the nearest tier that has it."""

from __future__ import annotations

from collections.abc import Collection

from kvtier.cache.below.disk_source import DiskSource
from kvtier.cache.below.fill import Fill, Filler, Source
from kvtier.cache.below.remotes import Remotes
from kvtier.cache.executor import Executor
from kvtier.cache.sequence import Sequence
from kvtier.cache.shapes import Shapes
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.dram import DramTier
from kvtier.types import ChunkKey, KVLayout, Tier


class Below:
    """Finds chunks in the tiers below DRAM and starts to bring them up. Under the cache's lock."""

    def __init__(
        self,
        dram: DramTier,
        disk: DiskTier | None,
        remotes: Remotes | None,
        filler: Filler,
        executor: Executor,
        shapes: Shapes,
    ) -> None:
        self._dram = dram
        self._disk = disk
        self._remotes = remotes
        self._executor = executor
        self._shapes = shapes
        self.filler = filler

    def find(self, sequence: Sequence, chunk: int, without: Collection[str] = ()) -> Source | None:
        """Return what a chunk can be brought up from now, some places left out.

        What is packed with a codec unknown here is left aside.
        """
        key = sequence.chunk_keys[chunk]
        disk = self._disk if "disk" not in without else None
        record = disk.ready(key) if disk is not None else None
        if record is not None and self._disk is not None:
            fidelity = sequence.namespace.fidelity
            usable = sequence.takes(record.codec) and self._shapes.usable(
                sequence.layout, record.codec, fidelity
            )
            if usable and self._disk.volume_of(record).answers:
                return DiskSource(self._disk, record, self._executor)
        if self._remotes is None:
            return None
        return self._remotes.find(sequence, chunk, without)

    def tier_of(self, key: ChunkKey) -> Tier | None:
        """Return the nearest tier that holds a chunk, whether or not it answers."""
        if self._disk is not None and self._disk.holds(key):
            return Tier.DISK
        return Tier.REMOTE if self._remotes is not None and self._remotes.holds(key) else None

    def nbytes(self, source: Source, layout: KVLayout) -> int:
        """Return what a chunk takes in DRAM."""
        origin = source.origin
        sizes = self._shapes.of(layout, origin.position, origin.codec).sizes
        return sum(sizes[shard] for shard in origin.shards)

    def start(
        self, source: Source, sequence: Sequence, deadline: float, done: list[ChunkKey]
    ) -> Fill | None:
        """Start to bring a chunk up; None: no room.

        Where DRAM is full of one sequence, what its load has done with gives way, if it can be
        brought up again: ``done``, the last one first.
        """
        keys = iter(done)
        how = (source, sequence.layout, deadline, sequence.workers or ())
        while (fill := self.filler.start(*how)) is None:
            if not self._dram.give_way(keys, self._reachable):
                return None
        return fill

    def _reachable(self, key: ChunkKey) -> bool:
        if self._disk is not None and self._disk.find(key) is not None:
            return True
        return self._remotes is not None and bool(self._remotes.look(key))
