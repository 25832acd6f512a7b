"""Tokens to text, one token at a time.

Two families of tokenizers give every token bytes that do not depend on its neighbours: byte-level
BPE, and SentencePiece-like ones with byte fallback. Others are refused.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from kvtier.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to the bytes they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


class TokenBytes:
    """The bytes of every token of a tokenizer, and how they join into text."""

    def __init__(self, raw: RawTokenizer) -> None:
        decoder = json.loads(raw.to_str()).get("decoder")
        self.has_byte_fallback, self.strips_space = _decoder_kind(decoder)
        self._raw = raw
        self._special = frozenset(
            index for index, token in raw.get_added_tokens_decoder().items() if token.special
        )
        self._cache: dict[int, bytes] = {}

    def is_special(self, index: int) -> bool:
        """Tell whether a token is a control token, not text."""
        return index in self._special

    def is_byte(self, index: int) -> bool:
        """Tell whether a token is one raw byte of a byte-fallback tokenizer."""
        token = self._raw.id_to_token(index)
        return self.has_byte_fallback and bool(token and _BYTE_TOKEN.fullmatch(token))

    def of(self, index: int) -> bytes:
        """Return a token's bytes; empty for an id that is no token."""
        known = self._cache.get(index)
        if known is None:
            known = self._cache[index] = self._derive(self._raw.id_to_token(index) or "")
        return known

    def _derive(self, token: str) -> bytes:
        if self.has_byte_fallback:
            match = _BYTE_TOKEN.fullmatch(token)
            if match:
                return bytes.fromhex(match[1])
            return token.replace("\u2581", " ").encode()
        if all(character in _ALPHABET for character in token):
            return bytes(_ALPHABET[character] for character in token)
        return token.encode()


def _decoder_kind(decoder: Any) -> tuple[bool, bool]:
    """Return whether a ``tokenizer.json`` decoder has byte fallback and strips a first space."""
    if isinstance(decoder, dict) and decoder.get("type") == "ByteLevel":
        return False, False
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        steps = decoder["decoders"]
        core = [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if steps in (core, [*core, strip]):
            return True, len(steps) > len(core)
    raise ConfigError(
        f"tokenizer decoder {json.dumps(decoder)[:200]} is not supported; allowed: ByteLevel, or "
        "Replace + ByteFallback + Fuse with or without Strip"
    )


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text as they come.

    What ``push`` and ``finish`` return, joined, equals the tokenizer's decoding of all tokens.
    Bytes that may still become a character are held back; no text is ever taken back. The cost of
    a token does not grow with the sequence.
    """

    def __init__(self, table: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._table = table
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._run = bytearray()
        self._strip_pending = table.strips_space

    def push(self, index: int) -> str:
        """Take the next token and return the text that is now certain."""
        table = self._table
        if self._skip_special and table.is_special(index):
            return ""
        if not table.has_byte_fallback:
            return self._utf8.decode(table.of(index))
        if table.is_byte(index):
            self._run += table.of(index)
            return ""
        return self._stripped(self._end_run() + table.of(index).decode())

    def finish(self) -> str:
        """Return the rest: U+FFFD for a character that never became whole."""
        if not self._table.has_byte_fallback:
            return self._utf8.decode(b"", final=True)
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        """Decode a run of byte tokens: as a whole, or each byte is a replacement character."""
        data, self._run = bytes(self._run), bytearray()
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(data)

    def _stripped(self, text: str) -> str:
        if not self._strip_pending or not text:
            return text
        self._strip_pending = False
        return text.removeprefix(" ")
