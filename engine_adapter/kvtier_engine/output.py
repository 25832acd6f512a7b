"""From sampled tokens to what a client sees: text without stop strings, and why it ended.

The result depends on the tokens' text alone, not on where one token ends and the next begins: a
stop string ends the output at the first character at which one is complete.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from kvtier_engine.types import FinishReason, SamplingParams


class Detokenizer(Protocol):
    """One sequence's tokens to text, as they come."""

    def push(self, token_id: int, /) -> str:
        """Return the text that this token completes; unfinished characters are held back."""
        ...

    def finish(self) -> str:
        """Return what was held back."""
        ...


class StopMatcher:
    """Cuts a text at the first stop string. Holds back only what may still become one."""

    def __init__(self, stops: Collection[str], *, include_stop: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is final now, and whether a stop string has ended it."""
        self._held += text
        matches = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            end, start = min(matches)
            return self._held[: end if self._include_stop else start], True
        keep = self._unfinished()
        final, self._held = self._held[: len(self._held) - keep], self._held[-keep:] * bool(keep)
        return final, False

    def finish(self) -> str:
        """Return what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self) -> int:
        """Return the length of the longest end of the held text that a stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds: final text, and the reason when it is the last one."""

    text: str
    finish_reason: FinishReason | None


class OutputState:
    """One request's output. ``end_ids`` are the model's own end tokens."""

    def __init__(
        self, sampling: SamplingParams, detokenizer: Detokenizer, end_ids: frozenset[int]
    ) -> None:
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._end_ids = frozenset() if sampling.ignore_eos else end_ids
        self._matcher = StopMatcher(sampling.stop, include_stop=sampling.include_stop)
        self._count = 0

    def push(self, token_id: int) -> Piece:
        """Take in the next token. After a piece with a reason, nothing more may come.

        An end or stop token counts as generated but shows no text, unless ``include_stop`` asks
        for a stop token's.
        """
        self._count += 1
        if token_id in self._end_ids:
            return self._ended("", FinishReason.STOP)
        if token_id in self._sampling.stop_token_ids:
            shown = self._detokenizer.push(token_id) if self._sampling.include_stop else ""
            return self._ended(shown, FinishReason.STOP)
        text = self._detokenizer.push(token_id)
        if self._count >= self._sampling.max_tokens:
            return self._ended(text, FinishReason.LENGTH)
        final, stopped = self._matcher.push(text)
        return Piece(final, FinishReason.STOP if stopped else None)

    def _ended(self, text: str, reason: FinishReason) -> Piece:
        """Let go of everything held back; a stop string that it completes still counts."""
        final, stopped = self._matcher.push(text + self._detokenizer.finish())
        if stopped:
            return Piece(final, FinishReason.STOP)
        return Piece(final + self._matcher.finish(), reason)
