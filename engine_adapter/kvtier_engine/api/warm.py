"""``/v1/kvtier/warm``: compute and store prompts for whoever asks next; nothing is generated.

``/v1/kvtier/unpin`` takes the same prompts, and lets them leave the tiers when their turn comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field

from kvtier_engine.api.calls import Call, Envelope, Prompt, build_requests, check_model
from kvtier_engine.api.chat import chat_prompt
from kvtier_engine.api.completions import text_prompts
from kvtier_engine.api.errors import bad_request, context_length_exceeded
from kvtier_engine.api.generation import Collected
from kvtier_engine.api.limits import MESSAGES_MAX
from kvtier_engine.api.ports import ServedModel, TokenizerLike
from kvtier_engine.api.schemas import CommonBody, parse_body
from kvtier_engine.types import Delta, SamplingParams

#: The one token that the engine makes, which nobody sees.
_SAMPLING: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
#: What a body may say; all else asks for an answer, which there is not.
_FIELDS: Final = ("model", "prompt", "messages", "cache_salt", "priority", "kvtier")
_UNPIN_FIELDS: Final = ("model", "prompt", "messages", "cache_salt")


_Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MESSAGES_MAX)]


class WarmBody(CommonBody):
    """The body of ``/v1/kvtier/warm``: ``prompt`` or ``messages``, as the endpoints take them."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: Any = None
    messages: _Messages | None = None


class UnpinBody(WarmBody):
    """The body of ``/v1/kvtier/unpin``: ``prompt`` or ``messages``, as the endpoints take them."""


async def warm_call(
    raw: bytes, *, tokenizer: TokenizerLike, model: ServedModel, created: int
) -> Call:
    """Return the call of a body, or raise the ``ApiError`` that says what is wrong with it."""
    body = parse_body(WarmBody, raw)
    prompts = await _prompts(body, _FIELDS, tokenizer, model)
    return replace(_call("warm", body, prompts, model, created), drop_output=True, warms=True)


async def unpin_call(
    raw: bytes, *, tokenizer: TokenizerLike, model: ServedModel, created: int
) -> Call:
    """As ``warm_call``; hints have no meaning here."""
    body = parse_body(UnpinBody, raw)
    prompts = await _prompts(body, _UNPIN_FIELDS, tokenizer, model)
    return replace(_call("unpin", body, prompts, model, created), unpins=True)


def _call(
    what: str, body: WarmBody, prompts: Sequence[Prompt], model: ServedModel, created: int
) -> Call:
    envelope = Envelope.new(what, created, model)
    return Call(
        call_id=envelope.call_id,
        endpoint=what,
        requests=build_requests(envelope.call_id, prompts, _SAMPLING, body),
        choices=1,
        renderer=WarmRenderer(envelope, f"kvtier.{what}"),
        stream=False,
        include_usage=False,
    )


async def _prompts(
    body: WarmBody, fields: Collection[str], tokenizer: TokenizerLike, model: ServedModel
) -> Sequence[Prompt]:
    """Return the prompts of a body that says nothing but ``fields``."""
    check_model(body.model, model)
    for name in sorted(body.model_fields_set):
        if name not in fields:
            message = f"{name!r} has no meaning here: nothing is generated."
            raise bad_request(message, param=name, code="unsupported_parameter")
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Either 'prompt' or 'messages' must be given.", param="prompt")
    if body.messages is not None:
        prompts: Sequence[Prompt] = [await chat_prompt(body.messages, tokenizer)]
    else:
        prompts = await text_prompts(body.prompt, tokenizer, model.vocab_size)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + 1 > model.context_tokens:
        raise context_length_exceeded(longest, 1, model.context_tokens)
    return prompts


class WarmRenderer:
    """Answers that hold figures only."""

    def __init__(self, envelope: Envelope, kind: str) -> None:
        self._envelope = envelope
        self._kind = kind

    def answer(self, choices: Sequence[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the answer, to which the caller adds what the tiers hold."""
        del choices
        figures = {"usage": usage} if usage else {}
        return {**self._envelope.fields(self._kind), **figures}

    def events(self, index: int, delta: Delta) -> list[bytes]:
        """Return none: nothing is streamed."""
        del index, delta
        return []

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return nothing."""
        del usage
        return b""
