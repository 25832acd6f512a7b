"""From a request's fields to ``SamplingParams``: whatever passes here cannot upset the engine."""

from __future__ import annotations

import re
from typing import Any, Final

from kvtier_engine.api.errors import bad_request
from kvtier_engine.api.limits import (
    LOGIT_BIAS_ENTRIES_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
)
from kvtier_engine.api.schemas import INT64_MAX, CommonBody
from kvtier_engine.types import SamplingParams

_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def sampling_params(
    body: CommonBody,
    *,
    vocab_size: int,
    max_tokens: int,
    top_logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the sampling of one call, checked against the model's vocabulary.

    ``seed`` is the call's own; ``choice_seed`` derives each choice's. Raises ``ApiError``.
    """
    top_k = body.top_k or 0
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(top_k, 0),
        min_p=_or(body.min_p, 0.0),
        seed=body.seed,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        stop=stop_strings(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids or [], vocab_size),
        include_stop=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Return choice ``choice``'s seed: the call's seed plus its number, modulo 2**63.

    It depends on nothing else, so a prompt gives the same choices alone and in a batch.
    """
    return None if seed is None else (seed + choice) % (INT64_MAX + 1)


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Return the stop strings of a ``stop`` field: a text, a list of texts, or None."""
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        message = "'stop' must be a string or a list of strings."
        raise bad_request(message, param="stop", code="invalid_type")
    if len(texts) > STOP_STRINGS_MAX:
        raise bad_request(f"'stop' takes at most {STOP_STRINGS_MAX} strings.", param="stop")
    if not all(1 <= len(text) <= STOP_STRING_CHARS_MAX for text in texts):
        message = f"A stop string has 1 to {STOP_STRING_CHARS_MAX} characters."
        raise bad_request(message, param="stop")
    return tuple(dict.fromkeys(texts))


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(bias) > LOGIT_BIAS_ENTRIES_MAX:
        message = f"'logit_bias' takes at most {LOGIT_BIAS_ENTRIES_MAX} entries."
        raise bad_request(message, param="logit_bias")
    for key in bias:
        if _TOKEN_ID.fullmatch(key) is None or int(key) >= vocab_size:
            message = f"'logit_bias': {key[:32]!r} is no token id; they run from 0 to "
            raise bad_request(message + f"{vocab_size - 1}.", param="logit_bias")
    return tuple((int(key), value) for key, value in bias.items())


def _stop_token_ids(token_ids: list[int], vocab_size: int) -> tuple[int, ...]:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            message = f"'stop_token_ids': {token_id} is no token id; they run from 0 to "
            raise bad_request(message + f"{vocab_size - 1}.", param="stop_token_ids")
    return tuple(dict.fromkeys(token_ids))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
