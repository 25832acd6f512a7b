"""What a cache holds of a request's prompt."""

from __future__ import annotations

from dataclasses import replace

from kvtier.cache.cache import Cache
from kvtier.cache.match import Ready
from kvtier.cache.sequence import Sequence
from kvtier.types import Namespace
from kvtier_engine.types import GenerateRequest


class CacheHeld:
    """``kvtier_engine.api.held.Held`` over a cache. ``namespace`` is the engine's own."""

    def __init__(self, cache: Cache, namespace: Namespace) -> None:
        self._cache = cache
        self._namespace = namespace

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self._namespace.layout.chunk_tokens

    def tokens(self, request: GenerateRequest) -> int:
        """Return how many tokens of the prompt the tiers would give."""
        match = self._cache.match(self._sequence(request))
        return match.tokens if isinstance(match, Ready) else 0

    def pinned_tokens(self, request: GenerateRequest) -> int:
        """Return how many of them are pinned."""
        return self._cache.pins.pinned_tokens(self._sequence(request))

    def unpin(self, request: GenerateRequest) -> int:
        """Let the prompt's chunks leave when their turn comes."""
        return self._cache.pins.unpin_sequence(self._sequence(request))

    def _sequence(self, request: GenerateRequest) -> Sequence:
        namespace = replace(self._namespace, tenant_salt=request.cache_salt)
        sequence = self._cache.sequence(namespace)
        sequence.append(request.prompt)
        return sequence
