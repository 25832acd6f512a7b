"""What a lookup answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.cache.sequence import Sequence
from kvtier.types import ChunkHit


@dataclass(frozen=True, slots=True)
class Ready:
    """The longest usable prefix, chunk by chunk, as it stood at the lookup.

    Nothing is pinned: a load may turn out shorter, never wrong.
    """

    sequence: Sequence
    hits: tuple[ChunkHit, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the prefix."""
        return len(self.hits) * self.sequence.chunk_tokens


@dataclass(frozen=True, slots=True)
class Pending:
    """A tier that may hold more cannot answer yet. Ask again; after ``until`` it is left out.

    What it may hold begins at ``start_token``.
    """

    until: float
    start_token: int = 0
