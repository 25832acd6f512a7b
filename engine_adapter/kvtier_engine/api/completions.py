"""``/v1/completions``: prompts as text or tokens, alone or in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier_engine.api.calls import (
    Call,
    Envelope,
    Prompt,
    build_requests,
    check_model,
    encode,
    output_tokens,
)
from kvtier_engine.api.errors import bad_request, unsupported
from kvtier_engine.api.generation import Collected
from kvtier_engine.api.limits import PROMPTS_MAX, SEQUENCES_PER_CALL_MAX
from kvtier_engine.api.logprobs import CompletionLogprobs
from kvtier_engine.api.ports import ServedModel, TokenizerLike
from kvtier_engine.api.sampling import sampling_params
from kvtier_engine.api.schemas import CompletionBody, parse_body
from kvtier_engine.api.streaming import compact_json, sse
from kvtier_engine.types import Delta, FinishReason

#: OpenAI's default for this endpoint.
MAX_TOKENS_DEFAULT = 16


async def completion_call(
    raw: bytes, *, tokenizer: TokenizerLike, model: ServedModel, created: int
) -> Call:
    """Return the call of a body, or raise the ``ApiError`` that says what is wrong with it."""
    body = parse_body(CompletionBody, raw)
    check_model(body.model, model)
    choices = body.n or 1
    if body.best_of is not None and body.best_of != choices:
        raise unsupported("best_of", "'best_of' must equal 'n': choices are not ranked here.")
    prompts = await text_prompts(body.prompt, tokenizer, model.vocab_size)
    if len(prompts) * choices > SEQUENCES_PER_CALL_MAX:
        message = f"{len(prompts)} prompts with n = {choices}: at most {SEQUENCES_PER_CALL_MAX} "
        raise bad_request(message + "sequences fit in one request.", param="n")
    echo = bool(body.echo)
    if body.max_tokens == 0 and not echo:
        raise bad_request("'max_tokens' 0 needs 'echo'.", param="max_tokens")
    sampling = sampling_params(
        body,
        vocab_size=model.vocab_size,
        max_tokens=max(
            output_tokens(body.max_tokens, MAX_TOKENS_DEFAULT, prompts, model.context_tokens), 1
        ),
        top_logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if echo else None,
    )
    envelope = Envelope.new("cmpl", created, model)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    drop_output = body.max_tokens == 0
    renderer = CompletionRenderer(
        envelope,
        tokenizer,
        [prompt for prompt in prompts for _ in range(choices)] if echo else None,
        logprobs=body.logprobs is not None,
        null_usage=include_usage,
        drop_output=drop_output,
    )
    return Call(
        call_id=envelope.call_id,
        endpoint="completions",
        requests=build_requests(envelope.call_id, prompts, sampling, body),
        choices=choices,
        renderer=renderer,
        stream=bool(body.stream),
        include_usage=include_usage,
        drop_output=drop_output,
    )


async def text_prompts(prompt: Any, tokenizer: TokenizerLike, vocab_size: int) -> list[Prompt]:
    """Return the prompts of a ``prompt`` field in any of its four forms."""
    batch = [prompt] if isinstance(prompt, str) or _is_tokens(prompt) else prompt
    if not isinstance(batch, list):
        message = "'prompt' must be a string, a list of token ids, or a list of either."
        raise bad_request(message, param="prompt", code="invalid_type")
    if len(batch) > PROMPTS_MAX:
        message = f"{len(batch)} prompts: at most {PROMPTS_MAX} fit in one request."
        raise bad_request(message, param="prompt", code="too_many_prompts")
    if not batch:
        raise bad_request("'prompt' must not be empty.", param="prompt", code="empty_prompt")
    return [await _one_prompt(item, tokenizer, vocab_size) for item in batch]


async def _one_prompt(item: Any, tokenizer: TokenizerLike, vocab_size: int) -> Prompt:
    if isinstance(item, str):
        prompt = Prompt(item, await encode(tokenizer, item, rendered=False))
    elif _is_tokens(item):
        if not 0 <= min(item) <= max(item) < vocab_size:
            message = f"A token id of 'prompt' is out of range; ids run from 0 to {vocab_size - 1}."
            raise bad_request(message, param="prompt")
        prompt = Prompt(tokenizer.decode(item), tuple(item))
    elif item == []:
        prompt = Prompt("", ())
    else:
        message = "'prompt' must be a string, a list of token ids, or a list of either."
        raise bad_request(message, param="prompt", code="invalid_type")
    if not prompt.token_ids:
        raise bad_request("'prompt' must not be empty.", param="prompt", code="empty_prompt")
    return prompt


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class CompletionRenderer:
    """Answers and events of one completions call. ``echoed`` holds each sequence's prompt."""

    def __init__(
        self,
        envelope: Envelope,
        tokenizer: TokenizerLike,
        echoed: Sequence[Prompt] | None,
        *,
        logprobs: bool,
        null_usage: bool,
        drop_output: bool,
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._echoed = echoed
        self._logprobs = logprobs
        self._drop_output = drop_output
        self._prefix = envelope.event_prefix("text_completion")
        self._suffix = ',"usage":null}' if null_usage else "}"
        self._streams: dict[int, CompletionLogprobs] = {}

    def answer(self, choices: Sequence[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        rendered = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._envelope.fields("text_completion"), "choices": rendered, "usage": usage}

    def events(self, index: int, delta: Delta) -> list[bytes]:
        """Return the event that carries a delta, the echoed prompt with the first one."""
        collected = Collected()
        collected.add(delta)
        choice = self._choice(index, collected)
        says = choice["text"] or choice["logprobs"] or choice["finish_reason"]
        data = f'{self._prefix}"choices":[{compact_json(choice)}]{self._suffix}'
        return [sse(data)] if says else []

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return the event that carries the usage."""
        return sse(f'{self._prefix}"choices":[],"usage":{compact_json(usage)}}}')

    def _choice(self, index: int, collected: Collected) -> dict[str, Any]:
        opening = index not in self._streams
        columns = self._streams.setdefault(index, CompletionLogprobs(self._tokenizer))
        text = "" if self._drop_output else "".join(collected.text)
        pieces: list[dict[str, Any]] = []
        if opening and self._echoed is not None:
            prompt = self._echoed[index]
            text = prompt.text + text
            if self._logprobs:
                pieces.append(columns.prompt(prompt.token_ids, collected.prompt_logprobs))
        if self._logprobs and collected.logprobs and not self._drop_output:
            pieces.append(columns.output(collected.logprobs))
        finish = collected.finish_reason
        if self._drop_output and finish is not None:
            finish = FinishReason.LENGTH
        return {
            "index": index,
            "text": text,
            "logprobs": _joined(pieces),
            "finish_reason": finish,
        }


def _joined(pieces: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """Return the columns of all pieces as one, or None for no pieces."""
    if not pieces:
        return None
    return {name: [item for piece in pieces for item in piece[name]] for name in pieces[0]}
