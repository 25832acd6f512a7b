"""Secrets that a command is told, and the server that it tells them; no message shows them."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from kvtier.errors import ConfigError
from kvtier.keys import TEXT_BYTES_MAX


def server_url(name: str, url: str) -> SplitResult:
    """Return the parts of a server's URL, or raise the ``ConfigError`` that names the option."""
    try:
        where = urlsplit(url)
        port = where.port
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if where.username is not None or where.password is not None:
        raise ConfigError(f"{name}: a URL without a user; the server's key goes into --api-key")
    if where.scheme not in {"http", "https"} or not where.hostname or port == 0:
        raise ConfigError(f"{name} {url!r}: allowed is http://HOST:PORT or https://HOST:PORT")
    return where


def bearer(api_key: str) -> dict[str, str]:
    """Return the header that carries a key; none without one. ``ConfigError`` for what cannot."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key: allowed are printable ASCII characters")
    return {"authorization": f"Bearer {api_key}"}


def read_salt(path: Path) -> str:
    """Return the salt in a file, ``-`` for standard input, without its last line break.

    Raises ``ConfigError`` where there is none, or it cannot be one; the message does not show it.
    """
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(TEXT_BYTES_MAX + 3)
        else:
            with path.open("rb") as file:
                data = file.read(TEXT_BYTES_MAX + 3)
    except OSError as error:
        raise ConfigError(f"the salt cannot be read: {error}") from error
    data = data.removesuffix(b"\n").removesuffix(b"\r")
    if not data:
        raise ConfigError(f"{path} holds no salt")
    if len(data) > TEXT_BYTES_MAX:
        raise ConfigError(f"{path} holds more than a salt; allowed: {TEXT_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} holds no salt: it is not UTF-8") from error
