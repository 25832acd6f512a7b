"""Chooses tokens for a batch of rows from their logits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import torch

from kvtier.errors import ConfigError
from kvtier_engine.sampling.draws import uniform
from kvtier_engine.sampling.filters import Filters, keep_likely
from kvtier_engine.sampling.penalties import LogitAdjuster
from kvtier_engine.types import SamplingParams, TokenLogprob


class Sampler:
    """Sampling state of up to ``max_rows`` requests in fixed rows, and the choice itself.

    A row's tokens depend on its own logits, settings, seed and number of generated tokens, never
    on what else is in the batch. A request without a seed gets one at random.

    Log-probabilities are those of the model itself: the log-softmax of its logits, before bias,
    penalties, temperature and filters.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._adjuster = LogitAdjuster(max_rows, vocab_size, device)
        self._sampling: dict[int, SamplingParams] = {}
        #: Per row: temperature, top_p, min_p.
        self._settings = torch.zeros(max_rows, 3, device=device)
        #: Per row: top_k, seed, number of generated tokens.
        self._counters = torch.zeros(max_rows, 3, dtype=torch.int64, device=device)

    def add(
        self, row: int, sampling: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
    ) -> None:
        """Take a row into use; with ``generated``, continue exactly where it stopped.

        An unseeded request that continues gets a new seed. Raises ``ConfigError``, and changes
        nothing, for a token outside the vocabulary or a setting that is not a number.
        """
        self._check(sampling, prompt, generated)
        self._adjuster.add(row, sampling, prompt, generated)
        self._sampling[row] = sampling
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        # Any integer is a seed; those with the same low 64 bits are the same seed.
        low = seed & ((1 << 64) - 1)
        seed = low - (1 << 64) if low >> 63 else low
        self._settings[row] = torch.tensor(
            (sampling.temperature, sampling.top_p, sampling.min_p), device=self._device
        )
        self._counters[row] = torch.tensor(
            (min(sampling.top_k, self._vocab_size), seed, len(generated)), device=self._device
        )

    def remove(self, row: int) -> None:
        """Forget a row."""
        del self._sampling[row]
        self._adjuster.remove(row)

    def sample(self, logits: torch.Tensor, rows: Sequence[int]) -> list[TokenLogprob]:
        """Choose one token per row from float32 ``logits [len(rows), vocab]`` and count it.

        Rows are distinct and in use. Greedy rows take the lowest id among equals.
        """
        adjusted = self._adjuster.apply(logits, rows)
        tokens = adjusted.argmax(dim=-1)
        drawn = [place for place, row in enumerate(rows) if self._sampling[row].temperature > 0.0]
        if drawn:
            tokens[drawn] = self._draw(adjusted[drawn], [rows[place] for place in drawn])
        self._adjuster.note(rows, tokens)
        self._counters[torch.tensor(rows, device=self._device), 2] += 1
        counts = [self._sampling[row].top_logprobs or 0 for row in rows]
        return token_logprobs(logits, tokens, counts)

    def _draw(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(rows, device=self._device)
        temperature, top_p, min_p = self._settings[index].unbind(1)
        top_k, seeds, counters = self._counters[index].unbind(1)
        # Below the maximum everything is finite or -inf, however small the temperature.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
        probabilities = scaled.softmax(dim=-1)
        sampling = [self._sampling[row] for row in rows]
        filters = Filters(
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            largest_top_k=min(max(s.top_k for s in sampling), self._vocab_size),
            any_top_p=any(s.top_p < 1.0 for s in sampling),
        )
        if filters.largest_top_k or filters.any_top_p or any(s.min_p > 0.0 for s in sampling):
            probabilities = keep_likely(probabilities, filters)
        return invert(probabilities, uniform(seeds, counters))

    def _check(
        self, sampling: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
    ) -> None:
        bias_ids = [index for index, _ in sampling.logit_bias]
        for name, ids in (("prompt", prompt), ("generated", generated), ("logit_bias", bias_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
                raise ConfigError(
                    f"{name}: token {min(ids) if min(ids) < 0 else max(ids)} is outside the "
                    f"vocabulary; allowed: 0 to {self._vocab_size - 1}"
                )
        values = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            **{f"logit_bias[{index}]": value for index, value in sampling.logit_bias},
        }
        for name, value in values.items():
            if not math.isfinite(value):
                raise ConfigError(f"{name} = {value!r}; allowed: a finite number")


def invert(probabilities: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the index at which each row's cumulated probability passes ``draws`` in [0, 1).

    ``probabilities [rows, vocab]`` need not sum to one; an index of zero probability is never
    returned.
    """
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1]
    # A draw next to one must not round up to the total, which no index passes.
    target = (draws * total).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target[:, None], right=True)[:, 0]


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top_counts: Sequence[int]
) -> list[TokenLogprob]:
    """Return log-softmax values of ``tokens`` and of each row's ``top_counts[i]`` best tokens."""
    normaliser = logits.logsumexp(dim=-1)
    chosen = (logits.gather(1, tokens[:, None])[:, 0] - normaliser).tolist()
    ids = tokens.tolist()
    widest = min(max(top_counts, default=0), logits.shape[1])
    if widest == 0:
        return [TokenLogprob(*pair) for pair in zip(ids, chosen, strict=True)]
    best = logits.topk(widest, dim=-1)
    best_values = (best.values - normaliser[:, None]).tolist()
    best_ids = best.indices.tolist()
    return [
        TokenLogprob(
            ids[place],
            chosen[place],
            tuple(zip(best_ids[place][:count], best_values[place][:count], strict=True)),
        )
        for place, count in enumerate(top_counts)
    ]
