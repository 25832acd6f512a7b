"""What a server and its wire can answer, and which outcome that is. One table for each."""

from __future__ import annotations

import ssl
from typing import Final

from kvtier.errors import (
    ConnectorDataError,
    ConnectorError,
    ConnectorRefusedError,
    ConnectorTimeoutError,
    ConnectorUnavailableError,
)
from kvtier.wire import Status
from kvtier.wire_fields import WireError, WireVersionError
from kvtier_connectors.threads import without_frames

#: The outcome for a status that is neither ``OK`` nor ``ABSENT``.
STATUSES: Final[dict[Status, type[ConnectorError]]] = {
    Status.REFUSED: ConnectorRefusedError,
    Status.UNAVAILABLE: ConnectorUnavailableError,
    Status.LATE: ConnectorTimeoutError,
    Status.CORRUPT: ConnectorDataError,
}

#: The outcome for an error of a socket or of the wire. The most specific class counts.
ERRORS: Final[dict[type[BaseException], type[ConnectorError]]] = {
    WireError: ConnectorDataError,
    WireVersionError: ConnectorRefusedError,
    ssl.SSLCertVerificationError: ConnectorRefusedError,
    ssl.SSLError: ConnectorUnavailableError,
    PermissionError: ConnectorRefusedError,
    TimeoutError: ConnectorTimeoutError,
    OSError: ConnectorUnavailableError,
}

#: What OpenSSL calls an answer that is no TLS.
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})


def failure(status: Status, text: str) -> ConnectorError:
    """Return the outcome that a status is."""
    return STATUSES[status](text or status.name.lower())


def translated(error: Exception) -> ConnectorError:
    """Return the outcome that an error is, with the error as its cause."""
    for kind in type(error).__mro__:
        if kind in ERRORS:
            text = str(error) or kind.__name__
            if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
                text = f"the server speaks no TLS: connect to kvtier:// ({text})"
            outcome = ERRORS[kind](text)
            outcome.__cause__ = error
            return without_frames(outcome)
    raise AssertionError(f"no outcome for {type(error).__name__}") from error


def wordless(fault: ConnectorError, *, tls: bool, certified: bool) -> ConnectorError:
    """Return the outcome of a connection that was closed before the server said anything.

    A server of ours says why it sends somebody away, but not where TLS is in between.
    """
    if tls and certified:
        return fault
    likely = "it wants a certificate of ours: cert and key" if tls else "it speaks TLS: kvtiers://"
    told = type(fault)(f"{fault} before it said a word; perhaps {likely}")
    told.__cause__ = fault.__cause__
    return told
