"""Encryption with one key, whoever it is for."""

from __future__ import annotations

from kvtier_connectors.decorators.encrypted import KEY_BYTES


class OneKey:
    """The same key for everybody, all of whose bytes are alike."""

    def __init__(self, value: int = 1) -> None:
        self._key = bytes([value]) * KEY_BYTES

    def key(self, tenant: str) -> bytes:
        del tenant
        return self._key
