"""What the engine does not take in, and why, as typed errors."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import KVTierError
from kvtier_engine.decisions import blocks_for
from kvtier_engine.types import GenerateRequest


class RequestRefusedError(KVTierError):
    """The engine did not take a request in; nothing of it remains."""


class ContextLengthError(RequestRefusedError):
    """Prompt and completion together are longer than ``limit`` tokens."""

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int, what: str) -> None:
        super().__init__(
            f"{prompt_tokens} prompt tokens and {max_tokens} to generate; {what} holds {limit}"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class QueueFullError(RequestRefusedError):
    """As many requests as the engine may hold are running or waiting."""


class EngineStoppedError(RequestRefusedError):
    """The engine is stopping, has stopped, or has died of a bug."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request may ask for, and how many may be in the engine at once."""

    context_tokens: int
    vocab_size: int
    requests_max: int = 1024


def check_request(
    request: GenerateRequest, limits: EngineLimits, block_count: int, block_tokens: int
) -> None:
    """Raise ``RequestRefusedError`` for a request that could never be served to its end."""
    prompt, generated = len(request.prompt), request.sampling.max_tokens
    if prompt < 1 or generated < 1:
        raise RequestRefusedError("a request has at least one prompt token and generates one")
    if min(request.prompt) < 0 or max(request.prompt) >= limits.vocab_size:
        raise RequestRefusedError(f"token ids run from 0 to {limits.vocab_size - 1}")
    if prompt + generated > limits.context_tokens:
        raise ContextLengthError(prompt, generated, limits.context_tokens, "the model's context")
    # The last token's KV is never computed: nothing follows it.
    if blocks_for(prompt + generated - 1, block_tokens) > block_count:
        capacity = block_count * block_tokens
        raise ContextLengthError(prompt, generated, capacity, "the KV pool")
