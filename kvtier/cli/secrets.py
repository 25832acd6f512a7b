"""Secrets that a command is told: from a file or standard input, never from its arguments."""

from __future__ import annotations

import sys
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.keys import TEXT_BYTES_MAX


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
