"""What can be done with objects below ``/v1``. Nothing here carries their bytes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from kvtier.cache.tenancy.held import Eviction
from kvtier.errors import TierUnavailableError
from kvtier.types import MissReason
from kvtier_server.gate import Changing, TheControl, touched
from kvtier_server.messages import (
    Everything,
    Evict,
    Evicted,
    Invalidate,
    Invalidated,
    Pin,
    Pinned,
    Selected,
    Unpin,
    Unpinned,
    Warm,
    Warmed,
)
from kvtier_server.routes import refusals

object_routes: Final = APIRouter(
    prefix="/v1", responses=refusals(400, 401, 403, 404, 409, 413, 422, 503)
)


@object_routes.post("/evict")
async def evict(control: TheControl, caller: Changing, body: Evict) -> Evicted:
    """Let objects go from DRAM, disk or both, as if they made room; a remote keeps its copy."""
    name = touched(control, caller, body.objects.credential)
    if set(body.tiers) == {"disk"} and control.live.config.cache.disk is None:
        raise HTTPException(409, "there is no disk to be evicted from")
    count = await control.keeper.evict(name, _keys(body.objects), body.tiers)
    return Evicted(credential=name, **{each.value: count[each] for each in Eviction})


@object_routes.post("/pin")
async def pin(control: TheControl, caller: Changing, body: Pin) -> Pinned:
    """Keep what lies in DRAM or on disk from eviction, until the time is over or it is unpinned."""
    name = touched(control, caller, body.objects.credential)
    count = await control.keeper.pin(name, _keys(body.objects), body.seconds)
    absent, pinned = count.pop(MissReason.ABSENT, 0), count.pop(None, 0)
    return Pinned(credential=name, pinned=pinned, absent=absent, no_room=count.total())


@object_routes.post("/unpin")
async def unpin(control: TheControl, caller: Changing, body: Unpin) -> Unpinned:
    """Let objects leave when their turn comes."""
    name = touched(control, caller, body.objects.credential)
    count = await control.keeper.unpin(name, _keys(body.objects))
    return Unpinned(credential=name, unpinned=count[True], absent=count[False])


@object_routes.post("/warm")
async def warm(control: TheControl, caller: Changing, body: Warm) -> Warmed:
    """Bring objects up into DRAM: those named from disk or remotes, or all that lie on disk."""
    name = touched(control, caller, body.objects.credential)
    count = await control.keeper.warm(name, _keys(body.objects), body.seconds)
    return Warmed(credential=name, **asdict(count))


@object_routes.post("/invalidate")
async def invalidate(control: TheControl, caller: Changing, body: Invalidate) -> Invalidated:
    """Have objects never found again: those named, in every tier; or all, by a new epoch."""
    name = touched(control, caller, body.objects.credential)
    keys = _keys(body.objects)
    if keys is not None:
        removed, busy = await control.keeper.remove(name, keys)
        return Invalidated(credential=name, removed=removed, busy=busy)
    try:
        return Invalidated(credential=name, epoch=await control.keeper.invalidate(name))
    except TierUnavailableError as error:
        text = f"it holds here, and could not be told everywhere: {error}"
        raise HTTPException(503, text) from error


def _keys(objects: Selected) -> list[bytes] | None:
    """Return the keys that are named; None: all are meant."""
    return None if isinstance(objects, Everything) else list(map(bytes.fromhex, objects.keys))
