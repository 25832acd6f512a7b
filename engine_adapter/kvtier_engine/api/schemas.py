"""The bodies of requests: their fields, types and ranges, and the errors that name a field.

Unknown fields are ignored, as OpenAI's own clients expect of a server older than they are. Fields
that OpenAI or other engines know and that would change the answer are refused by name, unless
they hold the value that asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtier.constants import PIN_S_MAX, TTL_S_MAX
from kvtier_engine.api.errors import ApiError, bad_request, unsupported
from kvtier_engine.api.limits import (
    CACHE_SALT_CHARS_MAX,
    CHOICES_MAX,
    MESSAGES_MAX,
    STOP_TOKEN_IDS_MAX,
    TOP_LOGPROBS_MAX,
)

INT64_MAX: Final = 2**63 - 1
_TOKENS_MAX: Final = 2**31 - 1

#: Fields that are not served, each with the values that ask for nothing.
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "prompt_embeds": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
}

Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(BaseModel):
    """What a stream says beside its text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class SessionHints(BaseModel):
    """What the client knows of the session's future; ``ttl_s`` and ``pin`` are seconds.

    ``explain`` asks why each token of the prompts was loaded or computed.
    Ours alone, so an unknown name is a mistake.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    will_continue: bool | None = None
    done: bool | None = None
    ttl_s: Annotated[float, Field(gt=0, le=TTL_S_MAX)] | None = None
    pin: Annotated[float, Field(gt=0, le=PIN_S_MAX)] | None = None
    explain: bool | None = None


class CommonBody(BaseModel):
    """The fields of both endpoints. None stands for a field that was not given."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, le=_TOKENS_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=_TOKENS_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: Any = None
    stop_token_ids: Annotated[list[int], Field(max_length=STOP_TOKEN_IDS_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=CACHE_SALT_CHARS_MAX)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    kvtier: SessionHints | None = None


class CompletionBody(CommonBody):
    """The body of ``/v1/completions``."""

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class ChatBody(CommonBody):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_TOKENS_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None


BodyT = TypeVar("BodyT", bound=CommonBody)


def parse_body(model: type[BodyT], raw: bytes) -> BodyT:
    """Return the request of a body, or raise the ``ApiError`` that names its first fault."""
    try:
        fields = pydantic_core.from_json(raw)
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    for name, neutral in UNSUPPORTED.items():
        if name in fields and not _asks_for_nothing(fields[name], neutral):
            raise unsupported(name, f"{name!r} is not supported by this server.")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _from_validation(error) from error


def _asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    return any(type(value) is type(allowed) and value == allowed for allowed in neutral)


def _from_validation(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        code, message = "missing_required_parameter", f"{param!r} is required."
    elif first["type"] == "extra_forbidden":
        code, message = "invalid_value", f"{param!r} is not known here."
    elif first["type"].endswith("_type"):
        code, message = "invalid_type", f"{param!r}: {first['msg']}."
    else:
        code, message = "invalid_value", f"{param!r}: {first['msg']}."
    return bad_request(message, param=param, code=code)
