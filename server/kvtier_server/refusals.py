"""Who was turned away, as an operator reads it: a line for each once a minute, and no flood. Pure.

Whoever is refused tries again, and there may be many of them: who was told of within the minute,
and who comes after the first so many, is counted and told with the next line.
"""

from __future__ import annotations

import math
import ssl
from typing import Final

from kvtier.constants import LOG_INTERVAL_S

_TOLD_MAX: Final = 32
#: What OpenSSL calls faults that have a likely reason.
_HANDSHAKES: Final = {
    "WRONG_VERSION_NUMBER": "it speaks no TLS: it should connect to kvtiers://",
    "HTTP_REQUEST": "it speaks HTTP: operators look at --http",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate, which --client-ca asks for",
}


class Refusals:
    """Decides what is logged of refused peers. Belongs to the event loop; holds few of them."""

    def __init__(self, what: str) -> None:
        """``what`` is what became of them."""
        self._what = what
        self._told: set[str] = set()
        self._since_s = -math.inf
        self._untold = 0

    def line(self, peer: str, why: str, now: float) -> str | None:
        """Return the line for a refusal that is news, or None. ``now`` in seconds never goes back.

        ``why`` holds no secret.
        """
        if now - self._since_s >= LOG_INTERVAL_S:
            self._told, self._since_s = set(), now
        if peer in self._told or len(self._told) >= _TOLD_MAX:
            self._untold += 1
            return None
        self._told.add(peer)
        more = f" ({self._untold} more since the last line)" if self._untold else ""
        self._untold = 0
        return f"{peer} is {self._what}: {why}{more}"


def peer_name(address: object, uid: int | None) -> str:
    """Return who a peer is: the user behind a Unix socket, else its host; ports come and go."""
    if uid is not None:
        return f"user {uid}"
    return str(address[0]) if isinstance(address, tuple) and address else "an unknown peer"


def handshake_fault(error: ssl.SSLError) -> str:
    """Return why a client's TLS handshake failed, with what is likely where that is known."""
    known = _HANDSHAKES.get(error.reason or "")
    return known or f"the TLS handshake failed: {error.reason or error}"
