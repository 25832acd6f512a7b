"""Epochs on disk: small, replaced whole, synced, and never trusted when damaged.

Losing an epoch would bring back KV that was declared stale. So a file that fails its checksum
raises the floor under all namespaces to the present second: everything older is unreachable,
which costs a recompute and never a wrong token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgpack  # type: ignore[import-untyped]
import xxhash

_NAME = "epochs"
_SUM_BYTES = 16


class StoredEpochs(NamedTuple):
    """Epochs by namespace digest and the floor under all others.

    What came from a damaged file is to be saved, or every start would raise the floor again.
    """

    epochs: dict[bytes, int]
    floor: int
    damaged: bool = False


def load_epochs(root: str) -> StoredEpochs:
    """Return what the file says. Raises ``OSError`` when it cannot be read."""
    try:
        with open(os.path.join(root, _NAME), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return StoredEpochs({}, 0)
    body = data[_SUM_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:_SUM_BYTES]:
        return StoredEpochs({}, int(time.time()), damaged=True)
    floor, epochs = msgpack.unpackb(body, strict_map_key=False)
    return StoredEpochs(epochs, floor)


def save_epochs(root: str, epochs: Mapping[bytes, int], floor: int) -> None:
    """Replace the file; durable when this returns. Raises ``OSError``."""
    body = msgpack.packb((floor, dict(epochs)))
    path = os.path.join(root, _NAME)
    with open(path + ".new", "wb") as file:
        file.write(xxhash.xxh3_128_digest(body) + body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
