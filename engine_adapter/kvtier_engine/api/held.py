"""What the tiers hold of a prompt, for answers that say so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from kvtier.constants import HOUSEKEEPING_S
from kvtier.interfaces import Clock
from kvtier_engine.types import GenerateRequest


class Held(Protocol):
    """Looks into the tiers below HBM; briefly, and counts nothing. The event loop's thread."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk: only whole ones are held. 0: there are no tiers."""
        ...

    def tokens(self, request: GenerateRequest) -> int:
        """Return how many tokens of a request's prompt, from the first on, the tiers hold."""
        ...

    def pinned_tokens(self, request: GenerateRequest) -> int:
        """Return how many of them are pinned."""
        ...

    def unpin(self, request: GenerateRequest) -> int:
        """Let a request's prompt leave when its turn comes; return how many tokens were pinned."""
        ...


class NothingHeld:
    """Of a server without tiers."""

    @property
    def chunk_tokens(self) -> int:
        """Zero."""
        return 0

    def tokens(self, request: GenerateRequest) -> int:  # noqa: ARG002
        """Return 0."""
        return 0

    def pinned_tokens(self, request: GenerateRequest) -> int:  # noqa: ARG002
        """Return 0."""
        return 0

    def unpin(self, request: GenerateRequest) -> int:  # noqa: ARG002
        """Return 0."""
        return 0


async def until_held(
    held: Held, requests: Sequence[GenerateRequest], clock: Clock, deadline: float
) -> None:
    """Wait until the tiers hold all whole chunks of the prompts, or for a deadline.

    A prompt is stored beside what comes after it, so its answer may be there first.
    """
    size = held.chunk_tokens
    while size and clock.now() < deadline:
        if all(held.tokens(each) >= len(each.prompt) // size * size for each in requests):
            return
        await asyncio.sleep(HOUSEKEEPING_S / 10)
