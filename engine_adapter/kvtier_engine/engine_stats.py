"""What an engine counts and says of itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvtier.obs.stats import Histogram
from kvtier.types import Tier
from kvtier_engine.types import FinishReason


@dataclass(slots=True)
class EngineCounters:
    """Running counts; nothing ever decreases. Owned by the engine's thread."""

    steps: int = 0
    step_errors: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at one instant.

    ``waiting`` includes requests that wait for a lookup or for their turn after a load; those
    whose load is under way are ``loading``. ``blocks_used`` are referenced, ``blocks_cached`` can
    be found again or be evicted. ``prompt_tokens`` were asked for by requests that have begun to
    run, ``hit_tokens`` of them came from a tier; ``refound_tokens`` are what preempted requests
    found of their own and are in neither. ``error`` is empty unless the engine has died.
    """

    running: int
    waiting: int
    loading: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_evicted: int
    preemptions: int
    loads_given_up: int
    cache_faults: int
    steps: int
    step_errors: int
    prompt_tokens: int
    generated_tokens: int
    refound_tokens: int
    hit_tokens: dict[Tier, int]
    finished: dict[FinishReason, int]
    ttft: Histogram
    itl: Histogram
    error: str = ""
