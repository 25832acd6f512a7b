"""Plans on a GPU, carried out by the engine's own thread, a little whenever it looks.

A thread beside the engine's would ask Python for its lock after each call into CUDA, and have it
every 5 ms only (``sys.getswitchinterval``) while the engine computes or looks for work: hundreds of
calls, which take 10 ms by themselves, take a second then. The device works on between the turns.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from kvtier.clock import SystemClock
from kvtier.codecs.gpu import Wait
from kvtier.constants import COPY_TURN_S, PLANS_IN_TURN_MAX
from kvtier.interfaces import Clock
from kvtier.types import Result

#: A plan that is carried out: what its pauses say stands in ``GpuMover.moving``.
Steps = Generator[Wait, None, Result]


@dataclass(slots=True, eq=False)
class _Begun:
    """A plan, and what it pauses for; ``asking``: nobody else may give the device work now."""

    steps: Steps
    cut_short: Result
    asking: bool = False
    waits: Wait = None


class Turns:
    """Carries plans out. One thread at a time; never waits but in ``finish``.

    Steps raise nothing of their own. What is raised in the thread meanwhile, as Ctrl-C does, goes
    through; the plan's result and those of others come the next time.

    Of the first ``PLANS_IN_TURN_MAX`` plans, in their order, each is given to the device as soon as
    the one before it has been; results come as plans end.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._plans: list[_Begun] = []
        # Kept where an exception of the caller's own, as Ctrl-C, cuts a turn short.
        self._ended: list[Result] = []

    def add(self, steps: Steps, cut_short: Result) -> None:
        """Take a plan on; ``cut_short`` is what comes of it where the caller was interrupted."""
        self._plans.append(_Begun(steps, cut_short))

    def turn(self) -> list[Result]:
        """Go on until all wait, or for ``COPY_TURN_S`` and one step; return what has ended."""
        end = self._clock.now() + COPY_TURN_S
        while (plan := self._next()) is not None:
            self._advance(plan)
            if self._clock.now() >= end:
                break
        return self._take()

    def finish(self) -> list[Result]:
        """Go on until all have ended, waiting for the device; return what has ended."""
        while self._plans:
            self._advance(self._next() or self._plans[0])
        return self._take()

    def _next(self) -> _Begun | None:
        """The one that is asking; or else the first that need not wait."""
        some = self._plans[:PLANS_IN_TURN_MAX]
        for plan in some:
            if plan.asking:
                return plan
        return next((plan for plan in some if plan.waits is None or plan.waits()), None)

    def _advance(self, plan: _Begun) -> None:
        try:
            plan.waits = next(plan.steps)
        except StopIteration as end:
            self._plans.remove(plan)
            # Steps out of which an exception went have no value the next time.
            self._ended.append(end.value or plan.cut_short)
        else:
            plan.asking = plan.waits is None

    def _take(self) -> list[Result]:
        ended, self._ended = self._ended, []
        return ended
