"""What one fill adds to the measurements of its link."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.cache.worth.link import Link
from kvtier.shard_format import ShardGeometry
from kvtier.types import ShardId


class Transfer:
    """One chunk's bytes on their way over a link. Used under the cache's lock."""

    def __init__(self, link: Link, geometries: Mapping[ShardId, ShardGeometry], now: float) -> None:
        """Begin now, to bring whole shards."""
        self._link = link
        self._geometries = geometries
        self._nbytes = sum(geometry.shard_bytes for geometry in geometries.values())
        self._came = dict.fromkeys(geometries, 0)
        link.started(now, self._nbytes)

    def progress(self, shard: ShardId, sections: int, now: float) -> None:
        """Note that a shard's first sections are there."""
        geometry = self._geometries[shard]
        ends = (*geometry.section_offsets[1:], geometry.shard_bytes)
        came = ends[sections - 1] if sections else 0
        if came > self._came[shard]:
            self._link.arrived(now, came - self._came[shard])
            self._came[shard] = came

    def end(self, now: float) -> None:
        """Note that nothing more will come; once."""
        self._link.ended(now, self._nbytes, self._nbytes - sum(self._came.values()))
