"""Figures from logits, against loops over Python's own floats."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
import torch

from kvtier_engine.quality.metrics import (
    BATCH_POSITIONS,
    LOSS_MAX,
    Positions,
    compare,
    decibels,
    half_interval,
    joined,
    student_975,
    summarise,
)

VOCAB = 37
COUNT = 5 * BATCH_POSITIONS + 3


def logits(seed: int, count: int = COUNT, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def targets(seed: int, count: int = COUNT) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def naive_logprobs(row: Sequence[float]) -> list[float]:
    top = max(row)
    total = math.fsum(math.exp(value - top) for value in row)
    return [value - top - math.log(total) for value in row]


def naive_kl(expected: Sequence[float], found: Sequence[float]) -> float:
    p, q = naive_logprobs(expected), naive_logprobs(found)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def naive_quantile(values: Sequence[float], share: float) -> float:
    """Between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def naive_loss(rows: torch.Tensor, chosen: torch.Tensor) -> list[float]:
    pairs = zip(rows.tolist(), chosen.tolist(), strict=True)
    return [-naive_logprobs(row)[token] for row, token in pairs]


def positions_of(change: Sequence[float]) -> Positions:
    """Positions whose losses differ by ``change``."""
    base = torch.full((len(change),), 2.0, dtype=torch.float64)
    return Positions(
        divergence=torch.zeros_like(base),
        agrees=torch.ones(len(change), dtype=torch.bool),
        reference_loss=base,
        loss=base + torch.tensor(change, dtype=torch.float64),
    )


def test_positions_are_those_of_the_oracle(seed: int) -> None:
    reference, found, chosen = logits(seed), logits(seed + 1), targets(seed)
    positions = compare(reference, found, chosen)
    pairs = list(zip(reference.tolist(), found.tolist(), strict=True))
    assert positions.divergence.tolist() == pytest.approx([naive_kl(a, b) for a, b in pairs])
    assert positions.agrees.tolist() == [a.index(max(a)) == b.index(max(b)) for a, b in pairs]
    assert positions.reference_loss.tolist() == pytest.approx(naive_loss(reference, chosen))
    assert positions.loss.tolist() == pytest.approx(naive_loss(found, chosen))


def test_kl_goes_from_the_reference_to_what_was_found() -> None:
    certain, even = torch.tensor([[20.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    chosen = torch.tensor([0])
    assert compare(certain, even, chosen).divergence.item() == pytest.approx(math.log(2), rel=1e-6)
    assert compare(even, certain, chosen).divergence.item() == pytest.approx(10 - math.log(2))


@pytest.mark.parametrize("spread", [0.0, 1.0, 1e4, 1e30])
def test_equal_logits_are_exactly_nothing_apart(spread: float) -> None:
    same = logits(3, spread=spread)
    figures = summarise(compare(same, same.clone(), targets(3)))
    assert (figures.kl_mean, figures.kl_p99, figures.kl_max) == (0.0, 0.0, 0.0)
    assert figures.top1_percent == 100.0
    changes = figures.ppl_change_percent, figures.ppl_change_low, figures.ppl_change_high
    assert changes == (0.0, 0.0, 0.0)


def test_a_hopeless_codec_has_figures_all_the_same() -> None:
    reference, found = logits(3), logits(4, spread=1e5)
    figures = summarise(compare(reference, found, targets(3)))
    assert figures.kl_mean > LOSS_MAX
    assert figures.ppl == math.exp(LOSS_MAX)
    assert math.isfinite(figures.ppl_change_high)


def test_a_difference_below_float32_still_counts() -> None:
    reference = torch.zeros(1, VOCAB)
    found = reference.clone()
    found[0, 0] = 1e-5
    divergence = compare(reference, found, torch.tensor([0])).divergence.item()
    assert divergence == pytest.approx(naive_kl(reference[0].tolist(), found[0].tolist()), rel=1e-3)
    assert 0.0 < divergence < 1e-10


def test_figures_are_those_of_the_oracle(seed: int) -> None:
    reference, chosen = logits(seed), targets(seed)
    found = reference + logits(seed + 1, spread=0.2)
    figures = summarise(compare(reference, found, chosen))
    kls = [naive_kl(a, b) for a, b in zip(reference.tolist(), found.tolist(), strict=True)]
    before, after = naive_loss(reference, chosen), naive_loss(found, chosen)
    assert figures.positions == COUNT
    assert figures.kl_mean == pytest.approx(statistics.fmean(kls))
    assert figures.kl_p99 == pytest.approx(naive_quantile(kls, 0.99))
    assert figures.kl_max == pytest.approx(max(kls))
    assert figures.reference_ppl == pytest.approx(math.exp(statistics.fmean(before)))
    assert figures.ppl == pytest.approx(math.exp(statistics.fmean(after)))
    ratio = figures.ppl / figures.reference_ppl
    assert figures.ppl_change_percent == pytest.approx(100 * (ratio - 1))
    assert figures.ppl_change_low < figures.ppl_change_percent < figures.ppl_change_high


def test_parts_are_joined_in_order(seed: int) -> None:
    reference, found, chosen = logits(seed), logits(seed + 1), targets(seed)
    whole = compare(reference, found, chosen)
    cuts = [slice(0, 7), slice(7, 50), slice(50, None)]
    parts = joined([compare(reference[cut], found[cut], chosen[cut]) for cut in cuts])
    assert torch.equal(parts.divergence, whole.divergence)
    assert torch.equal(parts.agrees, whole.agrees)
    assert torch.equal(parts.loss - parts.reference_loss, whole.loss - whole.reference_loss)


def test_the_interval_is_that_of_means_of_batches(rng: random.Random) -> None:
    change = [rng.gauss(0.01, 0.2) for _ in range(6 * BATCH_POSITIONS)]
    starts = range(0, len(change), BATCH_POSITIONS)
    means = [statistics.fmean(change[start : start + BATCH_POSITIONS]) for start in starts]
    # Five degrees of freedom: 2.571 in every table of Student's t.
    half = 2.571 * statistics.stdev(means) / math.sqrt(6)
    assert half_interval(torch.tensor(change, dtype=torch.float64)) == pytest.approx(half, rel=2e-3)
    figures = summarise(positions_of(change))
    mean = statistics.fmean(change)
    assert figures.ppl_change_low == pytest.approx(100 * math.expm1(mean - half), rel=1e-2)
    assert figures.ppl_change_high == pytest.approx(100 * math.expm1(mean + half), rel=1e-2)


def test_neighbours_that_move_together_widen_the_interval(rng: random.Random) -> None:
    single = [rng.gauss(0.0, 0.2) for _ in range(8 * BATCH_POSITIONS)]
    together = [single[index - index % BATCH_POSITIONS] for index in range(len(single))]
    apart = half_interval(torch.tensor(single, dtype=torch.float64))
    assert half_interval(torch.tensor(together, dtype=torch.float64)) > 2 * apart


def test_95_of_100_intervals_hold_the_truth(rng: random.Random) -> None:
    held = 0
    for _ in range(400):
        values = torch.tensor([rng.gauss(0.0, 1.0) for _ in range(64)], dtype=torch.float64)
        held += abs(values.mean().item()) <= half_interval(values)
    assert 0.91 <= held / 400 <= 0.985


@pytest.mark.parametrize(
    ("freedom", "expected"), [(3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student_975(freedom) == pytest.approx(expected, rel=0.01)


def test_decibels() -> None:
    signal = torch.tensor([100.0, 8.0, 5.0, 0.0], dtype=torch.float64)
    noise = torch.tensor([1.0, 8.0, 0.0, 0.0], dtype=torch.float64)
    assert decibels(signal, noise) == (20.0, 0.0, None, None)
