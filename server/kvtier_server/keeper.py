"""What operators do with objects: see what there is, and have some go, stay, come up or end.

The server keeps a hash of each key, not the key, so objects are named by their whole keys or as all
of a credential; nothing can be chosen by how its key begins.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeVar

from kvtier.cache.cache import Cache
from kvtier.cache.tenancy.held import Eviction, HeldBytes, HeldPins
from kvtier.constants import (
    CONTROL_OBJECTS_AT_ONCE,
    CONTROL_OBJECTS_MAX,
    CONTROL_WARMED_AT_ONCE,
    DAEMON_REQUEST_S_MAX,
)
from kvtier.interfaces import Clock
from kvtier.types import MissReason, Tier
from kvtier.wire import Status
from kvtier_server.objects import Address, Fault, Held, Objects, namespace_of

_TIERS: Final = {"dram": Tier.DRAM, "disk": Tier.DISK}
ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class WarmCount:
    """Objects by what came of bringing them up, and the bytes of those that are there."""

    warmed: int = 0
    warmed_bytes: int = 0
    absent: int = 0
    refused: int = 0
    late: int = 0


class Keeper:
    """Belongs to the event loop. What takes long gives way to others many times a second.

    ``keys`` None stands for all objects of the credential.
    """

    def __init__(self, cache: Cache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock

    def held(self) -> list[HeldBytes]:
        """Return what lies in DRAM and on disk, by epoch of each credential."""
        return self._cache.holdings.by_root()

    def pinned_bytes(self, credential: str) -> int:
        """Return the bytes that are pinned, counted once for each tier."""
        return self._cache.holdings.pinned_bytes(namespace_of(credential))

    def pins(self) -> list[HeldPins]:
        """Return what is pinned, what ends first in front."""
        return self._cache.holdings.pins()

    async def evict(
        self, credential: str, keys: Sequence[bytes] | None, tiers: Sequence[str]
    ) -> Counter[Eviction]:
        """Let objects go from DRAM or disk, as if they made room; count what came of them."""
        places = [_TIERS[tier] for tier in tiers]
        evicted = 0
        while True:
            counted: Counter[Eviction] = Counter()
            addresses = self._addresses(credential, keys, places)
            for some in _parts(addresses):
                chunks = [each.chunk for each in some]
                counted.update(self._cache.holdings.evict(chunks, places))
                await asyncio.sleep(0)
            evicted += counted[Eviction.EVICTED]
            # What is stored meanwhile may stay: while engines run there would be no end.
            some_left = keys is None and len(addresses) >= CONTROL_OBJECTS_MAX
            if not (some_left and counted[Eviction.EVICTED]):
                counted[Eviction.EVICTED] = evicted
                return counted

    async def pin(
        self, credential: str, keys: Sequence[bytes] | None, seconds: float
    ) -> Counter[MissReason | None]:
        """Keep what lies in DRAM or on disk from eviction; count by why not, None: it is."""
        namespace = namespace_of(credential)
        counted: Counter[MissReason | None] = Counter()
        for some in _parts(self._addresses(credential, keys, list(_TIERS.values()))):
            chunks = [each.chunk for each in some]
            counted.update(self._cache.holdings.pin(namespace, chunks, seconds))
            await asyncio.sleep(0)
        return counted

    async def unpin(self, credential: str, keys: Sequence[bytes] | None) -> Counter[bool]:
        """Let objects leave when their turn comes; count those that were pinned, and others."""
        counted: Counter[bool] = Counter()
        for some in _parts(self._addresses(credential, keys, list(_TIERS.values()))):
            counted.update(self._cache.holdings.unpin([each.chunk for each in some]))
            await asyncio.sleep(0)
        return counted

    async def warm(
        self, credential: str, keys: Sequence[bytes] | None, seconds: float
    ) -> WarmCount:
        """Bring objects up into DRAM: those named from disk and remotes, else all from disk.

        As many as half of DRAM holds. Each is verified as it comes up, and counts as read.
        """
        addresses = self._addresses(credential, keys, [Tier.DISK])
        objects = Objects(self._cache, namespace_of(credential), self._clock)
        count, deadline = WarmCount(), self._clock.now() + seconds
        left = iter(addresses)
        room_bytes = self._cache.stats().tiers[0].capacity_bytes // 2

        async def some() -> None:
            for address in left:
                if count.warmed_bytes >= room_bytes:
                    count.refused += 1
                elif self._clock.now() >= deadline:
                    count.late += 1
                else:
                    _count(count, await objects.bring(address, deadline=deadline))

        async with asyncio.TaskGroup() as group:
            for _ in range(CONTROL_WARMED_AT_ONCE):
                group.create_task(some())
        return count

    async def remove(self, credential: str, keys: Sequence[bytes]) -> tuple[int, int]:
        """Have objects gone from every tier and the remotes; return how many are, and are not."""
        end, pause_s = self._clock.now() + DAEMON_REQUEST_S_MAX, 0.001
        left = [each.chunk for each in self._addresses(credential, keys, [])]
        count = len(left)
        while True:
            flags = [flag for some in _parts(left) for flag in self._cache.remove(some)]
            left = [chunk for chunk, is_gone in zip(left, flags, strict=True) if not is_gone]
            if not left or self._clock.now() >= end:
                return count - len(left), len(left)
            await asyncio.sleep(pause_s)

    async def invalidate(self, credential: str) -> int:
        """Make all that a credential has stored unreachable, for good; return its new epoch.

        Raises ``TierUnavailableError`` as ``Cache.invalidate`` does.
        """
        return await asyncio.to_thread(self._cache.invalidate, namespace_of(credential))

    def _addresses(
        self, credential: str, keys: Sequence[bytes] | None, tiers: Sequence[Tier]
    ) -> list[Address]:
        """Return where the named objects lie, or all that lie in some tiers; no address twice."""
        namespace = namespace_of(credential)
        if keys is not None:
            objects = Objects(self._cache, namespace, self._clock)
            return list(dict.fromkeys(map(objects.address, keys)))
        root = self._cache.root(namespace)
        holdings = self._cache.holdings
        found = [holdings.keys(namespace, tier, CONTROL_OBJECTS_MAX) for tier in tiers]
        return [Address(root, chunk) for chunk in dict.fromkeys(chain.from_iterable(found))]


def _count(count: WarmCount, outcome: Held | Fault) -> None:
    """Note what came of bringing an object up, and let it go again."""
    if isinstance(outcome, Held):
        count.warmed += 1
        count.warmed_bytes += len(outcome.data)
        outcome.release()
    elif outcome.status is Status.ABSENT:
        count.absent += 1
    elif outcome.status is Status.LATE:
        count.late += 1
    else:
        count.refused += 1


def _parts(items: Sequence[ItemT]) -> Iterator[Sequence[ItemT]]:
    """Cut a list into pieces that are done under the cache's lock at once."""
    for start in range(0, len(items), CONTROL_OBJECTS_AT_ONCE):
        yield items[start : start + CONTROL_OBJECTS_AT_ONCE]
