"""Load or recompute: what of a match is worth loading, and why. Pure: no I/O, no clock, no state.

A segment is a run of hits in one tier under one codec. Loading ``n`` tokens of it costs

    ``t0 + queue + n * bytes / B + n * decode``

and computing them ``a * n + g * n * (c0 + n / 2)``, where ``c0`` tokens come before. ``t0``, ``B``,
``decode``, ``a`` and ``g`` are measured while serving. KV needs its whole prefix, so a load may
end at a segment's end only::

    tokens    0 ──────── DRAM ──────── 1024 ─── disk ─── 2048 ─── disk, other codec ─── 3072
    cuts      ^                          ^                 ^                             ^

The cut with the least sum of loading what comes before and computing what comes after wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from kvtier.types import ChunkHit, Tier

#: A tier whose tokens are loaded is left when that takes longer than so many times computing them,
#: one that was left is taken up again below so many. Between the two, what was goes on. Both keep
#: away from what a try costs and from where a load is given up (``Patience``).
LEAVES_AT = 1.05
RETURNS_AT = 0.975
#: What computing the front of a load beside it must save of the load's time to be worth it.
SPLIT_GAIN_MIN = 0.2

#: Seconds to compute tokens ``start .. end``; None while nothing is known of it.
Recompute = Callable[[int, int], float | None]


class Reason(StrEnum):
    """Why tokens are loaded or computed; ``absent`` and what else befalls a load are misses."""

    FOUND = "found"  # In the engine's own blocks.
    FASTER = "faster"
    UNKNOWN = "unknown"  # Nothing is known of the link, or of computing: a load shows it.
    RETRY = "retry"  # Too slow so far; with a head start, a load may show that it no longer is.
    MEANWHILE = "meanwhile"  # Computed while what comes behind was loaded.
    SLOWER = "slower"
    SILENT = "silent"  # The link owes an answer for too long.


#: Reasons for which nothing is loaded.
LEFT = frozenset({Reason.SLOWER, Reason.SILENT})


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in one tier under one codec, of so many bytes in so many sections."""

    start_token: int
    end_token: int
    tier: Tier
    codec: str
    nbytes: int
    sections: int

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.end_token - self.start_token


@dataclass(frozen=True, slots=True)
class Price:
    """What is known of a segment before it is decided on.

    ``load_s`` is None while nothing is known of its link; ``move_s`` of it is from DRAM into the
    engine's blocks. ``silent``: the link owes an answer for too long; ``idle``: nothing is under
    way there. ``left_before``: at the last decision, this tier's tokens were computed.
    """

    load_s: float | None
    move_s: float = 0.0
    silent: bool = False
    idle: bool = True
    left_before: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """One segment's verdict, with what it was judged by; None where that was not known."""

    segment: Segment
    reason: Reason
    load_s: float | None
    recompute_s: float | None
    move_s: float = 0.0

    @property
    def loaded(self) -> bool:
        """True when the segment is to be loaded."""
        return self.reason not in LEFT


def segments(
    hits: Sequence[ChunkHit],
    tokens: range,
    chunk_tokens: int,
    size: Callable[[int, str], tuple[int, int]],
) -> list[Segment]:
    """Cut the part of a match that covers ``tokens`` into runs.

    ``size(chunk, codec)`` returns the bytes and sections of a whole chunk.
    """
    covered = range(tokens.start // chunk_tokens, min(-(-tokens.stop // chunk_tokens), len(hits)))
    runs = []
    for (tier, codec), run in groupby(covered, key=lambda i: (hits[i].tier, hits[i].codec)):
        chunks = list(run)
        start = max(chunks[0] * chunk_tokens, tokens.start)
        end = min((chunks[-1] + 1) * chunk_tokens, tokens.stop)
        if end <= start:
            continue
        sizes = [size(chunk, codec) for chunk in chunks]
        nbytes, sections = (sum(each) for each in zip(*sizes, strict=True))
        # A chunk is read whole, whatever of it is asked for.
        runs.append(Segment(start, end, tier, codec, nbytes, sections))
    return runs


def judge(runs: Iterable[Segment], prices: Iterable[Price], recompute: Recompute) -> list[Judged]:
    """Return a verdict for each run, in order; the loaded ones come first."""
    priced = list(zip(runs, prices, strict=True))
    if not priced:
        return []
    end = priced[-1][0].end_token
    costs = [recompute(run.start_token, run.end_token) for run, _ in priced]
    best = _best_cut(priced, end, recompute)
    judged: list[Judged] = []
    slow: set[Tier] = set()  # What the load waits for, DRAM apart.
    stopped = tried = False
    for index, (run, price) in enumerate(priced):
        reason = _reason(price, beyond=index >= best, computable=costs[index] is not None)
        # A try is of one link, and never of what would hold up a load that is worth it.
        late = reason is Reason.RETRY and slow and not tried
        other = tried and run.tier is not Tier.DRAM and run.tier not in slow
        if reason not in LEFT and (stopped or late or other):
            reason = Reason.SLOWER
        stopped = reason in LEFT
        tried = tried or reason is Reason.RETRY
        if run.tier is not Tier.DRAM:
            slow.add(run.tier)
        judged.append(Judged(run, reason, price.load_s, costs[index], price.move_s))
    return judged


def _best_cut(priced: list[tuple[Segment, Price]], end: int, recompute: Recompute) -> int:
    """Return how many runs to load for the least time in all; unknown links are given a chance."""
    best, least_s = 0, math.inf
    load_s = 0.0
    for count in range(len(priced) + 1):
        if count:
            run, price = priced[count - 1]
            load_s += (price.load_s or 0.0) / (RETURNS_AT if price.left_before else LEAVES_AT)
            start = run.end_token
        else:
            start = priced[0][0].start_token
        compute_s = recompute(start, end)
        if compute_s is None:
            return len(priced)
        if load_s + compute_s <= least_s:
            best, least_s = count, load_s + compute_s
    return best


def _reason(price: Price, *, beyond: bool, computable: bool) -> Reason:
    if price.silent:
        return Reason.SILENT
    if beyond:
        # One try at a time: what is under way shows as much.
        return Reason.RETRY if price.idle else Reason.SLOWER
    return Reason.UNKNOWN if price.load_s is None or not computable else Reason.FASTER


def split_at(judged: Sequence[Judged], chunk_tokens: int, recompute: Recompute) -> int | None:
    """Return where a load is to begin so that computing what comes before takes as long.

    None where that gains little: both together take the time of the longer one, which is half of
    the load's at best. What is moved into blocks is unpacked by the device that computes, so that
    part of a load comes on top. Only for one run below DRAM that is worth loading anyway.
    """
    loaded = [each for each in judged if each.loaded]
    if len(loaded) != 1 or loaded[0].reason is not Reason.FASTER:
        return None
    run, load_s, move_s = loaded[0].segment, loaded[0].load_s, loaded[0].move_s
    if run.tier is Tier.DRAM or not load_s:
        return None
    best, least_s = None, load_s * (1 - SPLIT_GAIN_MIN)
    first = (run.start_token // chunk_tokens + 1) * chunk_tokens
    for cut in range(first, run.end_token, chunk_tokens):
        front_s = recompute(run.start_token, cut)
        if front_s is None:
            return None
        share = (run.end_token - cut) / run.tokens
        both_s = max(front_s, (load_s - move_s) * share) + move_s * share
        if both_s >= least_s and best is not None:
            break
        if both_s < least_s:
            best, least_s = cut, both_s
    return best
