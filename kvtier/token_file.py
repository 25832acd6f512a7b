"""Files of tokens, as the cache server and its clients read them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvtier.constants import DAEMON_TOKENS_MAX, WIRE_TOKEN_BYTES_MAX
from kvtier.errors import ConfigError

_log = logging.getLogger("kvtier.token_file")

#: What such a file may hold: names of up to 64 bytes beside the tokens, and a little space.
TOKEN_FILE_BYTES_MAX = DAEMON_TOKENS_MAX * (WIRE_TOKEN_BYTES_MAX + 128)


def token_lines(path: str) -> list[list[bytes]]:
    """Return the words of each line that holds some and is no comment.

    Raises ``OSError``, and ``ConfigError`` for a file that is too long; it shows nothing of it.
    Warns of one that is not its owner's alone.
    """
    with Path(path).open("rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            _log.warning("others than its owner may use token file %s: chmod 600 %s", path, path)
        data = file.read(TOKEN_FILE_BYTES_MAX + 1)
    if len(data) > TOKEN_FILE_BYTES_MAX:
        raise ConfigError(f"token file {path}: allowed are {TOKEN_FILE_BYTES_MAX} bytes")
    lines = [line.split() for line in data.splitlines()]
    return [line for line in lines if line and not line[0].startswith(b"#")]


def read_token(path: str, name: str | None) -> bytes:
    """Return the token of a file that holds one alone, or that of the line with this name.

    Raises ``ConfigError`` that shows no token.
    """
    try:
        lines = token_lines(path)
    except OSError as error:
        raise ConfigError(f"token file {path}: {error.strerror or error}") from error
    if name is not None:
        lines = [line for line in lines if line[0] == name.encode()]
    if len(lines) != 1 or len(lines[0]) > 2 or len(lines[0][-1]) > WIRE_TOKEN_BYTES_MAX:
        several = "one token; where there are several, token_name (--token-name) says which"
        asked = several if name is None else f"one token of the name {name!r}"
        raise ConfigError(f"token file {path}: allowed is {asked}")
    return lines[0][-1]
