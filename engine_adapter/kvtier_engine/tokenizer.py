"""Text to tokens and back, and chat messages to a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from kvtier.errors import ConfigError
from kvtier.model_files.folder import read_json
from kvtier_engine.chat_template import ChatTemplate
from kvtier_engine.detokenizer import IncrementalDetokenizer, TokenBytes

_SURROGATE = re.compile("[\ud800-\udfff]")
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A model's tokenizer with its chat template and its end-of-text tokens.

    Encoding and decoding are thread-safe.
    """

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        eos_ids: Iterable[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self._raw = raw
        # The same tokenizer, to which the text of a special token is only text.
        self._plain = RawTokenizer.from_str(raw.to_str())
        self._plain.encode_special_tokens = True
        self._bytes = TokenBytes(raw)
        own = (
            raw.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
        )
        self._eos_ids = tuple(sorted({*eos_ids, *([] if own is None else [own])}))
        self._special_tokens = dict(special_tokens)
        self._template = None if chat_template is None else ChatTemplate(chat_template)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's own figure may be larger."""
        return int(self._raw.get_vocab_size(with_added_tokens=True))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, ascending."""
        return self._eos_ids

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text, if the model has one."""
        token = self._special_tokens.get("bos_token")
        return None if token is None else self.token_id(token)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary, or None."""
        index: int | None = self._raw.token_to_id(token)
        return index

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the tokens of ``text``.

        ``add_special_tokens`` lets the tokenizer add what it puts around every text (most often a
        begin token); a rendered chat has it already. ``parse_special`` turns the text of special
        tokens into those tokens; without it, text from outside cannot forge them. Half a surrogate
        pair, which JSON can carry and text cannot, becomes U+FFFD.
        """
        raw = self._raw if parse_special else self._plain
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._raw.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """Return a detokenizer for one sequence, fed token by token."""
        return IncrementalDetokenizer(self._bytes, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, index: int) -> bytes:
        """Return the bytes that one token stands for; empty for an id that is no token."""
        return self._bytes.of(index)

    def token_text(self, index: int) -> str:
        """Return one token's text, special tokens included; U+FFFD where bytes are no text."""
        return self._bytes.of(index).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt of a chat, to be encoded with ``add_special_tokens=False``.

        Raises ``ConfigError`` when the model has no template or the template refuses the messages.
        """
        if self._template is None:
            raise ConfigError("the model has no chat template; use plain completions")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            special_tokens=self._special_tokens,
        )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a Hugging Face folder's tokenizer, chat template and end-of-text tokens.

    End tokens are those of ``generation_config.json`` (else ``config.json``) and the tokenizer's
    own. Raises ``ConfigError`` that names what is missing or wrong.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    special = {
        role: text for role in _SPECIAL_ROLES if (text := _token_text(config.get(role))) is not None
    }
    return Tokenizer(
        _parse_boundary(path),
        eos_ids=_eos_ids(folder),
        special_tokens=special,
        chat_template=_chat_template(folder, config),
    )


def _parse_boundary(path: Path) -> RawTokenizer:
    try:
        return RawTokenizer.from_file(str(path))
    # The library raises plain ``Exception`` for every file that it cannot read.
    except Exception as error:
        raise ConfigError(f"{path}: not a tokenizer: {error}") from error


def _token_text(value: Any) -> str | None:
    """Return a special token of ``tokenizer_config.json``: plain text, or an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file() or read_json(path).get("eos_token_id") is None:
        path = folder / "config.json"
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(index, int) and index >= 0 for index in ids):
        raise ConfigError(
            f"{path}: eos_token_id = {value!r}; allowed: a token id or a list of them"
        )
    return ids


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}.get("default")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{folder}: chat_template = {value!r}; allowed: text")
    return value
