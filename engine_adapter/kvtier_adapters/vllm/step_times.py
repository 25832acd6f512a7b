"""How long computing prompts takes, seen from the scheduler: what a load has to be quicker than."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

# Below this a step's fixed costs are most of it.
PREFILL_TOKENS_MIN: Final = 64
# Tokens of decoding requests in a step, as a share of its prompts' tokens.
DECODES_SHARE: Final = 0.05
STEPS_OPEN_MAX: Final = 16
STEPS_KEPT_MAX: Final = 16


class Share(NamedTuple):
    """Of one request: so many tokens computed in a step, behind ``computed`` others."""

    computed: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """A step that did little else than compute prompts, as one prompt at their average place."""

    start_token: float
    tokens: int
    seconds: float


class StepTimes:
    """Pairs what was scheduled with when it was done. Steps end in the order they began.

    Where vLLM schedules a step while another runs, a step counts from the end of that one.
    """

    def __init__(self) -> None:
        self._open: deque[tuple[float, list[Share]]] = deque(maxlen=STEPS_OPEN_MAX)
        self._lasted: deque[float] = deque(maxlen=STEPS_KEPT_MAX)
        self._ended_s = 0.0

    @property
    def longest_s(self) -> float:
        """How long the longest of the last steps took."""
        return max(self._lasted, default=0.0)

    def began(self, now: float, shares: list[Share]) -> None:
        """Note a step that is handed to the workers."""
        self._open.append((now, shares))

    def ended(self, now: float) -> Prefill | None:
        """Note that the oldest open step is done; return what it tells of computing prompts."""
        if not self._open:
            return None
        began, shares = self._open.popleft()
        seconds, self._ended_s = now - max(began, self._ended_s), now
        self._lasted.append(seconds)
        prompts = [share for share in shares if share.tokens > 1]
        tokens = sum(share.tokens for share in prompts)
        if tokens < PREFILL_TOKENS_MIN or len(shares) - len(prompts) > tokens * DECODES_SHARE:
            return None
        attended = sum(share.tokens * (share.computed + share.tokens / 2) for share in prompts)
        return Prefill(attended / tokens - tokens / 2, tokens, seconds)
