"""Why each token of a prompt was loaded or computed. Pure."""

from __future__ import annotations

from kvtier.cache.worth.cost import Reason
from kvtier.types import MissReason, Tier
from kvtier_engine.request import Request
from kvtier_engine.types import Why


def explain(request: Request) -> tuple[Why, ...]:
    """Return runs that make up the prompt of a request that is about to run, in order."""
    found, outcome = request.found_tokens, request.outcome
    runs = [Why(0, found, Tier.HBM, True, Reason.FOUND)]
    brought = found if outcome is None else outcome.end_token
    lost = outcome.misses[0].reason if outcome is not None and outcome.misses else None
    for each in request.choice.judged if request.choice is not None else ():
        run, costs = each.segment, (each.load_s, each.recompute_s)
        if not each.loaded:
            runs.append(Why(run.start_token, run.end_token, run.tier, False, each.reason, *costs))
            continue
        begin = max(run.start_token, request.choice.split_token or 0) if request.choice else 0
        runs.append(Why(run.start_token, begin, run.tier, False, Reason.MEANWHILE, *costs))
        cut = min(max(brought, begin), run.end_token)
        runs.append(Why(begin, cut, run.tier, True, each.reason, *costs))
        reason = lost or MissReason.CANCELLED
        runs.append(Why(cut, run.end_token, run.tier, False, reason, *costs))
    end = max(run.end_token for run in runs)
    runs.append(Why(end, request.prompt_count, None, False, MissReason.ABSENT))
    return tuple(run for run in runs if run.end_token > run.start_token)
