"""Who asks for something by HTTP, and whether it may. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvtier_server.credentials import DEFAULT
from kvtier_server.settings import DaemonConfig


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a credential, or an operator, who may do all things with all credentials."""

    credential: str
    operator: bool

    def may_touch(self, credential: str) -> bool:
        """Tell whether it may look at and change what a credential has."""
        return self.operator or credential == self.credential


def caller_of(config: DaemonConfig, token: bytes) -> Caller | None:
    """Return who asks with this token, empty without one; None: nobody who is known.

    Without any tokens whoever reaches the address is an operator. So is who has one of
    ``--admin-token-file``; without that file, who has the one token of ``--token-file`` where it
    holds one alone. Takes as long for any token of its length.
    """
    tokens, operators = config.door.tokens, config.operators
    if tokens is None and operators is None:
        return Caller(DEFAULT, operator=True)
    if not token:
        return None
    is_operator = operators is not None and operators.name_of(token) is not None
    name = tokens.name_of(token) if tokens is not None else None
    if is_operator:
        return Caller(DEFAULT, operator=True)
    if name is None or tokens is None:
        return None
    return Caller(name, operator=operators is None and tokens.single)


def from_elsewhere(host: str, origin: str | None) -> bool:
    """Tell whether a request without a token was made by a page of another place in a browser.

    Such a page reaches loopback addresses, too. Browsers name the page in ``Origin`` whenever
    something is to change; a name in place of an address may have been pointed here to make the two
    agree (DNS rebinding). Tokens are safe from pages.
    """
    if origin is None:
        return False
    try:
        page = urlsplit(origin)
    except ValueError:  # No browser's: brackets without an address between them.
        return True
    if page.netloc != host:
        return True
    try:
        ipaddress.ip_address(page.hostname or "")
    except ValueError:
        return page.hostname != "localhost"
    return False
