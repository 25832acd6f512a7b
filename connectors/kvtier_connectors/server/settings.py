"""What a server's URL says. Pure, but for the files that hold the token and certificates."""

from __future__ import annotations

import ssl
import sys
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from kvtier.config import parse_size, url_options
from kvtier.constants import SHARED_BYTES_MIN
from kvtier.errors import ConfigError
from kvtier.token_file import read_token

PORT_DEFAULT: Final = 7070
CONNECTIONS_MAX: Final = 64
_PLAIN: Final = ("connect_timeout_s", "connections", "timeout_s", "token_file", "token_name")
_OPTIONS: Final = {
    "kvtier": _PLAIN,
    "kvtiers": (*_PLAIN, "ca", "cert", "hostname", "key"),
    "kvtier+unix": (*_PLAIN, "shared", "shared_from"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a URL says. With a ``path`` it is a Unix socket.

    A client that is ``certified`` shows a certificate of its own.

    With ``shared``, payloads of ``shared_from`` bytes and more pass through memory that the server
    shares with us, where it does.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    token: bytes = field(default=b"", repr=False)
    tls: ssl.SSLContext | None = None
    certified: bool = False
    connections: int = 4
    timeout_s: float = 5.0
    connect_timeout_s: float = 2.0
    shared: bool = False
    shared_from: int = SHARED_BYTES_MIN


def parse_url(url: str) -> Settings:
    """Return what the URL says. Raises ``ConfigError`` that holds no secret."""
    parts = urlsplit(url)
    options = url_options(url, _OPTIONS[parts.scheme])
    if parts.username is not None or parts.password is not None:
        raise ConfigError("a token is in a file, which token_file names, not in the URL")
    host, port, path = "", 0, ""
    if parts.scheme == "kvtier+unix":
        path = _unix(parts.netloc, parts.path)
    else:
        host, port = _tcp(parts.scheme, parts.netloc, parts.path)
    count = _number("connections", options.get("connections", "4"), 1, CONNECTIONS_MAX)
    connect_s = options.get("connect_timeout_s", "2")
    return Settings(
        host=host,
        port=port,
        path=path,
        token=_token(options.get("token_file"), options.get("token_name")),
        tls=_context(options) if parts.scheme == "kvtiers" else None,
        certified="cert" in options,
        connections=int(count),
        timeout_s=_number("timeout_s", options.get("timeout_s", "5"), 0.001, 3600),
        connect_timeout_s=_number("connect_timeout_s", connect_s, 0.001, 3600),
        shared=bool(path) and _shared(options.get("shared", "yes")),
        shared_from=_size("shared_from", options.get("shared_from", f"{SHARED_BYTES_MIN}")),
    )


def _unix(netloc: str, path: str) -> str:
    if netloc or not path:
        raise ConfigError("a kvtier+unix:// URL has three slashes: kvtier+unix:///run/kvtier.sock")
    return unquote(path)


def _tcp(scheme: str, netloc: str, path: str) -> tuple[str, int]:
    host, separator, port = netloc.rpartition(":")
    if not separator or port.endswith("]"):
        host, port = netloc, str(PORT_DEFAULT)
    if not host or path.strip("/"):
        raise ConfigError(f"a {scheme}:// URL is {scheme}://host:port")
    return host.strip("[]"), int(_number("the port", port, 1, 65_535))


def _token(path: str | None, name: str | None) -> bytes:
    """Read a file of one token, or the line of that name, as the server's own file has them."""
    if path is None:
        if name is not None:
            raise ConfigError("token_name needs a token_file")
        return b""
    return read_token(path, name)


def _context(options: dict[str, str]) -> ssl.SSLContext:
    if ("cert" in options) != ("key" in options):
        raise ConfigError("cert needs key, and the other way round")
    hostname = options.get("hostname", "check")
    if hostname not in {"check", "any"}:
        raise ConfigError(f"hostname is {hostname!r}; allowed: any, check")
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options["key"])
    except OSError as error:
        raise ConfigError(f"ca, cert, key: {error.strerror or error}") from error
    context.check_hostname = hostname == "check"
    return context


def _shared(text: str) -> bool:
    if text not in {"yes", "no"}:
        raise ConfigError(f"shared is {text!r}; allowed: no, yes")
    return text == "yes" and sys.platform == "linux"


def _size(name: str, text: str) -> int:
    try:
        return max(1, parse_size(text))
    except ConfigError as error:
        raise ConfigError(f"{name} of a server's URL is {text!r}: {error}") from error


def _number(name: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(f"{name} of a server's URL is {text!r}; allowed is {low:g} to {high:g}")
    return value
