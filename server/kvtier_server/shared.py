"""A client on a Unix socket that shares memory with us: what it leases, maps and stages."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Protocol

from kvtier.config import CacheConfig
from kvtier.constants import ALIGN_BYTES
from kvtier.interfaces import Clock
from kvtier.tiers.owned_memory import SharedFile
from kvtier.wire import Area, Done, Lease, Leased, Map, Mapped, Release, Status, Take
from kvtier.wire_link import Link
from kvtier.wire_shared import copied
from kvtier_server.counters import Counters
from kvtier_server.credentials import DEFAULT
from kvtier_server.leases import LeaseRoom, Leases, Staging, Stagings
from kvtier_server.objects import Fault, Held, Objects
from kvtier_server.settings import DaemonConfig


class Sharing:
    """What all clients that share memory share in."""

    def __init__(self, dram_bytes: int) -> None:
        self.room = LeaseRoom(dram_bytes)
        self.stagings = Stagings()


class Served(Protocol):
    """What is needed of the server."""

    @property
    def clock(self) -> Clock:
        """The cache's clock."""
        ...

    @property
    def counters(self) -> Counters:
        """What the server has done."""
        ...


class Shared:
    """One connection's part in it. Belongs to the loop's thread; ``end`` comes last."""

    def __init__(self, sharing: Sharing, objects: Objects, link: Link, served: Served) -> None:
        """Raises ``OSError``: there is no descriptor left to hang up with."""
        self._stagings = sharing.stagings
        self._objects = objects
        self._link = link
        self._counters = served.counters
        self._leases = Leases(sharing.room, served.clock, link.duplicate())
        self._staging: Staging | None = None

    @property
    def busy(self) -> bool:
        """True while something is leased."""
        return len(self._leases) > 0

    def overdue(self, now_s: float) -> bool:
        """Tell whether a lease is held for longer than it may be."""
        return self._leases.overdue(now_s)

    def lease_at_once(self, message: Lease) -> bool:
        """Answer a request for what lies in memory; False: ``lease`` has to bring it up.

        The link is clear.
        """
        objects = self._objects
        held = objects.hold(objects.address(message.key))
        if held is None:
            return False
        self._link.put(self._leased(message.request, objects.leased(held)))
        return True

    async def lease(self, message: Lease, deadline: float) -> None:
        """Hold an object where it lies, and say where that is."""
        held = await self._objects.lease(message.key, deadline=deadline)
        await self._link.send(self._leased(message.request, held))

    def _leased(self, number: int, held: Held | Fault) -> Leased:
        """Note a lease, or why there is none, and return what is answered."""
        counters = self._counters
        if not isinstance(held, Fault) and not self._leases.hold(number, held):
            held.release()
            held = Fault(Status.REFUSED, "too much is leased")
        if isinstance(held, Fault):
            absent = held.status is Status.ABSENT
            counters.absent += absent
            counters.unleased += not absent
            return Leased(number, held.status, held.text, 0, 0, 0)
        region = self._objects.region
        assert region is not None, "leased without a file"
        nbytes = len(held.data)
        counters.reads += 1
        counters.leases += 1
        counters.leased_bytes += nbytes
        return Leased(number, Status.OK, "", region.number, held.offset, nbytes)

    def release(self, message: Release) -> bool:
        """End leases; False: one that there is not."""
        return self._leases.release(message.requests)

    async def map(self, message: Map) -> None:
        """Hand over a file."""
        if message.area is Area.STAGING:
            await self._map_staging(message.request)
            return
        region = self._objects.region
        if region is None:
            await self._link.send(
                Mapped(message.request, Status.ABSENT, "nothing was leased yet", 0, 0)
            )
            return
        mapped = Mapped(message.request, Status.OK, "", region.number, region.nbytes)
        await self._link.send_with(mapped, region.descriptor)

    async def take(self, message: Take, deadline: float) -> None:
        """Store a part of a staging file."""
        outcome = await self._taken(message, deadline)
        counters = self._counters
        if isinstance(outcome, Fault):
            counters.unwritten += 1
            await self._link.send(Done(message.request, outcome.status, outcome.text))
        else:
            counters.taken += 1
            counters.writes += 1
            counters.written_bytes += message.nbytes
            await self._link.send(Done(message.request, Status.OK, ""))

    def end(self) -> None:
        """Hang up and give everything back."""
        self._counters.lost_leases += self._leases.end()
        if self._staging is not None:
            self._stagings.close(self._staging)
            self._staging = None

    async def _map_staging(self, number: int) -> None:
        if self._staging is None:
            self._staging = self._stagings.open(self._objects)
        if self._staging is None:
            await self._link.send(Mapped(number, Status.REFUSED, "too many staging areas", 0, 0))
            return
        file = self._staging.file
        mapped = Mapped(number, Status.OK, "", file.number, file.nbytes)
        await self._link.send_with(mapped, file.writable)

    async def _taken(self, message: Take, deadline: float) -> Fault | None:
        part = self._stagings.part(message.region, message.offset, message.nbytes, self._objects)
        if part is None:
            return Fault(Status.ABSENT, "no such part of a staging area")
        filling = await self._objects.reserve(message.key, message.nbytes, deadline=deadline)
        if isinstance(filling, Fault):
            return filling
        try:
            await copied(part, filling.data)
        except asyncio.CancelledError:
            filling.abort()
            raise
        filling.commit()
        return None


def shareable() -> bool:
    """Tell whether this system has files that can be shared so."""
    try:
        file = SharedFile("kvtier-probe", ALIGN_BYTES)
        os.close(file.open_readable())
        file.close()
    except OSError:
        return False
    return True


def exported(config: DaemonConfig) -> CacheConfig:
    """Return the cache's settings, its memory in files where clients can share it."""
    wanted = config.shared_memory and any(address.path for address in config.listen)
    return replace(config.cache, exported_to=DEFAULT) if wanted and shareable() else config.cache
