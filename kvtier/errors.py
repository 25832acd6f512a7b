"""Every error that KVTier raises on purpose.

::

    KVTierError
    ├── ConfigError            a setting is unknown, out of range or contradicts another
    ├── LayoutError            shapes, strides or dtypes that KVTier cannot carry
    ├── CodecError             values or sizes a codec cannot carry
    ├── ShardError             a shard's bytes are not what they should be
    │   ├── FormatError        header: magic, version, field, size, checksum
    │   ├── IdentityError      a sound shard, but not the one that was asked for
    │   └── ChecksumError      payload bytes differ from their checksum
    ├── TierError              a tier could not do what was asked
    │   ├── TierFullError      no room within the bound
    │   ├── TierUnavailableError  the medium fails or its breaker is open
    │   └── DeadlineError      the answer did not come in time
    ├── ConnectorError         a connector's outcome for one key
    │   ├── ConnectorTimeoutError
    │   ├── ConnectorUnavailableError
    │   ├── ConnectorRefusedError     the store said no (memory limit, permission)
    │   └── ConnectorDataError        the store answered with other bytes than it was given
    ├── MissingExtraError      an optional dependency is not installed
    └── RegistryError          no such policy, codec or connector

A miss is a value, never an error. A bug is an ``AssertionError``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_SHOWN_CHARACTERS: Final = 120


class KVTierError(Exception):
    """Base of everything that KVTier raises on purpose."""


class ConfigError(KVTierError):
    """A setting is unknown, out of range or contradicts another one."""


class LayoutError(KVTierError):
    """A shape, stride or dtype that KVTier cannot carry."""


class CodecError(KVTierError):
    """A codec cannot carry these values or this size."""


class ShardError(KVTierError):
    """A shard's bytes are not what they should be."""


class FormatError(ShardError):
    """The header is not one that this version can read."""


class IdentityError(ShardError):
    """A sound shard, but not the one that was asked for."""


class ChecksumError(ShardError):
    """Payload bytes differ from their checksum."""


class TierError(KVTierError):
    """A tier could not do what was asked."""


class TierFullError(TierError):
    """No room within the tier's bound."""


class TierUnavailableError(TierError):
    """The medium fails, or its breaker is open."""


class DeadlineError(TierError):
    """The answer did not come in time."""


class ConnectorError(KVTierError):
    """A connector's outcome for one key. The driver's error is kept as ``__cause__``."""


class ConnectorTimeoutError(ConnectorError):
    """The store did not answer in time."""


class ConnectorUnavailableError(ConnectorError):
    """The store cannot be reached."""


class ConnectorRefusedError(ConnectorError):
    """The store refused: memory limit, permission, read-only."""


class ConnectorDataError(ConnectorError):
    """The store answered with other bytes than it was given."""


class MissingExtraError(KVTierError):
    """An optional dependency is not installed; the message names the exact install command."""


class RegistryError(KVTierError):
    """No policy, codec or connector of that name."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest allowed name, else an empty string.

    >>> nearest("durabilty", ["durability", "disk"])
    " (did you mean 'durability'?)"
    """
    found = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""


def shortly(value: object) -> str:
    """Return a value as a message shows it: as Python writes it, a long one cut.

    >>> shortly("ab" * 500).count("ab")
    49
    """
    try:
        text = repr(value)
    except ValueError:  # A number of so many digits as Python writes none.
        text = f"a very long {type(value).__name__}"
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[: _SHOWN_CHARACTERS - 20]}...{text[-1]} ({len(text)} characters)"
