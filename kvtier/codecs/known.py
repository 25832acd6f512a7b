"""The codecs of one process, by the names that stand in plans, indexes and headers."""

from __future__ import annotations

from kvtier.errors import KVTierError
from kvtier.interfaces import BlockCodec
from kvtier.registry import codecs
from kvtier.types import Fidelity


class KnownCodecs:
    """Makes each codec once. Owned by one thread at a time, or used under its owner's lock."""

    def __init__(self) -> None:
        self._known: dict[str, BlockCodec | None] = {}

    def get(self, name: str) -> BlockCodec:
        """Return a codec. Raises ``RegistryError`` and ``ConfigError`` where it cannot be made."""
        codec = self._known.get(name)
        if codec is None:
            codec = self._known[name] = self._make(name)
        return codec

    def readable(self, name: str, fidelity: Fidelity) -> bool:
        """Tell whether what a codec packed may be used in a namespace of that fidelity.

        A codec that this process cannot make is a miss, and nothing lossy is ever exact.
        """
        if name not in self._known:
            try:
                self._known[name] = self._make(name)
            except KVTierError:
                self._known[name] = None
        codec = self._known[name]
        return codec is not None and (codec.traits.exact or fidelity is Fidelity.LOSSY)

    @staticmethod
    def _make(name: str) -> BlockCodec:
        codec: BlockCodec = codecs.load(name)()
        return codec
