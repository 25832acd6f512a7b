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

from math import log2
from typing import Final

#: Buckets: ``BUCKET_S_MIN * (2 ** (i / BUCKETS_PER_OCTAVE) - 1)`` is the lower edge of bucket i.
BUCKETS: Final = 72
BUCKETS_PER_OCTAVE: Final = 2.5
BUCKET_S_MIN: Final = 0.05
EDGES_S: Final = tuple(
    BUCKET_S_MIN * (2 ** (i / BUCKETS_PER_OCTAVE) - 1) for i in range(BUCKETS + 1)
)

# Accesses after which an observation weighs half.
_HALF_LIFE_ACCESSES: Final = 1_000_000
# Observations that every kind borrows from all kinds together.
_BORROWED: Final = 4.0
# Before anything is known, times are log-uniform, so the index falls with age: LRU.
_PRIOR: Final = 1.0


def bucket_of(age_s: float) -> int:
    """Return the bucket of a time, which is at least 0."""
    bucket = int(BUCKETS_PER_OCTAVE * log2(age_s / BUCKET_S_MIN + 1))
    return bucket if bucket < BUCKETS else BUCKETS - 1


class ReuseTimes:
    """Histograms and index of ``kinds`` kinds. ``at = kind * BUCKETS + bucket`` everywhere."""

    def __init__(self, kinds: int) -> None:
        self._kinds = kinds
        #: Accesses that began a wait, by kind; accesses that ended one; waits never seen to end.
        self.started = [0.0] * kinds
        self.reused = [0.0] * (kinds * BUCKETS)
        self.censored = [0.0] * (kinds * BUCKETS)
        #: The Gittins index, as of the last ``learn``.
        self.index = [0.0] * (kinds * BUCKETS)
        self.learn(0)

    def learn(self, accesses: int) -> None:
        """Compute the index anew, and let what is known fade by ``accesses`` accesses."""
        pooled, pooled_started = self._pooled()
        share = _BORROWED / pooled_started
        borrowed = [count * share for count in pooled]
        shared = _index(_BORROWED, borrowed, [0.0] * BUCKETS)
        for kind in range(self._kinds):
            here = slice(kind * BUCKETS, (kind + 1) * BUCKETS)
            if self.started[kind] < 1.0:
                self.index[here] = shared
                continue
            reused = [a + b for a, b in zip(self.reused[here], borrowed, strict=True)]
            self.index[here] = _index(self.started[kind] + _BORROWED, reused, self.censored[here])
        fade = 0.5 ** (accesses / _HALF_LIFE_ACCESSES)
        self.started = [count * fade for count in self.started]
        self.reused = [count * fade for count in self.reused]
        self.censored = [count * fade for count in self.censored]

    def _pooled(self) -> tuple[list[float], float]:
        prior = _PRIOR / BUCKETS
        reused = [prior + sum(self.reused[bucket::BUCKETS]) for bucket in range(BUCKETS)]
        return reused, max(sum(self.started), sum(reused) - _PRIOR) + 2 * _PRIOR


def _index(started: float, reused: list[float], censored: list[float]) -> list[float]:
    """Return the index of one kind by bucket.

    With the survival function of Kaplan and Meier (1958) the points (time waited, hits) of growing
    T lie on a curve, and the index at an age is the steepest slope from the curve's point there
    to any later one: the slope of the upper hull of what follows.
    """
    waits, hits = [0.0], [0.0]
    at_risk, survival = started, 1.0
    for bucket in range(BUCKETS):
        hazard = min(reused[bucket] / at_risk, 1.0) if at_risk > 1e-9 else 0.0
        after = survival * (1.0 - hazard)
        width = EDGES_S[bucket + 1] - EDGES_S[bucket]
        waits.append(waits[-1] + 0.5 * (survival + after) * width)
        hits.append(hits[-1] + survival - after)
        at_risk -= reused[bucket] + censored[bucket]
        survival = after
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
