"""What the control plane's handlers share, and who gets through to them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from kvtier_server.access import Caller, caller_of, from_elsewhere
from kvtier_server.disk_check import DiskCheck
from kvtier_server.figures import Snapshot
from kvtier_server.keeper import Keeper
from kvtier_server.live import Live


@dataclass(frozen=True, slots=True)
class Control:
    """Everything that can be asked for. ``snapshot`` does not block; ``stop`` begins to drain.

    ``credentials`` tells who has come in since the start.
    """

    snapshot: Callable[[], Snapshot]
    live: Live
    keeper: Keeper
    check: DiskCheck
    credentials: Callable[[], Collection[str]]
    stop: Callable[[], None]


_bearer: Final = HTTPBearer(auto_error=False, description="A token of the server's files.")


async def control_of(request: Request) -> Control:
    """Return what the application was made with."""
    control: Control = request.app.state.control
    return control


TheControl = Annotated[Control, Depends(control_of)]


async def known(
    control: TheControl, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    """Let those through that have a token, where there are tokens."""
    # Headers are bytes, which are given as Latin-1.
    token = b"" if bearer is None else bearer.credentials.strip().encode("latin-1")
    caller = caller_of(control.live.config, token)
    if caller is None:
        challenge = {"WWW-Authenticate": "Bearer"}
        raise HTTPException(401, "a token of the server's files is needed", challenge)
    return caller


Known = Annotated[Caller, Depends(known)]


async def changing(control: TheControl, caller: Known, request: Request) -> Caller:
    """Do the same where something is to change: no page of another place is let through."""
    config = control.live.config
    guarded = config.door.tokens is not None or config.operators is not None
    headers = request.headers
    if not guarded and from_elsewhere(headers.get("host", ""), headers.get("origin")):
        raise HTTPException(403, "a page of another place may change nothing here")
    return caller


Changing = Annotated[Caller, Depends(changing)]


async def operating(caller: Changing) -> Caller:
    """Let operators through."""
    if not caller.operator:
        raise HTTPException(403, "only an operator may, with the token of --admin-token-file")
    return caller


Operating = Annotated[Caller, Depends(operating)]


def touched(caller: Caller, credential: str | None) -> str:
    """Return whose objects are meant, the caller's own unless others are named.

    Raises ``HTTPException`` for others that are not the caller's to touch.
    """
    name = credential or caller.credential
    if not caller.may_touch(name):
        raise HTTPException(403, "only an operator may touch what another credential has")
    return name
