"""Running a call's sequences: merged into one stream, collected into answers, summed into usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvtier.types import Tier
from kvtier_engine.types import Delta, FinishReason, TokenLogprob, Usage


class SequenceFailedError(Exception):
    """A sequence ended without an answer. ``aborted``: the server gave it up on purpose."""

    def __init__(self, detail: str, *, aborted: bool) -> None:
        super().__init__(detail)
        self.aborted = aborted


async def merged(
    streams: Sequence[AsyncGenerator[Delta, None]],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield ``(index, delta)`` of all streams as they come, each stream's in its own order.

    Raises ``SequenceFailedError`` when one of them fails. However this ends, by its end, a
    failure, ``aclose`` or cancellation, every stream has been closed when it has ended.
    """
    try:
        if len(streams) == 1:
            async for delta in streams[0]:
                yield 0, _checked(delta)
            return
        async with aclosing(_interleaved(streams)) as pairs:
            async for index, delta in pairs:
                yield index, _checked(delta)
    finally:
        for stream in streams:
            await stream.aclose()


async def _interleaved(
    streams: Sequence[AsyncGenerator[Delta, None]],
) -> AsyncGenerator[tuple[int, Delta], None]:
    waiting = {asyncio.create_task(_next(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                delta = task.result()
                if delta is not None:
                    waiting[asyncio.create_task(_next(streams[index]))] = index
                    yield index, delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: AsyncIterator[Delta]) -> Delta | None:
    return await anext(stream, None)


def _checked(delta: Delta) -> Delta:
    if delta.finish_reason in {FinishReason.ERROR, FinishReason.ABORT}:
        aborted = delta.finish_reason is FinishReason.ABORT
        raise SequenceFailedError(delta.error, aborted=aborted)
    return delta


@dataclass(slots=True)
class Collected:
    """All that one sequence said."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Append what a delta brought."""
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.finish_reason = delta.finish_reason


class UsageTotals:
    """A call's usage: each prompt counted once, whatever ``n``; every choice's completion.

    ``cached_tokens`` of a prompt are those of its first choice: the later ones find what the
    first one left behind, which says nothing of the cache.
    """

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._latest: dict[int, Usage] = {}

    def note(self, index: int, usage: Usage) -> None:
        """Keep the latest usage of sequence ``index``; sequences count prompt by prompt."""
        self._latest[index] = usage

    def report(self, *, drop_output: bool = False) -> dict[str, Any]:
        """Return OpenAI's usage object, with KVTier's tiers beside ``cached_tokens``."""
        firsts = [usage for i, usage in self._latest.items() if i % self._choices == 0]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        completion = sum(usage.completion_tokens for usage in self._latest.values())
        completion = 0 if drop_output else completion
        tiers = {
            tier.value: sum(usage.cached_by_tier.get(tier, 0) for usage in firsts) for tier in Tier
        }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(tiers.values()), "kvtier": tiers},
        }

    def why(self) -> list[dict[str, Any]]:
        """Return why each token of the prompts, of their first choices, was loaded or computed."""
        return [
            {
                "prompt": index // self._choices,
                "tokens": [each.start_token, each.end_token],
                "tier": each.tier,
                "decision": "loaded" if each.loaded else "recomputed",
                "reason": each.reason,
                "estimated_load_s": each.load_s,
                "estimated_recompute_s": each.recompute_s,
            }
            for index, usage in sorted(self._latest.items())
            if index % self._choices == 0
            for each in usage.why
        ]
