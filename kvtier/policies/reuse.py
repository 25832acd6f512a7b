"""What time has taught about reuse: per kind of block, how long until the next access.

A kind is a small number that says what a block has in common with others (``gittins`` makes it of
access count, turn, sharing and hint). For each kind a decayed histogram of the times from an
access to the next is kept, in buckets that grow by a constant factor. A block that is forgotten
before it is used again is *censored*: it says that the time was longer, not how long.

The Gittins index of a block whose last access is ``age`` ago is

    sup over T of  P(next access within T | none until age) / E[min(time until it, T) | age]

that is, the best rate of hits per second of keeping the block that any stopping time gives
(Gittins 1979; Aalto, Ayesta, Righter 2009 for the form used here).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import fsum, log2
from operator import add
from typing import Final, NamedTuple

#: Buckets: ``BUCKET_S_MIN * (2 ** (i / BUCKETS_PER_OCTAVE) - 1)`` is the lower edge of bucket i.
BUCKETS: Final = 72
BUCKETS_PER_OCTAVE: Final = 2.5
BUCKET_S_MIN: Final = 0.05 / 64
EDGES_S: Final = tuple(
    BUCKET_S_MIN * (2 ** (i / BUCKETS_PER_OCTAVE) - 1) for i in range(BUCKETS + 1)
)

# Accesses after which an observation weighs half.
_HALF_LIFE_ACCESSES: Final = 1_000_000
# Observations that every kind borrows from its pool, and every pool from all kinds together.
_BORROWED: Final = 100.0
_BORROWED_BY_POOLS: Final = 4.0
# Before anything is known, times are log-uniform, so the index falls with age: LRU.
_PRIOR: Final = 1.0
# Spans of time in which the beginnings of waits are counted.
_SLICES_MAX: Final = 64

_WIDTHS_S: Final = tuple(after - before for before, after in pairwise(EDGES_S))


def bucket_of(age_s: float) -> int:
    """Return the bucket of a time, which is at least 0."""
    bucket = int(BUCKETS_PER_OCTAVE * log2(age_s / BUCKET_S_MIN + 1))
    return bucket if bucket < BUCKETS else BUCKETS - 1


class _Slice(NamedTuple):
    """Accesses that began a wait about ``middle_s``, by kind."""

    middle_s: float
    started: list[float]


class ReuseTimes:
    """Histograms and index of each kind. ``at = kind * BUCKETS + bucket`` everywhere."""

    def __init__(self, pools: Sequence[int]) -> None:
        """Make one kind for each of ``pools``, which says what pool it borrows from."""
        self._pools = tuple(pools)
        kinds = len(pools)
        #: Accesses that began a wait since the last ``learn``, by kind.
        self.started = [0.0] * kinds
        #: Accesses that ended a wait; waits that were never seen to end.
        self.reused = [0.0] * (kinds * BUCKETS)
        self.censored = [0.0] * (kinds * BUCKETS)
        #: The Gittins index, as of the last ``learn``.
        self.index = [0.0] * (kinds * BUCKETS)
        self._slices: list[_Slice] = []
        self._learned_s = 0.0
        self.learn(0, 0.0)

    def learn(self, accesses: int, now_s: float) -> None:
        """Compute the index anew, and let what is known fade by ``accesses`` accesses."""
        self._slices.append(_Slice((self._learned_s + now_s) / 2, self.started))
        self.started = [0.0] * len(self._pools)
        self._learned_s = now_s
        kinds = self._counts(now_s)
        nothing = [0.0] * BUCKETS
        prior = _Counts([2.0 * _PRIOR] * BUCKETS, [_PRIOR / BUCKETS] * BUCKETS, nothing)
        everything = _scaled(_sum([prior, *kinds]), _BORROWED_BY_POOLS)
        members: dict[int, list[_Counts]] = {}
        for pool, counts in zip(self._pools, kinds, strict=True):
            members.setdefault(pool, [everything]).append(counts)
        borrowed = {pool: _scaled(_sum(all_), _BORROWED) for pool, all_ in members.items()}
        ready: dict[int, list[float]] = {}
        for kind, (pool, counts) in enumerate(zip(self._pools, kinds, strict=True)):
            if counts.started[0] < 1.0:
                if pool not in ready:
                    ready[pool] = _index(borrowed[pool])
                index = ready[pool]
            else:
                index = _index(_sum([counts, borrowed[pool]]))
            self.index[kind * BUCKETS : (kind + 1) * BUCKETS] = index
        self._fade(0.5 ** (accesses / _HALF_LIFE_ACCESSES))

    def _counts(self, now_s: float) -> list[_Counts]:
        """Return what is known of each kind. A wait counts in the buckets it has had time for."""
        started = [[0.0] * BUCKETS for _ in self._pools]
        for middle_s, counts in self._slices:
            bucket = bucket_of(now_s - middle_s)
            for kind, count in enumerate(counts):
                if count:
                    started[kind][bucket] += count
        return [
            _Counts(
                list(accumulate(reversed(counts)))[::-1],
                self.reused[kind * BUCKETS : (kind + 1) * BUCKETS],
                self.censored[kind * BUCKETS : (kind + 1) * BUCKETS],
            )
            for kind, counts in enumerate(started)
        ]

    def _fade(self, share: float) -> None:
        self.reused = [count * share for count in self.reused]
        self.censored = [count * share for count in self.censored]
        self._slices = [
            _Slice(each.middle_s, [count * share for count in each.started])
            for each in self._slices
        ]
        if len(self._slices) > _SLICES_MAX:
            # Old times need not be told apart as well as new ones.
            half = _SLICES_MAX // 2
            old = self._slices[:half]
            merged = [_merged(a, b) for a, b in zip(old[::2], old[1::2], strict=True)]
            self._slices = merged + self._slices[half:]


def _merged(one: _Slice, other: _Slice) -> _Slice:
    weights = [sum(each.started) or 1e-9 for each in (one, other)]
    middle_s = (one.middle_s * weights[0] + other.middle_s * weights[1]) / sum(weights)
    return _Slice(middle_s, list(map(add, one.started, other.started)))


class _Counts(NamedTuple):
    """By bucket: waits that began as long ago, those that ended there, those lost from sight."""

    started: list[float]
    reused: list[float]
    censored: list[float]


def _sum(many: Sequence[_Counts]) -> _Counts:
    return _Counts(*(list(map(fsum, zip(*same, strict=True))) for same in zip(*many, strict=True)))


def _scaled(counts: _Counts, started: float) -> _Counts:
    """Return counts as if ``started`` waits had begun."""
    share = started / max(counts.started[0], 1e-9)
    return _Counts(*([count * share for count in same] for same in counts))


def _index(counts: _Counts) -> list[float]:
    """Return the index of one kind by bucket.

    The share of the waits that end in a bucket, of those that reach it, gives the survival
    function (after Kaplan and Meier 1958; a wait reaches a bucket only if it began long enough
    ago). With it, the points (time waited, hits) of growing T lie on a curve, and the index at an
    age is the steepest slope from the curve's point there to any later one: the slope of the upper
    hull of what follows.
    """
    waits, hits = [0.0], [0.0]
    wait, survival, in_sight = 0.0, 1.0, 1.0
    for started, reused, censored, width in zip(*counts, _WIDTHS_S, strict=True):
        after = survival
        at_risk = started * survival * in_sight
        if at_risk > 1e-9:
            after *= 1.0 - reused / at_risk if reused < at_risk else 0.0
            in_sight *= 1.0 - censored / at_risk if censored < at_risk else 0.0
        wait += 0.5 * (survival + after) * width
        survival = after
        waits.append(wait)
        hits.append(1.0 - survival)
    index = [0.0] * BUCKETS
    hull = [BUCKETS]
    for bucket in range(BUCKETS - 1, -1, -1):
        x, y = waits[bucket], hits[bucket]
        slope = 0.0
        while hull:
            top = hull[-1]
            run = waits[top] - x
            slope = (hits[top] - y) / run if run > 0.0 else 0.0
            if len(hull) < 2:
                break
            below = hull[-2]
            run = waits[below] - x
            if run > 0.0 and (hits[below] - y) / run < slope:
                break
            hull.pop()
        hull.append(bucket)
        index[bucket] = slope
    return index
