"""Log-probabilities in the forms of the two endpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtier_engine.api.ports import TokenizerLike
from kvtier_engine.types import TokenLogprob


def token_name(tokenizer: TokenizerLike, token_id: int) -> str:
    r"""Return a token as text; one that is no whole UTF-8 reads ``bytes:\xe2\x82``."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: TokenizerLike, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat choice, with the bytes of every token."""
    content = [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, *alternative) for alternative in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: TokenizerLike, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """Builds the ``logprobs`` of one completions choice, piece by piece.

    ``text_offset`` counts characters from the start of the returned text, which with ``echo`` is
    the start of the prompt.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def prompt(
        self, token_ids: Iterable[int], entries: Iterable[TokenLogprob | None]
    ) -> dict[str, Any]:
        """Return the piece for an echoed prompt. The first token has no log-probability."""
        pieces = [
            self._token(token_id, None if entry is None else entry)
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]
        return _columns(pieces)

    def output(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return the piece for further generated tokens."""
        return _columns([self._token(entry.token_id, entry) for entry in entries])

    def _token(self, token_id: int, entry: TokenLogprob | None) -> dict[str, Any]:
        name = token_name(self._tokenizer, token_id)
        offset = self._offset
        # Continuation bytes belong to the character that an earlier byte began.
        self._offset += sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token_id))
        top = None
        if entry is not None:
            top = {name: entry.logprob}
            for other, logprob in entry.top:
                top.setdefault(token_name(self._tokenizer, other), logprob)
        return {
            "tokens": name,
            "token_logprobs": None if entry is None else entry.logprob,
            "top_logprobs": top,
            "text_offset": offset,
        }


def _columns(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [piece[name] for piece in pieces] for name in names}
