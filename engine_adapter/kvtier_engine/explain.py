"""Why each token of a prompt was loaded or computed. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.cache.cost import Judged, Reason
from kvtier.types import LoadOutcome, MissReason, Tier
from kvtier_engine.types import Why


def explain(
    prompt_tokens: int,
    found_tokens: int,
    judged: Iterable[Judged],
    outcome: LoadOutcome | None,
) -> tuple[Why, ...]:
    """Return runs that make up the prompt, in order.

    ``judged`` begins behind the tokens that were found in the pool; ``outcome`` is that of the
    load that was made of it, None without one.
    """
    runs = [Why(0, found_tokens, Tier.HBM, True, Reason.FOUND)]
    brought = found_tokens if outcome is None else outcome.end_token
    lost = outcome.misses[0].reason if outcome is not None and outcome.misses else None
    for each in judged:
        run = each.segment
        costs = (each.load_s, each.recompute_s)
        if not each.loaded:
            runs.append(Why(run.start_token, run.end_token, run.tier, False, each.reason, *costs))
            continue
        cut = min(max(brought, run.start_token), run.end_token)
        runs.append(Why(run.start_token, cut, run.tier, True, each.reason, *costs))
        reason = lost or MissReason.CANCELLED
        runs.append(Why(cut, run.end_token, run.tier, False, reason, *costs))
    end = max(run.end_token for run in runs)
    runs.append(Why(end, prompt_tokens, None, False, MissReason.ABSENT))
    return tuple(run for run in runs if run.end_token > run.start_token)
