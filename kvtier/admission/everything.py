"""Write everything: nothing to learn, and the tier below holds whatever it has room for."""

from __future__ import annotations

from kvtier.errors import ConfigError
from kvtier.types import ChunkKey, Entry, Features


class Everything:
    """An ``AdmissionPolicy`` that refuses nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        require_capacity(capacity_bytes)

    def offer(self, entry: Entry, now: float) -> bool:  # noqa: ARG002
        """See ``AdmissionPolicy.offer``."""
        return True

    def touch(self, key: ChunkKey, now: float, features: Features) -> None:
        """See ``AdmissionPolicy.touch``."""

    def left(self, key: ChunkKey, now: float) -> None:
        """See ``AdmissionPolicy.left``."""


def require_capacity(capacity_bytes: int) -> None:
    """Raise ``ConfigError`` for a tier below that holds nothing."""
    if capacity_bytes <= 0:
        raise ConfigError(f"admission capacity is {capacity_bytes}; it must be above 0 bytes")
