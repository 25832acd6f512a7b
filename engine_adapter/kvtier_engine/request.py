"""One request as the engine holds it, from submission to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.cache.worth.costs import Choice
from kvtier.types import LoadOutcome, Tier
from kvtier_engine.block_pool import BlockChain
from kvtier_engine.types import GenerateRequest, TokenLogprob, Why


class Status(StrEnum):
    """Where a request stands.

    ::

        WAITING ──> LOOKUP ──┐
           │  <──────────────┤
           ├────────────> LOADING ──> LOADED ──┐
           └───────────────────────────────────┴──> RUNNING ──> FINISHED
           ^                                           │
           └────────────── PREEMPTED <─────────────────┘

    LOADING and LOADED requests hold blocks but no row: they wait without being in anyone's way,
    and a LOADED one may have to give its blocks back (to WAITING).
    """

    WAITING = "waiting"
    LOOKUP = "lookup"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True)
class Behind:
    """A load of tokens from ``start_token`` on, while those before them are computed.

    ``end_token`` is where what it brought ends, None while it is under way.
    """

    start_token: int
    end_token: int | None = None


@dataclass(eq=False, slots=True)
class Request:
    """A request's state. Owned by the scheduler; one thread only.

    ``tokens`` is the prompt and what was generated; the first ``computed`` of them have their KV
    in ``block_ids``, which covers all tokens while the request is LOADING, LOADED or RUNNING.
    ``rank`` orders requests: the lower one goes first, the higher one is preempted first.
    """

    spec: GenerateRequest
    rank: tuple[float, int]
    chain: BlockChain
    submitted_s: float
    tokens: list[int]
    status: Status = Status.WAITING
    row: int | None = None
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0
    #: Prompt tokens that were not computed, by tier; set when the request first runs.
    cached_by_tier: dict[Tier, int] | None = None
    #: What a finished load brought, until the request runs.
    loaded_by_tier: dict[Tier, int] = field(default_factory=dict)
    #: What was decided of what the tiers hold, and what came of a load, until the request runs.
    choice: Choice | None = None
    behind: Behind | None = None
    outcome: LoadOutcome | None = None
    #: Why each token of the prompt was loaded or computed; set when the request first runs.
    why: tuple[Why, ...] = ()
    #: Tokens found in the pool at the latest admission.
    found_tokens: int = 0
    #: Leading blocks that were offered to the pool's index since then.
    indexed: int = 0
    #: True once the request was admitted: what the tiers are asked later is not counted again.
    admitted: bool = False
    #: True once the request has waited for a load that another one had begun.
    followed: bool = False
    #: True when the tiers are not to be asked: a load of this request broke.
    unlinked: bool = False
    preemptions: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    last_token_s: float | None = None
    _table: tuple[int, ...] = ()

    @property
    def prompt_count(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt)

    @property
    def generated_count(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.spec.prompt)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def computable(self) -> int:
        """How many of them may be computed now: not those that a load is about to bring."""
        return self.remaining if self.behind is None else self.behind.start_token - self.computed

    def pass_over(self) -> None:
        """Go on behind what a load has brought, once all before it has been computed."""
        behind = self.behind
        if behind is None or behind.end_token is None or self.computed < behind.start_token:
            return
        self.computed, self.behind = behind.end_token, None

    @property
    def uses_prefix(self) -> bool:
        """False while the log-probabilities of every prompt token must be computed."""
        return self.spec.sampling.prompt_logprobs is None or self.generated_count > 0

    @property
    def table(self) -> tuple[int, ...]:
        """The block table as a value, rebuilt only when it has grown."""
        if len(self._table) != len(self.block_ids):
            self._table = tuple(self.block_ids)
        return self._table

    def take_blocks(self, block_ids: list[int]) -> None:
        """Append to the block table."""
        self.block_ids.extend(block_ids)

    def give_blocks(self) -> list[int]:
        """Empty the block table and return what it held; nothing is computed any more."""
        block_ids, self.block_ids, self._table = self.block_ids, [], ()
        self.computed = 0
        return block_ids
