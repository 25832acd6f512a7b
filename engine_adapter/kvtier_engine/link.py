"""The doors between the scheduler and the tiers below HBM: what each asks of the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvtier.cache.match import Pending, Ready
from kvtier.cache.sequence import Sequence
from kvtier.cache.worth.costs import Choice
from kvtier.types import Blocks, Features, LoadOutcome, Namespace, Plan, Result
from kvtier_engine.request import Request

_FEATURES = Features()


class LoadHandle(Protocol):
    """A load under way, as ``kvtier.cache.load.Load``."""

    def poll(self) -> list[Plan]:
        """Return the plans that have become ready."""
        ...

    @property
    def outcome(self) -> LoadOutcome | None:
        """What came, once nothing will be written to the load's blocks any more."""
        ...

    def cancel(self) -> None:
        """Start no further move."""
        ...


class CostFront(Protocol):
    """What the link uses of ``kvtier.cache.worth.costs.Costs``."""

    def choose(
        self, match: Ready, start_token: int, end_token: int, *, split: bool = False
    ) -> Choice:
        """Decide what of a match to load, and what to compute meanwhile."""
        ...

    def bound_lookup(self, sequence: Sequence, start_token: int) -> None:
        """Wait for what a remote says no longer than is worth it."""
        ...

    def note_prefill(self, start_token: float, tokens: int, seconds: float) -> None:
        """Learn what computing costs."""
        ...


class CacheFront(Protocol):
    """What the link uses of ``kvtier.cache.cache.Cache``."""

    def sequence(self, namespace: Namespace, *, features: Features = _FEATURES) -> Sequence:
        """Return an empty sequence."""
        ...

    def match(self, sequence: Sequence) -> Ready | Pending:
        """Return the longest usable prefix, or when to ask again."""
        ...

    @property
    def costs(self) -> CostFront:
        """What loads and computing cost."""
        ...

    def note_admission(
        self, match: Ready, start_token: int, end_token: int, choice: Choice | None = None
    ) -> None:
        """Count what the tiers were asked for, and what was decided."""
        ...

    def begin_load(
        self, match: Ready, blocks: Blocks, *, choice: Choice | None = None
    ) -> LoadHandle | None:
        """Begin to fill blocks."""
        ...

    def prefetch(self, match: Ready, *, start_token: int) -> bool:
        """Begin to bring what a match found from that token on into DRAM."""
        ...

    def begin_store(self, sequence: Sequence, chunks: range, blocks: Blocks) -> Plan | None:
        """Order chunks out of blocks; None where there is nothing to do or no room to do it."""
        ...

    def finish(self, results: Iterable[Result]) -> None:
        """Take the workers' answers."""
        ...

    def store_done(self, plan_id: int) -> bool:
        """Tell whether every worker has answered."""
        ...


class PlanWorker(Protocol):
    """Whatever carries plans out, as ``kvtier.cache.worker.CacheWorker``."""

    def execute(self, plan: Plan) -> None:
        """Begin a plan and return at once."""
        ...

    def poll(self) -> list[Result]:
        """Return the answers that have come in."""
        ...


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A request's load is over. Without an outcome it broke, and its blocks must not be used."""

    request: Request
    outcome: LoadOutcome | None


class Link(Protocol):
    """How the scheduler asks the tiers. No method blocks, none raises for a fault of a cache."""

    @property
    def faults(self) -> int:
        """How often a cache or worker has raised."""
        ...

    def lookup(self, request: Request) -> Ready | Pending | None:
        """Ask what the tiers hold of the request's tokens; None when they are not to be asked."""
        ...

    def prepare(self, request: Request, start_token: int) -> None:
        """Have what the tiers hold of a request brought near that waits for room; once each."""
        ...

    def choose(
        self, match: Ready, start_token: int, end_token: int, *, split: bool
    ) -> Choice | None:
        """Decide what of an answer's tokens to load; None when all of them are to be.

        With ``split``, some of them may be computed while those behind them are loaded.
        """
        ...

    def note_prefill(self, start_token: float, tokens: int, seconds: float) -> None:
        """Tell what a step took that computed so many tokens behind ``start_token``."""
        ...

    def admit(self, request: Request, match: Ready, end_token: int) -> bool:
        """Note that the request was admitted with this answer, and load up to ``end_token``.

        What was decided is ``request.choice``. The request's first ``found_tokens`` are in its
        blocks already; the load fills the blocks after them and no other. False when no load was
        begun; else ``poll`` reports its end.
        """
        ...

    def store(self, request: Request) -> None:
        """Offer the tiers every chunk that the request has computed by now."""
        ...

    def poll(self) -> list[LoadEnded]:
        """Let moves go on; give back the blocks of those that have ended; return ended loads."""
        ...

    def drop(self, request: Request) -> None:
        """Forget a request, after offering its last chunks. Its load, if any, is cancelled."""
        ...

    def held(self) -> Counter[int]:
        """Return the references that the link holds, by block."""
        ...


class NoLink:
    """The link of an engine without a cache."""

    @property
    def faults(self) -> int:
        """Zero."""
        return 0

    def lookup(self, request: Request) -> Ready | Pending | None:  # noqa: ARG002
        """Return None."""
        return None

    def prepare(self, request: Request, start_token: int) -> None:
        """Do nothing."""

    def choose(
        self,
        match: Ready,  # noqa: ARG002
        start_token: int,  # noqa: ARG002
        end_token: int,  # noqa: ARG002
        *,
        split: bool,  # noqa: ARG002
    ) -> Choice | None:
        """Decide nothing."""
        return None

    def note_prefill(self, start_token: float, tokens: int, seconds: float) -> None:
        """Learn nothing."""

    def admit(self, request: Request, match: Ready, end_token: int) -> bool:  # noqa: ARG002
        """Begin no load."""
        return False

    def store(self, request: Request) -> None:
        """Store nothing."""

    def poll(self) -> list[LoadEnded]:
        """Return nothing."""
        return []

    def drop(self, request: Request) -> None:
        """Forget nothing."""

    def held(self) -> Counter[int]:
        """Return no reference."""
        return Counter()
