"""``/v1/chat/completions``: a conversation, rendered by the model's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvtier.errors import ConfigError, nearest
from kvtier_engine.api.calls import (
    Call,
    Envelope,
    Prompt,
    build_requests,
    check_model,
    encode,
    output_tokens,
)
from kvtier_engine.api.errors import ApiError, bad_request, unsupported
from kvtier_engine.api.generation import Collected
from kvtier_engine.api.logprobs import chat_logprobs
from kvtier_engine.api.ports import ServedModel, TokenizerLike
from kvtier_engine.api.sampling import sampling_params
from kvtier_engine.api.schemas import ChatBody, parse_body
from kvtier_engine.api.streaming import compact_json, sse
from kvtier_engine.types import Delta

#: Roles of a message, each with the role that the template knows.
ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


async def chat_call(
    raw: bytes, *, tokenizer: TokenizerLike, model: ServedModel, created: int
) -> Call:
    """Return the call of a body, or raise the ``ApiError`` that says what is wrong with it."""
    body = parse_body(ChatBody, raw)
    check_model(body.model, model)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    prompts = [await chat_prompt(body.messages, tokenizer)]
    limit = model.context_tokens
    sampling = sampling_params(
        body,
        vocab_size=model.vocab_size,
        max_tokens=output_tokens(_max_tokens(body), limit, prompts, limit),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    turn = max(1, sum(message["role"] == "user" for message in body.messages))
    envelope = Envelope.new("chatcmpl", created, model)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    return Call(
        call_id=envelope.call_id,
        endpoint="chat",
        requests=build_requests(envelope.call_id, prompts, sampling, body, turn=turn),
        choices=body.n or 1,
        renderer=ChatRenderer(
            envelope, tokenizer, logprobs=bool(body.logprobs), null_usage=include_usage
        ),
        stream=bool(body.stream),
        include_usage=include_usage,
    )


async def chat_prompt(messages: Sequence[dict[str, Any]], tokenizer: TokenizerLike) -> Prompt:
    """Return the prompt of a conversation, or raise the ``ApiError`` that names what is wrong."""
    known = [_message(number, message) for number, message in enumerate(messages)]
    try:
        text = tokenizer.render_chat(known)
    except ConfigError as error:
        raise bad_request(f"{error}.", param="messages", code="template_refused") from error
    prompt = Prompt(text, await encode(tokenizer, text, rendered=True))
    if not prompt.token_ids:
        raise bad_request("'messages' must not be empty.", param="messages", code="empty_prompt")
    return prompt


def _max_tokens(body: ChatBody) -> int | None:
    """Return the newer of OpenAI's two names for one limit; both may be given if they agree."""
    asked = {limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None}
    if len(asked) > 1:
        message = "'max_tokens' and 'max_completion_tokens' contradict each other."
        raise bad_request(message, param="max_tokens")
    if asked == {0}:
        raise bad_request("'max_tokens' must be at least 1.", param="max_tokens")
    return asked.pop() if asked else None


def _message(number: int, message: dict[str, Any]) -> dict[str, str]:
    """Return a message as the template takes it: a known role and a plain text."""
    param = f"messages.{number}"
    role = message.get("role")
    if role in ("tool", "function"):
        raise unsupported(f"{param}.role", f"Messages of role {role!r} are not supported.")
    if not isinstance(role, str) or role not in ROLES:
        hint = nearest(role, ROLES) if isinstance(role, str) else ""
        allowed = ", ".join(ROLES)
        raise bad_request(f"'{param}.role' must be one of {allowed}{hint}.", param=f"{param}.role")
    if message.get("tool_calls"):
        raise unsupported(f"{param}.tool_calls", "Tool calls are not supported.")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    return {"role": ROLES[role], "content": _text(content, f"{param}.content")}


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        message = f"'{param}' must be a string or a list of text parts."
        raise bad_request(message, param=param, code="invalid_type")
    return "".join(_part(part, f"{param}.{number}") for number, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise _not_text(part, param)


def _not_text(part: Any, param: str) -> ApiError:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        return unsupported(param, f"'{param}': only parts of type 'text' are supported.")
    message = f"'{param}' must be an object with type 'text' and a text."
    return bad_request(message, param=param, code="invalid_type")


class ChatRenderer:
    """Answers and events of one chat call."""

    def __init__(
        self, envelope: Envelope, tokenizer: TokenizerLike, *, logprobs: bool, null_usage: bool
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._prefix = envelope.event_prefix("chat.completion.chunk")
        self._suffix = ',"usage":null}' if null_usage else "}"
        self._opened: set[int] = set()

    def answer(self, choices: Sequence[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        rendered = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": "".join(choice.text),
                    "refusal": None,
                },
                "logprobs": chat_logprobs(self._tokenizer, choice.logprobs)
                if self._logprobs
                else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._envelope.fields("chat.completion"), "choices": rendered, "usage": usage}

    def events(self, index: int, delta: Delta) -> list[bytes]:
        """Return the role before everything, then the text, and the finish reason after all."""
        events = []
        if index not in self._opened:
            self._opened.add(index)
            events.append(self._event(index, '{"role":"assistant","content":""}'))
        if delta.text or (self._logprobs and delta.logprobs):
            logprobs = "null"
            if self._logprobs and delta.logprobs:
                logprobs = compact_json(chat_logprobs(self._tokenizer, delta.logprobs))
            text = f'{{"content":{compact_json(delta.text)}}}'
            events.append(self._event(index, text, logprobs))
        if delta.finish_reason is not None:
            events.append(self._event(index, "{}", finish_reason=f'"{delta.finish_reason}"'))
        return events

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return the event that carries the usage."""
        return sse(f'{self._prefix}"choices":[],"usage":{compact_json(usage)}}}')

    def _event(
        self, index: int, delta: str, logprobs: str = "null", finish_reason: str = "null"
    ) -> bytes:
        """Put an event together by hand: one runs per token and choice."""
        return sse(
            f'{self._prefix}"choices":[{{"index":{index},"delta":{delta},'
            f'"logprobs":{logprobs},"finish_reason":{finish_reason}}}]{self._suffix}'
        )
