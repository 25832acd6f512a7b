"""Which tokens may be drawn: min-p, top-k and top-p as one probability threshold per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Tokens looked at first for top-p: almost always the whole nucleus, and far cheaper than a sort.
PREFIX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Filters:
    """Settings of a batch, one element per row. Off: ``top_k`` 0, ``top_p`` 1, ``min_p`` 0.

    ``largest_top_k`` and the flags say on the host what the tensors hold, so that nothing has to
    be read back from a device.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    largest_top_k: int
    any_top_p: bool


def keep_likely(probabilities: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return ``probabilities [rows, vocab]`` with zeros for tokens that may not be drawn.

    Applied in vLLM's order: min-p (a share of the best token's probability), top-k, then top-p
    over what those two left. Tokens of equal probability are kept or dropped together, and the
    best token is always kept.
    """
    best = probabilities.amax(dim=-1, keepdim=True)
    threshold = best * filters.min_p[:, None]
    if filters.largest_top_k == 0 and not filters.any_top_p:
        return probabilities.where(probabilities >= threshold, 0.0)
    vocab = probabilities.shape[1]
    prefix = min(vocab, max(filters.largest_top_k, PREFIX_TOKENS if filters.any_top_p else 0))
    ranked = probabilities.topk(prefix, dim=-1).values
    nth = ranked.gather(1, (filters.top_k.clamp(1, prefix) - 1)[:, None])
    threshold = threshold.maximum(nth.where(filters.top_k[:, None] > 0, 0.0))
    if not filters.any_top_p:
        return probabilities.where(probabilities >= threshold, 0.0)
    left = probabilities.where(probabilities >= threshold, 0.0)
    mass = left.sum(dim=-1, keepdim=True, dtype=torch.float64) * filters.top_p[:, None].double()
    if prefix < vocab and not bool(_reaches(ranked, threshold, mass, filters.top_p).all()):
        ranked = probabilities.sort(dim=-1, descending=True).values
    return left.where(left >= _nucleus(ranked, threshold, mass, filters.top_p), 0.0)


def _cumulated(ranked: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return ranked.where(ranked >= threshold, 0.0).cumsum(dim=-1, dtype=torch.float64)


def _reaches(
    ranked: torch.Tensor, threshold: torch.Tensor, mass: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Tell per row whether the ranked prefix is enough to find the nucleus."""
    enough = _cumulated(ranked, threshold)[:, -1] >= mass[:, 0]
    return enough | (ranked[:, -1] < threshold[:, 0]) | (top_p >= 1.0)


def _nucleus(
    ranked: torch.Tensor, threshold: torch.Tensor, mass: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return per row the probability of the last token that top-p keeps.

    A token is kept when the tokens before it hold less than ``mass``.
    """
    before = _cumulated(ranked, threshold) - ranked
    count = ((before < mass) & (ranked >= threshold)).sum(dim=-1, keepdim=True).clamp(min=1)
    return ranked.gather(1, count - 1).where(top_p[:, None] < 1.0, threshold)
