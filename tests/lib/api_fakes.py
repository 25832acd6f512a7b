"""An engine that says what a script tells it, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.errors import ConfigError
from kvtier.types import Tier
from kvtier_engine.types import Delta, FinishReason, GenerateRequest, TokenLogprob, Usage

EOS = 256
VOCAB = 257
BLOCK = 4


class ByteTokenizer:
    """One token per UTF-8 byte, and one that ends a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert add_special_tokens != text.endswith("assistant: ")
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(each) for each in token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else b""

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if messages[0]["role"] == "assistant":
            raise ConfigError("the template wants a user to begin")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + "assistant: "


@dataclass
class Step:
    """One delta of a script."""

    text: str
    tokens: int = 1
    finish: FinishReason | None = None
    error: str = ""


Script = Callable[[GenerateRequest], Sequence[Step]]


def letters(request: GenerateRequest) -> list[Step]:
    """``abc…`` up to ``max_tokens``, one token each."""
    count = request.sampling.max_tokens
    steps = [Step(chr(ord("a") + i % 26)) for i in range(count)]
    steps[-1].finish = FinishReason.LENGTH
    return steps


@dataclass
class ScriptedEngine:
    """Follows a script, keeps every request, and finds in its cache what it was asked before.

    With ``gate``, every delta waits until the gate opens; ``paced`` lets the event loop run
    everything else between two deltas, as an engine in a thread of its own does.
    """

    script: Script = letters
    gate: asyncio.Event | None = None
    paced: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[GenerateRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    made: int = 0
    cached: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.running.add(request.request_id)
        self.started.set()
        try:
            async for delta in self._deltas(request):
                yield delta
        finally:
            self.running.discard(request.request_id)
            self.ended.set()

    async def _deltas(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        found = {Tier.DRAM: self._lookup(request)}
        sampling = request.sampling
        made = 0
        for number, step in enumerate(self.script(request)):
            if self.gate is not None:
                await self.gate.wait()
            if self.paced:
                await asyncio.sleep(0)
            made += step.tokens
            self.made += step.tokens
            ids = tuple(step.text.encode()[: step.tokens])
            yield Delta(
                text=step.text,
                token_ids=ids,
                logprobs=tuple(logprob(each, sampling.top_logprobs) for each in ids)
                if sampling.top_logprobs is not None
                else (),
                usage=Usage(len(request.prompt), made, found),
                finish_reason=step.finish,
                error=step.error,
                prompt_logprobs=prompt_logprobs(request) if number == 0 else (),
            )

    def _lookup(self, request: GenerateRequest) -> int:
        hit = 0
        for end in range(BLOCK, len(request.prompt) + 1, BLOCK):
            key = (request.cache_salt, request.prompt[:end])
            if key in self.cached and end < len(request.prompt):
                hit = end
            self.cached.add(key)
        return hit


def logprob(token_id: int, top: int | None) -> TokenLogprob:
    """A log-probability that its token tells; the alternatives are the tokens after it."""
    others = tuple(((token_id + i) % VOCAB, -0.5 - i) for i in range(top or 0))
    return TokenLogprob(token_id, -0.5, others)


def prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprob | None, ...]:
    top = request.sampling.prompt_logprobs
    if top is None:
        return ()
    return (None, *(logprob(token_id, top) for token_id in request.prompt[1:]))
