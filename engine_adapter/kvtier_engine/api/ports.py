"""What the API needs of the rest of the engine, and what it tells of the model it serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier_engine.types import Delta, GenerateRequest


class Generator(Protocol):
    """Turns requests into deltas."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Yield the request's deltas; closing the generator aborts the request."""
        ...


class TokenizerLike(Protocol):
    """Text to tokens and back. Called from the event loop and, for long texts, from a thread."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the tokens of a text, special tokens in it recognised.

        ``add_special_tokens`` False: the text has what the tokenizer puts around every text.
        """
        ...

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Return the text of tokens."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /) -> str:
        """Return the prompt of a conversation, up to where the assistant's answer starts.

        Raises ``ConfigError`` when the model's template refuses the messages, or there is none.
        """
        ...

    def token_bytes(self, token_id: int, /) -> bytes:
        """Return the bytes that a token stands for; some hold a part of a character only."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it. ``created`` is a Unix time in seconds."""

    name: str
    context_tokens: int
    vocab_size: int
    weights_id: str
    created: int
