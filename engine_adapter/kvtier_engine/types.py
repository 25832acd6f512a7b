"""Values that pass between the engine's parts: API, scheduler, runner.

The API hands over a ``GenerateRequest`` and reads ``Delta`` values. The scheduler orders a step as
a ``StepBatch`` of ``RowStep`` values; the runner answers with a ``StepOutput``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.types import Features, Tier


class FinishReason(StrEnum):
    """Why a request ended, in OpenAI's words; ``abort`` and ``error`` never reach a client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Validated by the API; ``temperature == 0`` is greedy.

    ``top_logprobs`` is None for no log-probabilities, else the number of alternatives beside the
    chosen token. ``seed`` makes a request's tokens depend on nothing that runs beside it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None


_NEUTRAL = Features()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate. ``priority``: lower runs first, equal is first come.

    ``features`` are what the tiers' policies are told of the session. With ``explain``, ``Usage``
    says why each token of the prompt was loaded or computed.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    features: Features = _NEUTRAL
    explain: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token's log-probability and its alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Why:
    """Tokens ``start_token .. end_token`` of a prompt: whether they were loaded, and why.

    ``tier`` is where they were found, None where nothing has them. The seconds are estimates from
    before the decision; None where nothing was known.
    """

    start_token: int
    end_token: int
    tier: Tier | None
    loaded: bool
    reason: str
    load_s: float | None = None
    recompute_s: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. ``cached_by_tier`` counts prompt tokens that were not computed.

    ``why`` says of the whole prompt why; empty until the request first runs, and unless asked for.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_by_tier: dict[Tier, int] = field(default_factory=dict)
    why: tuple[Why, ...] = ()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from any tier, HBM included."""
        return sum(self.cached_by_tier.values())


@dataclass(frozen=True, slots=True)
class Delta:
    """What a request gained since its last delta; the last one has ``finish_reason``.

    ``text`` is final: what could still turn out to be part of a stop string or of an unfinished
    character is held back.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    error: str = ""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True, slots=True)
class RowStep:
    """One request's share of a step: feed ``token_ids`` at positions from ``start`` on.

    ``row`` is the request's fixed row in the runner; ``block_ids`` its whole block table, one
    tuple per KV group, covering at least ``start + len(token_ids)`` tokens. ``sample`` asks for
    the next token after the last one fed.
    """

    row: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[tuple[int, ...], ...]
    sample: bool


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one forward pass computes. Rows are distinct."""

    rows: tuple[RowStep, ...]

    @property
    def token_count(self) -> int:
        """Tokens fed in this step."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Per row of the batch, in its order: the sampled token (None where none was asked for).

    ``prompt_logprobs[i]`` holds, for rows added with ``prompt_logprobs``, the log-probabilities of
    the prompt tokens at positions ``start + 1 .. start + len(token_ids)`` as far as they belong
    to the prompt; else it is empty.
    """

    sampled: tuple[TokenLogprob | None, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...]
