"""What the connector's two sides say to each other, once a step: plain, picklable data.

::

    scheduler's side                                    worker's side, one a rank
    orders: loads to make, stores to make    ───────►   executes the plans
                                             ◄───────   answers: results of plans
    ends: what became of each load           ───────►   tells vLLM, unless it has done so already
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.tiers.memory import ArenaHandle
from kvtier.types import Plan, Result


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Plans of one request's load. After the ``last`` ones no more follow.

    A worker that has done all plans of a load tells vLLM that the request's KV is there.
    """

    load_id: int
    request_id: str
    plans: tuple[Plan, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """A load is over, and these blocks of it have to be computed; all of it where it ``failed``."""

    load_id: int
    request_id: str
    bad_blocks: tuple[int, ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Orders:
    """What a step asks of the workers. ``arena`` is for those in other processes than the cache."""

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[Plan, ...] = ()
    ends: tuple[LoadEnd, ...] = ()
    arena: ArenaHandle | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """What workers have done since the last step; ``refusals`` say why one can do nothing."""

    results: tuple[Result, ...] = ()
    refusals: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        """Tell whether there is anything to say."""
        return bool(self.results or self.refusals)

    def merged(self, other: Answers) -> Answers:
        """Return what both say."""
        return Answers(self.results + other.results, self.refusals + other.refusals)
