"""A call: one HTTP request, understood and checked, ready to be run and rendered."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from kvtier.types import Features, Hint
from kvtier_engine.api.errors import ApiError, bad_request, context_length_exceeded
from kvtier_engine.api.generation import Collected
from kvtier_engine.api.limits import INLINE_ENCODE_CHARS_MAX
from kvtier_engine.api.ports import ServedModel, TokenizerLike
from kvtier_engine.api.sampling import choice_seed
from kvtier_engine.api.schemas import CommonBody, SessionHints
from kvtier_engine.api.streaming import compact_json
from kvtier_engine.types import Delta, GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text, for echo, and as tokens."""

    text: str
    token_ids: tuple[int, ...]


class Renderer(Protocol):
    """Puts what sequences say into an endpoint's form. One call's own; keeps its state."""

    def answer(self, choices: Sequence[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        ...

    def events(self, index: int, delta: Delta) -> list[bytes]:
        """Return the events that carry a delta of choice ``index``; none if it says nothing."""
        ...

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return the event that carries the usage, with no choices."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """``requests`` run prompt by prompt, ``choices`` of each; ``drop_output`` discards the text.

    The last serves a client that asks for no token at all: the engine makes at least one.
    ``warms``: the answer says what the tiers hold, and waits for it. ``unpins``: nothing is
    computed, the prompts' chunks are unpinned.
    """

    call_id: str
    endpoint: str
    requests: tuple[GenerateRequest, ...]
    choices: int
    renderer: Renderer
    stream: bool
    include_usage: bool
    drop_output: bool = False
    warms: bool = False
    unpins: bool = False


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every answer and event of a call starts with."""

    call_id: str
    created: int
    model: ServedModel

    @classmethod
    def new(cls, prefix: str, created: int, model: ServedModel) -> Envelope:
        """Return an envelope with a fresh id."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", created, model)

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the envelope as the first fields of an object of OpenAI's type ``kind``."""
        return {
            "id": self.call_id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"kvtier-{self.model.weights_id[:12]}",
        }

    def event_prefix(self, kind: str) -> str:
        """Return the envelope as JSON text, open for the fields that follow."""
        return compact_json(self.fields(kind))[:-1] + ","


def check_model(name: str | None, model: ServedModel) -> None:
    """Raise the 404 for a model that is not served. A body without one means the one there is."""
    if name is not None and name != model.name:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"The model {name[:128]!r} does not exist here; this server serves {model.name!r}.",
            code="model_not_found",
            param="model",
        )


async def encode(tokenizer: TokenizerLike, text: str, *, rendered: bool) -> tuple[int, ...]:
    """Return a text's tokens; ``rendered``: a template has put the special tokens in already.

    Long texts are encoded in a thread.
    """
    work = partial(tokenizer.encode, text, add_special_tokens=not rendered)
    if len(text) <= INLINE_ENCODE_CHARS_MAX:
        return tuple(work())
    return tuple(await asyncio.to_thread(work))


def output_tokens(asked: int | None, default: int, prompts: Sequence[Prompt], limit: int) -> int:
    """Return how many tokens each sequence may make, or raise ``context_length_exceeded``.

    ``asked`` None takes ``default``, cut to what the longest prompt leaves. The engine makes at
    least one token, so a prompt that fills the context is refused.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + max(asked or 0, 1) > limit:
        raise context_length_exceeded(longest, max(asked or 0, 1), limit)
    return min(default, limit - longest) if asked is None else asked


def session_hint(body: CommonBody) -> Hint:
    """Return what the client says of the session's future, or raise for a contradiction."""
    hints = body.kvtier
    if hints is None or not (hints.will_continue or hints.done):
        return Hint.NONE
    if hints.will_continue and hints.done:
        message = "'kvtier': a session is not both 'done' and one that 'will_continue'."
        raise bad_request(message, param="kvtier")
    return Hint.DONE if hints.done else Hint.WILL_CONTINUE


def build_requests(
    call_id: str,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    body: CommonBody,
    *,
    turn: int = 1,
) -> tuple[GenerateRequest, ...]:
    """Return the call's requests, ``n`` of each prompt, every choice with its own seed.

    ``turn`` counts the user's messages so far. Raises for hints that contradict each other.
    """
    choices = body.n or 1
    hints = body.kvtier or SessionHints()
    features = Features(turn, session_hint(body), hints.ttl_s or 0.0, hints.pin or 0.0)
    seeded = [
        replace(sampling, seed=choice_seed(sampling.seed, choice)) for choice in range(choices)
    ]
    return tuple(
        GenerateRequest(
            request_id=f"{call_id}-{number * choices + choice}",
            prompt=prompt.token_ids,
            sampling=seeded[choice],
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            features=features,
            explain=bool(hints.explain),
        )
        for number, prompt in enumerate(prompts)
        for choice in range(choices)
    )
