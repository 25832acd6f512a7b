"""The loads of a cache that are under way, to end them together."""

from __future__ import annotations

from kvtier.cache.load import Load
from kvtier.cache.tenancy.roots import Roots
from kvtier.types import MissReason


class Loads:
    """Owns the loads that are not over, the oldest first. Used under the cache's lock."""

    def __init__(self) -> None:
        # A set's order would be that of addresses: which load gets the room has to be decided.
        self._active: list[Load] = []

    @property
    def count(self) -> int:
        """Loads that are not over."""
        return sum(load.outcome is None for load in self._active)

    def add(self, load: Load) -> None:
        """Follow a load until it is over."""
        self._forget_ended()
        self._active.append(load)

    def keep_deadlines(self) -> None:
        """End what is overdue, even if nobody polls it any more."""
        self._forget_ended()
        for load in self._active:
            load.keep_deadline()

    def bring(self) -> None:
        """Start what has room now, the oldest load's first, also while its engine polls nothing."""
        for load in self._active:
            load.bring()

    def end(self, reason: MissReason) -> None:
        """Let all of them come to nothing."""
        for load in self._active:
            load.end(reason)

    def end_stale(self, roots: Roots) -> None:
        """Let those come to nothing whose epoch is over."""
        for load in self._active:
            if not roots.current(load.sequence):
                load.end(MissReason.ABSENT)

    def _forget_ended(self) -> None:
        self._active = [load for load in self._active if load.outcome is None]
