"""The scheduler's values: its limits, its orders, its counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from kvtier.errors import ConfigError
from kvtier.types import Tier
from kvtier_engine.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step. A priority is worth ``priority_step_s`` seconds in the line."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    priority_step_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for limits that cannot be."""
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs = {self.max_num_seqs}; allowed: 1 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens}; allowed: at least "
                f"max_num_seqs = {self.max_num_seqs}"
            )


class Verdict(Enum):
    """What becomes of a waiting request in a step."""

    RUNS = auto()
    PARKED = auto()
    LATER = auto()
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class Share:
    """A request's part of a step: so many of its tokens, from the first one not computed."""

    request: Request
    count: int


@dataclass(frozen=True, slots=True)
class Step:
    """What the runner has to do: drop rows, add rows, then compute the shares."""

    shares: tuple[Share, ...]
    rows_removed: tuple[int, ...]
    admitted: tuple[Request, ...]


@dataclass(slots=True)
class SchedulerCounters:
    """What the scheduler counts; nothing ever decreases. Hits are counted when a request first
    runs; what a preempted request finds again of its own is in ``refound_tokens``.
    """

    preemptions: int = 0
    loads_given_up: int = 0
    admitted_tokens: int = 0
    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    refound_tokens: int = 0
