"""What a measurement says, as values. No torch: reports are made and shown without it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """``storage``: a prefix goes through the codec once, as in a tier. ``in-place``: every token
    does when it is written, and attention reads that, as in packed pages.
    """

    STORAGE = "storage"
    IN_PLACE = "in-place"


@dataclass(frozen=True, slots=True)
class Figures:
    """How far next-token distributions are from those of the uncompressed KV.

    ``kl_*`` are Kullback-Leibler divergences in nats, from the uncompressed distribution, over the
    full vocabulary. ``reference_ppl`` is the perplexity with uncompressed KV, ``ppl`` that with the
    codec's. ``ppl_change_low`` and ``ppl_change_high`` bound the change of perplexity, in
    percent, with 95 % confidence: paired differences, means of batches, Student's t.
    """

    positions: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_percent: float
    reference_ppl: float
    ppl: float
    ppl_change_percent: float
    ppl_change_low: float
    ppl_change_high: float


@dataclass(frozen=True, slots=True)
class Noise:
    """Signal to noise of K and V, in dB, a figure per layer; None where nothing was lost."""

    k: tuple[float | None, ...]
    v: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One codec. ``bits_per_value`` is its packed size where the engine's pages are bfloat16."""

    codec: str
    bits_per_value: float
    figures: Figures
    noise: Noise


@dataclass(frozen=True, slots=True)
class Skipped:
    """A codec that was not measured, and why."""

    codec: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """All of one measurement: ``windows`` of the same shape, each with a prefix that is no longer
    compared and a continuation that is.
    """

    model: str
    text: str
    mode: Mode
    windows: int
    prefix_tokens: int
    continuation_tokens: int
    results: tuple[Result, ...]
    skipped: tuple[Skipped, ...]
