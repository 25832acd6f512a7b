"""The tokenizer that a GGUF file describes, as a ``tokenizers.Tokenizer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from kvtier.errors import ConfigError

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4

#: How text is cut before merges, by tokenizer.ggml.pre. SmolLM keeps every digit alone; it must be
#: cut before the regular expression looks at spaces ("a  1" is "a", two spaces, "1").
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_PRE_TOKENIZERS = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTE_LEVEL]),
}


def build_tokenizer(
    require: Callable[[str], Any], get: Callable[[str], Any]
) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer and the content of its ``tokenizer_config.json``.

    ``require`` and ``get`` read metadata keys. Raises ``ConfigError`` for a kind of tokenizer that
    would not give the same tokens here.
    """
    kind, pre = require("tokenizer.ggml.model"), require("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ConfigError(f"GGUF tokenizer model {kind!r} is not supported; allowed: gpt2")
    if pre not in _PRE_TOKENIZERS:
        allowed = ", ".join(_PRE_TOKENIZERS)
        raise ConfigError(f"GGUF pre-tokenizer {pre!r} is not supported; allowed: {allowed}")
    tokens = require("tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_merges_boundary(tokens, require("tokenizer.ggml.merges")))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, require("tokenizer.ggml.token_type"), strict=True):
        if token_type in {_CONTROL, _USER_DEFINED}:
            tokenizer.add_tokens(
                [AddedToken(token, normalized=False, special=token_type == _CONTROL)]
            )
    config: dict[str, Any] = {"chat_template": get("tokenizer.chat_template")}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = get(f"tokenizer.ggml.{key}_token_id")
        config[f"{role}_token"] = None if index is None else tokens[index]
    if get("tokenizer.ggml.add_bos_token") and config["bos_token"] is not None:
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    return tokenizer, config


def _merges_boundary(tokens: list[str], merges: list[str]) -> BPE:
    try:
        return BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in (m.partition(" ") for m in merges)],
        )
    # The library raises plain ``Exception`` for merges of tokens that are not there.
    except Exception as error:
        raise ConfigError(f"GGUF tokenizer: {error}") from error
