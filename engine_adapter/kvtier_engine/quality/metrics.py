"""From logits to figures. Pure; double precision throughout.

KL and the change of perplexity are paired: both distributions of a position see the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvtier_engine.quality.results import Figures

#: Neighbouring positions see the same context, so their losses are averaged before an error is
#: estimated from the spread of the averages.
BATCH_POSITIONS: Final = 16
#: Positions whose logits over the whole vocabulary exist in double precision at one time. For the
#: usual vocabularies a block takes more than 32 MiB, which the C library gives back to the system;
#: smaller ones it keeps, and small objects among them keep them from being used again.
BLOCK_POSITIONS: Final = 128

#: Mean loss and change of loss, in nats, above which a perplexity is given as this one's.
LOSS_MAX: Final = 700.0

_NORMAL_975: Final = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Positions:
    """Figures of single positions, in the text's order; float64 ``[positions]`` but ``agrees``.

    ``divergence``: KL in nats; ``agrees``: whether both find the same token likeliest;
    ``reference_loss`` and ``loss``: minus the log-probability of the token that follows, in nats.
    """

    divergence: torch.Tensor
    agrees: torch.Tensor
    reference_loss: torch.Tensor
    loss: torch.Tensor


def compare(reference: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> Positions:
    """Compare logits ``[positions, vocab]`` with those of the reference, position by position.

    ``targets [positions]``, int64, are the tokens that follow.
    """
    expected = torch.log_softmax(reference.double(), dim=-1)
    found = torch.log_softmax(logits.double(), dim=-1)
    chosen = targets[:, None]
    return Positions(
        divergence=(expected.exp() * (expected - found)).sum(dim=-1).cpu(),
        agrees=(expected.argmax(dim=-1) == found.argmax(dim=-1)).cpu(),
        reference_loss=-expected.gather(1, chosen)[:, 0].cpu(),
        loss=-found.gather(1, chosen)[:, 0].cpu(),
    )


def joined(parts: Sequence[Positions]) -> Positions:
    """Put the positions of several parts one after the other."""
    return Positions(
        divergence=torch.cat([part.divergence for part in parts]),
        agrees=torch.cat([part.agrees for part in parts]),
        reference_loss=torch.cat([part.reference_loss for part in parts]),
        loss=torch.cat([part.loss for part in parts]),
    )


def summarise(positions: Positions) -> Figures:
    """Return the figures of at least ``4 * BATCH_POSITIONS`` positions."""
    change = positions.loss - positions.reference_loss
    mean = change.mean().item()
    error = half_interval(change)
    return Figures(
        positions=len(change),
        kl_mean=positions.divergence.mean().item(),
        kl_p99=positions.divergence.quantile(0.99).item(),
        kl_max=positions.divergence.max().item(),
        top1_percent=100.0 * positions.agrees.double().mean().item(),
        reference_ppl=_ppl(positions.reference_loss),
        ppl=_ppl(positions.loss),
        ppl_change_percent=_percent(mean),
        ppl_change_low=_percent(mean - error),
        ppl_change_high=_percent(mean + error),
    )


def _ppl(losses: torch.Tensor) -> float:
    return math.exp(min(losses.mean().item(), LOSS_MAX))


def _percent(change: float) -> float:
    return 100.0 * math.expm1(min(change, LOSS_MAX))


def half_interval(values: torch.Tensor) -> float:
    """Half the width of the 95 % interval of the mean of ``values``, by means of batches.

    A rest that fills no batch counts in the mean and not here.
    """
    batches = values[: len(values) // BATCH_POSITIONS * BATCH_POSITIONS].view(-1, BATCH_POSITIONS)
    count = len(batches)
    assert count >= 4, f"{len(values)} positions"
    error = batches.mean(dim=1).std().item() / math.sqrt(count)
    return student_975(count - 1) * error


def student_975(freedom: int) -> float:
    """97.5 % quantile of Student's t with ``freedom`` of at least 3 degrees, to 1 %.

    By expansion around the normal quantile (Abramowitz and Stegun 26.7.5).
    """
    z = _NORMAL_975
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def decibels(signal: torch.Tensor, noise: torch.Tensor) -> tuple[float | None, ...]:
    """Signal to noise from energies, element by element; None where there is no noise."""
    return tuple(
        10.0 * math.log10(energy / lost) if lost > 0.0 and energy > 0.0 else None
        for energy, lost in zip(signal.tolist(), noise.tolist(), strict=True)
    )
