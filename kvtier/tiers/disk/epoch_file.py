"""Epochs on disk: one small file, replaced whole, synced, and never trusted when damaged."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from kvtier.tiers.epoch_record import StoredEpochs, decode_epochs, encode_epochs

_NAME = "epochs"


def load_epochs(root: str) -> StoredEpochs:
    """Return what the file says. Raises ``OSError`` when it cannot be read."""
    try:
        with open(os.path.join(root, _NAME), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return StoredEpochs({}, 0)
    return decode_epochs(data)


def save_epochs(
    root: str, epochs: Mapping[bytes, int], floor: int, owed: Collection[bytes] = frozenset()
) -> None:
    """Replace the file; durable when this returns. Raises ``OSError``."""
    path = os.path.join(root, _NAME)
    with open(path + ".new", "wb") as file:
        file.write(encode_epochs(epochs, floor, owed))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
