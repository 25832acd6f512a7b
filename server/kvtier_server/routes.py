"""What can be asked for below ``/v1``: settings, quotas, and the server as a whole."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from kvtier.errors import ConfigError
from kvtier.keys import tenant_digest
from kvtier_server.figures import stats_of
from kvtier_server.gate import Known, Operating, TheControl, check_known, known_names
from kvtier_server.messages import (
    Draining,
    Namespace,
    Namespaces,
    PinRow,
    Pins,
    Quotas,
    Refusal,
    Reloaded,
    SetQuota,
    Verification,
    told_check,
)

_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": Refusal, "description": "The body is no text."},
    401: {"model": Refusal, "description": "No token, or a wrong one."},
    403: {"model": Refusal, "description": "The token is of somebody who may not."},
    404: {"model": Refusal, "description": "No credential has the name."},
    409: {"model": Refusal, "description": "Not now, or not while the server runs."},
    413: {"model": Refusal, "description": "The body is too long."},
    422: {"model": Refusal, "description": "The body is not what is asked for."},
    503: {"model": Refusal, "description": "A tier could not be told, or too much is asked for."},
}


def refusals(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of some answers that are no success."""
    return {code: _REFUSALS[code] for code in codes}


server_routes: Final = APIRouter(prefix="/v1", responses=refusals(401, 503))
_CHANGES: Final = refusals(400, 403, 409, 413, 422)


@server_routes.get("/stats")
@server_routes.get("/kvtier/stats", include_in_schema=False)
async def stats(control: TheControl, caller: Known) -> dict[str, Any]:
    """Everything that is counted, as ``kvtier stat`` reads it; to a credential, its own by name."""
    return stats_of(control.snapshot(), sorted(filter(caller.may_touch, known_names(control))))


@server_routes.get("/config")
async def config(control: TheControl, caller: Known) -> dict[str, Any]:
    """What the server was told; secrets are masked, and of credentials a caller sees its own."""
    return control.live.config.shown(caller.may_touch)


@server_routes.post("/config", responses=_CHANGES)
async def reload(control: TheControl, _caller: Operating) -> Reloaded:
    """Read the files of settings and secrets anew, as at SIGHUP, and go by them; all or nothing."""
    try:
        return Reloaded(changed=await control.live.reload())
    except ConfigError as error:
        raise HTTPException(409, str(error)) from error


@server_routes.get("/namespaces")
async def namespaces(control: TheControl, caller: Known) -> Namespaces:
    """What lies in DRAM and on disk, by credential and epoch; to a credential, what is its own."""
    config, keeper = control.live.config, control.keeper
    names = {tenant_digest(name): name for name in known_names(control)}
    found = []
    for held in keeper.held():
        name = names.get(held.tenant)
        if not caller.operator and name != caller.credential:
            continue
        found.append(
            Namespace(
                credential=name,
                tenant=held.tenant.hex(),
                epoch=held.epoch,
                current=held.current,
                dram_bytes=held.dram_bytes,
                disk_bytes=held.disk_bytes,
                pinned_bytes=keeper.pinned_bytes(name) if name and held.current else 0,
                quota_bytes=config.quotas.get(name or "", config.quota_bytes),
            )
        )
    return Namespaces(namespaces=sorted(found, key=lambda each: (each.tenant, each.epoch)))


@server_routes.get("/pin")
async def pins(control: TheControl, caller: Known) -> Pins:
    """What is pinned and for how much longer, by credential; to a credential, what is its own."""
    names = {tenant_digest(name): name for name in known_names(control)}
    return Pins(
        pins=[
            PinRow(
                credential=names.get(row.tenant),
                tenant=row.tenant.hex(),
                seconds=row.seconds,
                objects=row.chunks,
                dram_bytes=row.dram_bytes,
                disk_bytes=row.disk_bytes,
            )
            for row in control.keeper.pins()
            if caller.operator or names.get(row.tenant) == caller.credential
        ]
    )


@server_routes.get("/quotas")
async def quotas(control: TheControl, caller: Known) -> Quotas:
    """How much credentials may hold; to a credential, how much it may hold itself."""
    config = control.live.config
    single = {n: size for n, size in config.quotas.items() if caller.may_touch(n)}
    return Quotas(quota_bytes=config.quota_bytes, quotas=single)


@server_routes.put("/quotas", responses={**_CHANGES, **refusals(404)})
async def set_quota(control: TheControl, caller: Operating, body: SetQuota) -> Quotas:
    """Bound what a credential may hold, from now on, until the settings are read anew."""
    if body.credential is not None:
        check_known(control, body.credential)
    try:
        control.live.set_quota(body.credential, body.quota_bytes)
    except ConfigError as error:
        raise HTTPException(409, str(error)) from error
    return await quotas(control, caller)


@server_routes.get("/verify", responses=refusals(403))
async def verification(control: TheControl, _caller: Operating) -> Verification:
    """How far the last reading of the disk has come, and what it has found."""
    return told_check(control.check)


@server_routes.post("/verify", status_code=202, responses=_CHANGES)
async def verify(control: TheControl, _caller: Operating) -> Verification:
    """Begin to read every byte on disk and hold it against its checksums. It mends nothing."""
    if not control.check.possible:
        raise HTTPException(409, "there is no disk to be read")
    if not control.check.begin():
        raise HTTPException(409, "the disk is being read already")
    return told_check(control.check)


@server_routes.post("/drain", status_code=202, responses=_CHANGES)
async def drain(control: TheControl, _caller: Operating) -> Draining:
    """Stop as at SIGTERM: let nobody in, finish what runs, write out what is dirty, end."""
    control.stop()
    return Draining(draining=True)
