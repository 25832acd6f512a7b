"""How long a load is waited for: as long as going on is better than computing what is left.

``P`` is when the load will be complete, projected from the bytes that have come; ``R`` what
computing its tokens costs. The rule, and what it bounds, in units of the better of load and
recompute:

- A load that was begun because it is faster, or because nothing is known of its link, is waited
  for until ``0.95 R`` while nothing of it has come, and until ``1.08 R`` when it is nearly
  complete or what is known of its link lets nothing come sooner. Then it has cost at most that,
  and computing everything comes on top: 2.08. What is left to 2.1 is for what nobody counts:
  looking up, noticing, and an ``R`` that was too large.
- One that will be complete so late that computing what is left ends sooner is given up at once.
- A load from a link that was too slow so far has a head start only, long enough for the first
  section of a load that is worth it: ``R`` times the share of that section. It costs at most
  ``HEAD_START_MAX``, and it finds out when the link has become fast again: a load of less than
  half of ``R`` has shown its first section by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.cache.worth.lines import PrefillPoints

#: Waiting longer than recomputing would take, as a share of it, where the load is nearly there.
OVERTIME = 0.08
#: Waiting while nothing has come, as a share of recomputing: what is saved of the worst case here
#: is lost on a load that would have come right then, so it is little.
IN_VAIN = 0.95
#: The head start of a load that should be too slow, as a share of recomputing.
HEAD_START_MAX = 0.08
HEAD_START_MIN = 0.02


def head_start_s(recompute_s: float, sections: int, latency_s: float = 0.0) -> float:
    """Return how long a load from a slow link is waited for before anything of it has come.

    ``latency_s`` is what the link is known to take before its first byte.
    """
    # A load as long as recompute / 2.1 with even sections, and a fifth for uneven ones.
    share = 1.2 / (2.1 * max(sections, 1))
    first_s = recompute_s * max(share, HEAD_START_MIN) + latency_s
    return min(first_s, recompute_s * HEAD_START_MAX)


class Progress(NamedTuple):
    """Of what a load has to bring up: the share that has come, and that may be about to come.

    Transfers run side by side: ``coming`` is what those beside the last one may have on the way.
    Tokens before ``complete_token`` are kept whatever becomes of the rest.
    """

    share: float
    coming: float
    complete_token: int


@dataclass(slots=True)
class Patience:
    """One load's. Pure; ``now`` in seconds never goes back.

    The load is of tokens ``start_token .. end_token`` and began at ``begun_s``. ``worth`` is what
    a second of the GPU is worth in seconds of waiting. With ``head_start_s`` the load is expected
    to be too slow. For ``free_s`` waiting costs nothing: what comes before is computed meanwhile.
    Below zero, so much was waited before the load began.
    By ``due_s``, something of it should have come.
    """

    begun_s: float
    start_token: int
    end_token: int
    prefill: PrefillPoints
    worth: float = 1.0
    head_start_s: float | None = None
    free_s: float = 0.0
    due_s: float = 0.0
    _share: float = field(default=0.0, init=False)
    _first: tuple[float, float] | None = field(default=None, init=False)
    _projected_s: float | None = field(default=None, init=False)

    @property
    def doubtful(self) -> bool:
        """True while the load has to prove itself and nothing of it has come."""
        return self.head_start_s is not None and self._first is None

    def over(self, now: float, progress: Progress) -> bool:
        """Tell whether to give up, now that so much has come.

        Call it again and again: when a share was first seen is taken for when it came.
        """
        share, coming, complete_token = progress
        if share >= 1.0:
            return False
        waited = now - self.begun_s
        if share > self._share:
            self._project(waited, share, min(share + coming, 1.0))
        total = self._recompute_s(self.start_token)
        left = self._recompute_s(complete_token)
        if total is None or left is None:
            return False
        if waited < self.free_s:
            return False
        if self._projected_s is None:
            return waited >= self._first_s(total) + self.free_s
        if waited >= self._projected_s:
            # What should have been complete by now goes on at its average pace.
            self._projected_s = waited / min(share + coming, 1.0)
        projected = self._projected_s
        if max(projected, waited) > total * (1 + OVERTIME) + self.free_s:
            return True
        slack = OVERTIME * total if self.head_start_s is None else 0.0
        return projected - waited > left + slack

    def _project(self, waited: float, share: float, optimistic_share: float) -> None:
        """Draw a line from what came first to what has come now; before that was latency."""
        if self._first is None:
            self._first = waited, share
            # A load that should be too slow has to prove itself by what comes first.
            if self.head_start_s is not None:
                self._projected_s = waited / optimistic_share
        else:
            began, first = self._first
            self._projected_s = began + (waited - began) * (1 - first) / (optimistic_share - first)
        self._share = share

    def _first_s(self, total_s: float) -> float:
        """Return how long to wait for the first that comes."""
        if self.head_start_s is not None:
            return self.head_start_s
        return max(IN_VAIN * total_s, min(self.due_s * (1 + OVERTIME), total_s * (1 + OVERTIME)))

    def _recompute_s(self, start_token: int) -> float | None:
        seconds = self.prefill.seconds(start_token, max(self.end_token, start_token))
        return None if seconds is None else self.worth * seconds
