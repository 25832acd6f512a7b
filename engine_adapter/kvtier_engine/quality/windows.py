"""Which tokens are fed and which positions are compared. Pure.

A text is cut into windows that start evenly spread over it and do not overlap::

    | start tokens |        text         |      text       | 1 token
    |---------- prefix_tokens -----------|- continuation --|  the last position's target
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.constants import CHUNK_TOKENS_DEFAULT
from kvtier.errors import ConfigError
from kvtier_engine.quality.results import Mode

#: Prefix and continuation of a window. In place, a token costs more.
SHAPES: Final = {Mode.STORAGE: (1536, 512), Mode.IN_PLACE: (256, 512)}
#: Tokens fed by default, all windows together.
TOKENS_DEFAULT: Final = {Mode.STORAGE: 8192, Mode.IN_PLACE: 1536}
#: Positions that a window compares at least.
CONTINUATION_TOKENS_MIN: Final = 64
WINDOW_TOKENS_MIN: Final = CHUNK_TOKENS_DEFAULT + CONTINUATION_TOKENS_MIN
TOKENS_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one shape. Each holds one token more than is fed: the last position's target.

    ``prefix_tokens`` is a whole number of chunks.
    """

    prefix_tokens: int
    continuation_tokens: int
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def fed_tokens(self) -> int:
        """Tokens that one window feeds."""
        return self.prefix_tokens + self.continuation_tokens


def cut_windows(
    text_ids: Sequence[int],
    start_ids: Sequence[int],
    *,
    mode: Mode,
    tokens: int,
    context_tokens: int,
) -> Windows:
    """Cut a text into windows of ``tokens`` in all, or of as many as it has.

    ``start_ids`` are what the model wants before every text; each window begins with them. Where
    context, text or ``tokens`` are short, windows are smaller, in the same proportion. Raises
    ``ConfigError`` for fewer tokens than one window of ``WINDOW_TOKENS_MIN``.
    """
    if not WINDOW_TOKENS_MIN <= tokens <= TOKENS_MAX:
        raise ConfigError(f"--tokens {tokens}; allowed: {WINDOW_TOKENS_MIN} to {TOKENS_MAX}")
    available = len(text_ids) + len(start_ids) - 1
    if available < WINDOW_TOKENS_MIN:
        raise ConfigError(
            f"the text has {len(text_ids)} tokens; at least "
            f"{WINDOW_TOKENS_MIN + 1 - len(start_ids)} are needed"
        )
    if context_tokens < WINDOW_TOKENS_MIN:
        raise ConfigError(
            f"the model's context is {context_tokens} tokens; at least {WINDOW_TOKENS_MIN} are "
            "needed"
        )
    prefix, continuation = SHAPES[mode]
    fed = min(prefix + continuation, tokens, available, context_tokens)
    share = fed * prefix // (prefix + continuation)
    prefix = max(1, share // CHUNK_TOKENS_DEFAULT) * CHUNK_TOKENS_DEFAULT
    continuation = min(fed - prefix, continuation)
    fed = prefix + continuation
    count = min(tokens, available) // fed
    taken = fed + 1 - len(start_ids)
    spread = (len(text_ids) - taken) // max(1, count - 1)
    starts = [index * spread for index in range(count)]
    cut = [tuple(start_ids) + tuple(text_ids[start : start + taken]) for start in starts]
    return Windows(prefix, continuation, tuple(cut))
