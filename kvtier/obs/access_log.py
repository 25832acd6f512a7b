"""The access log: one line of JSON per admitted request, for ``kvtier sim``. Never a token.

::

    {"time": 1767225600.0, "keys": ["9f86d081884c7d65", …], "chunk_tokens": 256,
     "prompt_tokens": 1043, "hit_tokens": {"dram": 512}, "turn": 2, "hint": "none"}

``keys`` are the prompt's chunk keys, first to last, hashed with a salt that stays with the
operator: they tell equal prefixes apart from others and nothing else, and two logs with different
salts have nothing in common.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvtier.constants import GIB
from kvtier.errors import ConfigError
from kvtier.types import ChunkKey, Features, Tier

ACCESS_LOG_BYTES_MAX: Final = GIB
#: A keyed hash takes at most this much; less than 8 bytes would be guessed.
SALT_BYTES_MAX: Final = 64
SALT_BYTES_MIN: Final = 8
_KEY_BYTES: Final = 8


class Field(StrEnum):
    """The fields of a line."""

    TIME = "time"
    KEYS = "keys"
    CHUNK_TOKENS = "chunk_tokens"
    PROMPT_TOKENS = "prompt_tokens"
    HIT_TOKENS = "hit_tokens"
    TURN = "turn"
    HINT = "hint"


class AccessLog:
    """Writes lines. One owner; a write blocks as long as the file system's cache does.

    At most ``bytes_max`` bytes lie in the file. When it is full it becomes ``PATH.1``, in place of
    the one before. A line that cannot be written is counted in ``dropped_count``, never raised.
    """

    def __init__(self, path: Path, salt: bytes, bytes_max: int = ACCESS_LOG_BYTES_MAX) -> None:
        """Append to a file, or begin it.

        Raises ``ConfigError`` for a salt or a limit out of range, and for a file that cannot be
        opened.
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
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"access log {path}: {error}") from error
        self._used_bytes = self._file.tell()
        self.dropped_count = 0

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
        if len(line) > self._bytes_max:
            self.dropped_count += 1
            return
        try:
            if self._used_bytes + len(line) > self._bytes_max:
                self._begin_anew()
            self._file.write(line)
            self._used_bytes += len(line)
        except (OSError, ValueError):  # ValueError: a file that could not be begun anew is closed.
            self.dropped_count += 1

    def flush(self) -> None:
        """Hand what was written to the file system."""
        try:
            self._file.flush()
        except (OSError, ValueError):
            self.dropped_count += 1

    def close(self) -> None:
        """Write what is left; a second call does nothing."""
        try:
            self._file.close()
        except OSError:
            self.dropped_count += 1

    def _begin_anew(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._file = self._path.open("ab")
        self._used_bytes = 0

    def _salted(self, key: ChunkKey) -> str:
        return hashlib.blake2b(key, digest_size=_KEY_BYTES, key=self._salt).hexdigest()
