"""Who may use the server: by a token of a file, a certificate, or as a user of this machine."""

from __future__ import annotations

import hmac
import os
import re
import socket
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.constants import DAEMON_TOKENS_MAX, WIRE_TOKEN_BYTES_MAX
from kvtier.errors import ConfigError
from kvtier.token_file import token_lines

#: Whose objects those are of whoever needs no token.
DEFAULT: Final = "default"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PEER: Final = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7).


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens by the name of their credential; never shown."""

    by_name: dict[str, bytes] = field(repr=False)

    @property
    def single(self) -> bool:
        """True where there is one token alone, which is that of ``default``."""
        return list(self.by_name) == [DEFAULT]

    def name_of(self, token: bytes) -> str | None:
        """Return whose token it is; takes as long for any token of its length."""
        found = None
        for name, known in self.by_name.items():
            if hmac.compare_digest(token, known):
                found = name
        return found


def read_tokens(path: str, option: str = "--token-file") -> Tokens:
    """Read lines ``name token``; a file of one token alone is that of ``default``.

    Raises ``ConfigError`` that names ``option`` and shows no token.
    """
    where = f"{option} = {path!r}"
    try:
        lines = token_lines(path)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if len(lines) > DAEMON_TOKENS_MAX:
        raise ConfigError(f"{where}: allowed are {DAEMON_TOKENS_MAX} tokens")
    if len(lines) == 1 and len(lines[0]) == 1:
        lines = [[DEFAULT.encode(), *lines[0]]]
    by_name: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        name = line[0].decode("ascii", "replace")
        well = len(line) == 2 and _NAME.fullmatch(name) and name not in by_name
        if not well or len(line[1]) > WIRE_TOKEN_BYTES_MAX:
            allowed = f"a name, used once, and a token of at most {WIRE_TOKEN_BYTES_MAX} bytes"
            raise ConfigError(f"{where}: line {number} is not allowed; allowed is {allowed}")
        by_name[name] = line[1]
    if not by_name:
        raise ConfigError(f"{where}: it holds no token")
    return Tokens(by_name)


def peer_uid(connection: socket.socket) -> int:
    """Return the user at the other end of a Unix socket, as the kernel tells it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    uid: int = _PEER.unpack(data)[1]
    return uid


def certificate_name(certificate: Mapping[str, Any] | None) -> str | None:
    """Return the name that a verified certificate gives its holder; None: none that can be one.

    ``certificate`` is what ``ssl.SSLSocket.getpeercert`` returns. The name is the first DNS name of
    subjectAltName (RFC 5280, 4.2.1.6), without one the last commonName of the subject.
    """
    if not certificate:
        return None
    alternatives = [text for kind, text in certificate.get("subjectAltName", ()) if kind == "DNS"]
    subject = [pair for names in certificate.get("subject", ()) for pair in names]
    common = [text for kind, text in subject if kind == "commonName"]
    name = (alternatives[:1] or common[-1:] or [""])[0]
    return name if is_credential(name) else None


def is_credential(name: str) -> bool:
    """Tell whether a credential may have this name."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Door:
    """Decides who comes in. Pure but for the process's own user.

    ``certificates``: clients on TCP have shown one that was verified, and are who it says.
    """

    tokens: Tokens | None
    uids: Collection[int] = ()
    certificates: bool = False

    def credential(
        self, token: bytes, uid: int | None, certificate: str | None = None
    ) -> str | None:
        """Return whose objects a client may use; None: nobody's.

        ``uid`` is the user behind a Unix socket, None for TCP; ``certificate`` the name that a
        client's gives it. A token counts wherever it comes from; without one, the server's own user
        is ``default``, another one that is allowed has objects of its own, a certificate tells
        whose they are, and else TCP is open only where there are no tokens.
        """
        if token:
            return self.tokens.name_of(token) if self.tokens is not None else None
        if uid is None and self.certificates:
            return certificate
        if uid is None:
            return DEFAULT if self.tokens is None else None
        if uid == os.geteuid():
            return DEFAULT
        return f"uid-{uid}" if uid in self.uids else None

    def lost(self, after: Door) -> set[str]:
        """Return whose way in is another one, or none, once ``after`` decides.

        What certificates say is theirs to say.
        """
        before = self.tokens.by_name if self.tokens is not None else {DEFAULT: b""}
        now = after.tokens.by_name if after.tokens is not None else {DEFAULT: b""}
        withdrawn = {name for name, token in before.items() if now.get(name) != token}
        return withdrawn | {f"uid-{uid}" for uid in self.uids if uid not in after.uids}
