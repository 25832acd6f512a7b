"""Epochs as bytes, the same in a directory's file and in a remote's object: checked, never trusted.

Losing an epoch would bring back KV that was declared stale. So a record that fails its checksum, or
is none, stands for a floor under all namespaces at the present second: everything older is
unreachable, which costs a recompute and never a wrong token.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import msgpack  # type: ignore[import-untyped]
import xxhash

from kvtier.constants import DIGEST_BYTES, EPOCH_MAX

_SUM_BYTES: Final = 16


class StoredEpochs(NamedTuple):
    """Epochs by digest, the floor under all others, and what no remote may know of yet.

    What came from a damaged record is to be saved, or every start would raise the floor again.
    """

    epochs: dict[bytes, int]
    floor: int
    damaged: bool = False
    #: Digests whose latest raise a remote has not been told of; an empty one stands for the floor.
    owed: frozenset[bytes] = frozenset()


def encode_epochs(
    epochs: Mapping[bytes, int], floor: int, owed: Collection[bytes] = frozenset()
) -> bytes:
    """Return a record; equal epochs give equal bytes."""
    row: tuple[Any, ...] = (floor, dict(sorted(epochs.items())))
    body: bytes = msgpack.packb((*row, sorted(owed)) if owed else row)
    return xxhash.xxh3_128_digest(body) + body


def decode_epochs(data: bytes) -> StoredEpochs:
    """Return what a record says; a damaged one raises the floor to the present second."""
    body = data[_SUM_BYTES:]
    stored = None
    if xxhash.xxh3_128_digest(body) == data[:_SUM_BYTES]:
        # What somebody else wrote may have a good sum and be no record.
        with contextlib.suppress(ValueError, TypeError, msgpack.UnpackException):
            stored = _taken(msgpack.unpackb(body, strict_map_key=False))
    return stored or StoredEpochs({}, int(time.time()), damaged=True)


def _taken(row: Any) -> StoredEpochs | None:
    """Return what a row says; None where it is none. Raises ``ValueError`` or ``TypeError`` too."""
    floor, epochs, *rest = row
    owed = rest[0] if rest else []
    if not (isinstance(epochs, dict) and isinstance(owed, list) and len(rest) <= 1):
        return None
    numbers, digests = (floor, *epochs.values()), (*epochs, *filter(None, owed))
    if not all(type(each) is int and 0 <= each <= EPOCH_MAX for each in numbers):
        return None
    if not all(isinstance(each, bytes) and len(each) == DIGEST_BYTES for each in digests):
        return None
    return StoredEpochs(epochs, floor, owed=frozenset(owed))
