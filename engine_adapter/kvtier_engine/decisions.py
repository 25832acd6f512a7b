"""The scheduler's arithmetic: functions of numbers and of requests, without other effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtier.cache.match import Ready
from kvtier.cache.worth.costs import Choice
from kvtier_engine.request import Request
from kvtier_engine.scheduling import Share

#: Steps with fewer prefill tokens say more of the cost of a step than of that of a token.
PREFILL_TOKENS_MIN = 32
#: The most decoding requests in a step that is taken for prefill, as a share of its tokens.
DECODES_MAX = 1 / 16


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-tokens // block_tokens)


def usable_tokens(tokens: int, block_tokens: int) -> int:
    """Return how many leading tokens may come from a cache: whole blocks, and never all of them.

    At least one token is computed, because the next one is sampled from its logits.
    """
    return (tokens - 1) // block_tokens * block_tokens


def load_end(found_tokens: int, matched_tokens: int, usable: int, block_tokens: int) -> int | None:
    """Return where a load that starts at ``found_tokens`` ends; None when there is none to make.

    ::

        0           found                  end       usable   tokens
        |- in HBM ----|- loaded into fresh blocks ----|- computed ---|

    The pool may know more of the prefix than the tiers do.
    """
    end = min(matched_tokens, usable) // block_tokens * block_tokens
    return end if end > found_tokens else None


def choose_end(
    request: Request,
    answer: Ready | None,
    found_tokens: int,
    usable: int,
    block_tokens: int,
    choose: Callable[[Ready, int, int], Choice | None],
) -> int | None:
    """Return where a load that is worth it ends; None when there is none to make.

    What ``choose`` decides of the answer's tokens is left in the request.
    """
    request.choice = request.outcome = None
    if answer is None:
        return None
    end = load_end(found_tokens, answer.tokens, usable, block_tokens)
    if end is None:
        return None
    request.choice = choose(answer, found_tokens, end)
    worth = end if request.choice is None else min(request.choice.end_token, end)
    return load_end(found_tokens, worth, usable, block_tokens)


def rank(arrival_s: float, priority: int, order: int, priority_step_s: float) -> tuple[float, int]:
    """Return a request's place in line, fixed for life: lower goes first, ties in ``order``.

    A priority is worth a number of seconds in the line, which makes it finite: whatever arrives
    later than that ranks behind, so no stream of urgent requests starves the others.
    """
    return arrival_s + priority * priority_step_s, order


def decodes_first(running: Iterable[Request]) -> list[Request]:
    """Return requests that need one token's work before those that need more, each by rank."""
    return sorted(running, key=lambda request: (request.remaining > 1, request.rank))


def most_junior(candidates: Iterable[Request], than: Request) -> Request | None:
    """Return the candidate with the highest rank above that of ``than``, None without one."""
    juniors = [request for request in candidates if request.rank > than.rank]
    return max(juniors, key=lambda request: request.rank, default=None)


def prefill_of(shares: Sequence[Share]) -> tuple[float, int] | None:
    """Return where and how many tokens a step computes, if prefill is nearly all that it does.

    Of several prompts, as one at their average place: what a token costs grows evenly with what it
    attends to. Call it before the shares are marked as computed.
    """
    prompts = [share for share in shares if share.count > 1]
    tokens = sum(share.count for share in prompts)
    if tokens < PREFILL_TOKENS_MIN or len(shares) - len(prompts) > tokens * DECODES_MAX:
        return None
    attended = sum(share.count * (share.request.computed + share.count / 2) for share in prompts)
    return attended / tokens - tokens / 2, tokens
