"""The access log: one line of JSON per admitted request, for ``kvtier sim``. Never a token.

::

    {"time": 1767225600.0, "keys": ["9f86d081884c7d65", …], "chunk_tokens": 256,
     "prompt_tokens": 1043, "hit_tokens": {"dram": 512}, "turn": 2, "hint": "none"}

``keys`` are the prompt's chunk keys, first to last, hashed with a salt that stays with the
operator: they tell equal prefixes apart from others and nothing else, and two logs with different
salts have nothing in common.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvtier.constants import GIB, KIB
from kvtier.errors import ConfigError
from kvtier.types import ChunkKey, Features, Tier

ACCESS_LOG_BYTES_MAX: Final = GIB
#: A keyed hash takes at most this much; less than 8 bytes would be guessed.
SALT_BYTES_MAX: Final = 64
SALT_BYTES_MIN: Final = 8
SALT_BYTES_DEFAULT: Final = 32
_KEY_BYTES: Final = 8
_STEP_BYTES: Final = 64 * KIB


class Field(StrEnum):
    """The fields of a line."""

    TIME = "time"
    KEYS = "keys"
    CHUNK_TOKENS = "chunk_tokens"
    PROMPT_TOKENS = "prompt_tokens"
    HIT_TOKENS = "hit_tokens"
    TURN = "turn"
    HINT = "hint"


#: What every line begins with.
_BEGINNING: Final = f'{{"{Field.TIME}":'.encode()


class AccessLog:
    """Writes lines. One owner; a write blocks as long as the file system does.

    At most ``bytes_max`` bytes lie in the file. When it is full it becomes ``PATH.1``, in place of
    the one before. Nothing is raised once it is open: the first fault of the file system ends the
    log and stays in ``fault``; lines that are not written are counted in ``dropped_count``. A line
    is written whole or not at all.
    """

    def __init__(self, path: Path, salt: bytes, bytes_max: int = ACCESS_LOG_BYTES_MAX) -> None:
        """Append to a file, or begin it.

        Raises ``ConfigError`` for a salt or a limit out of range, and for a file that cannot be
        opened, that another log has open, or that is something else.
        """
        if not SALT_BYTES_MIN <= len(salt) <= SALT_BYTES_MAX:
            raise ConfigError(
                f"the salt has {len(salt)} bytes; allowed: {SALT_BYTES_MIN} to {SALT_BYTES_MAX}"
            )
        if bytes_max <= 0:
            raise ConfigError(f"bytes_max is {bytes_max}; it must be above 0")
        self._path = path
        self._salt = salt
        self._bytes_max = bytes_max
        try:
            self._file = _opened(path)
        except BlockingIOError as error:
            raise ConfigError(f"access log {path}: another process writes it") from error
        except OSError as error:
            raise ConfigError(f"access log {path}: {error.strerror}") from error
        self._used_bytes = os.fstat(self._file.fileno()).st_size
        self.dropped_count = 0
        self.fault: OSError | None = None

    def write(
        self,
        time_s: float,
        keys: Sequence[ChunkKey],
        *,
        chunk_tokens: int,
        prompt_tokens: int,
        hit_tokens: Mapping[Tier, int],
        features: Features,
    ) -> None:
        """Add one admitted request. ``time_s`` is in seconds, of one clock for the whole log."""
        record = {
            Field.TIME: time_s,
            Field.KEYS: [self._salted(key) for key in keys],
            Field.CHUNK_TOKENS: chunk_tokens,
            Field.PROMPT_TOKENS: prompt_tokens,
            Field.HIT_TOKENS: {tier.value: tokens for tier, tokens in hit_tokens.items()},
            Field.TURN: features.turn,
            Field.HINT: features.hint.value,
        }
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if self.fault is not None or len(line) > self._bytes_max:
            self.dropped_count += 1
            return
        try:
            if self._used_bytes + len(line) > self._bytes_max:
                self._begin_anew()
            self._append(line)
        except OSError as error:
            self.dropped_count += 1
            self.fault = error
            self.close()

    def close(self) -> None:
        """Give the file back; a second call does nothing."""
        try:
            self._file.close()
        except OSError as error:
            self.fault = self.fault or error

    def _append(self, line: bytes) -> None:
        written = self._file.write(line)
        if written < len(line):
            self._file.truncate(self._used_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._used_bytes += written

    def _begin_anew(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._file = _opened(self._path)
        self._used_bytes = 0

    def _salted(self, key: ChunkKey) -> str:
        return hashlib.blake2b(key, digest_size=_KEY_BYTES, key=self._salt).hexdigest()


def kept_salt(path: Path) -> bytes:
    """Return the salt that a file keeps, made when there is none; only its user may read it.

    Raises ``ConfigError`` when it cannot be made or read, and for a file of another length.
    """
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(SALT_BYTES_DEFAULT))
        salt = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"salt of the access log {path}: {error.strerror}") from error
    if len(salt) != SALT_BYTES_DEFAULT:
        raise ConfigError(
            f"salt of the access log {path}: {len(salt)} bytes, not {SALT_BYTES_DEFAULT}; without "
            "the file a new one is made"
        )
    return salt


def _opened(path: Path) -> io.FileIO:
    """Open a log to append to it, alone, after its last whole line."""
    with contextlib.ExitStack() as undo:
        file = undo.enter_context(io.FileIO(path, "a+"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _cut_torn_line(file.fileno())
        undo.pop_all()
    return file


def _cut_torn_line(descriptor: int) -> None:
    """Cut what a power cut has left of a line: nothing after it could be read."""
    size = end = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, len(_BEGINNING), 0) != _BEGINNING:
        raise OSError(errno.EEXIST, "this file is no access log")
    while end:
        start = max(0, end - _STEP_BYTES)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
