"""What the control plane's handlers share, and who gets through to them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from kvtier.errors import nearest
from kvtier.keys import tenant_digest
from kvtier_server.access import Caller, caller_of, from_elsewhere
from kvtier_server.credentials import DEFAULT
from kvtier_server.disk_check import DiskCheck
from kvtier_server.figures import Snapshot
from kvtier_server.keeper import Keeper
from kvtier_server.live import Live

_NAMES_TOLD_MAX: Final = 16


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


class UnknownCredentialError(HTTPException):
    """A credential that is named and that nobody can be."""


def known_names(control: Control) -> set[str]:
    """Return all names that credentials are known to have."""
    config = control.live.config
    tokens = config.door.tokens.by_name if config.door.tokens is not None else {}
    uids = {f"uid-{uid}" for uid in config.door.uids}
    return {DEFAULT, *tokens, *uids, *config.quotas, *control.credentials()}


def touched(control: Control, caller: Caller, credential: str | None) -> str:
    """Return whose objects are meant, the caller's own unless others are named.

    Raises ``HTTPException`` for others that are not the caller's to touch, and for a name that
    nobody has: nothing would come of it, and whoever mistyped it would not know.
    """
    name = credential or caller.credential
    if not caller.may_touch(name):
        raise HTTPException(403, "only an operator may touch what another credential has")
    check_known(control, name)
    return name


def check_known(control: Control, name: str) -> None:
    """Raise ``UnknownCredentialError`` for the name of none, to an operator: it tells the others.

    Certificates may give any name; and what lies here may be of one that has no way in any more.
    """
    names = known_names(control)
    if name in names or control.live.config.door.certificates:
        return
    if tenant_digest(name) in {held.tenant for held in control.keeper.held()}:
        return
    listed = ", ".join(sorted(names)[:_NAMES_TOLD_MAX])
    raise UnknownCredentialError(
        404, f"no credential is named {name!r}{nearest(name, names)}; known are {listed}"
    )
