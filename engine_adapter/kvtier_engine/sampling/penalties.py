"""Repetition, presence and frequency penalties, and logit bias, on fixed rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_engine.types import SamplingParams


class LogitAdjuster:
    """Keeps what each row's adjustments need and applies them to a batch of logits.

    Semantics are those of OpenAI and vLLM: presence and frequency count generated tokens,
    repetition (Keskar et al., 2019) looks at prompt and generated tokens. The token counts take
    ``5 * vocab`` bytes per row and exist only once a request with a penalty has come.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_rows, vocab_size)
        self._device = device
        #: Per row: repetition, presence, frequency.
        self._penalties = torch.zeros(max_rows, 3, device=device)
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._penalised: set[int] = set()
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(
        self, row: int, sampling: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
    ) -> None:
        """Take a row into use. Token ids must lie in the vocabulary."""
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._bias[row] = (
                torch.tensor(ids, dtype=torch.int64, device=self._device),
                torch.tensor(values, dtype=torch.float32, device=self._device),
            )
        penalties = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        if penalties == (1.0, 0.0, 0.0):
            return
        self._penalised.add(row)
        self._penalties[row] = torch.tensor(penalties, device=self._device)
        counts, seen = self._allocated()
        made = torch.tensor(generated, dtype=torch.int64, device=self._device)
        counts[row] = torch.bincount(made, minlength=self._shape[1])
        seen[row] = counts[row] > 0
        seen[row, torch.tensor(prompt, dtype=torch.int64, device=self._device)] = True

    def remove(self, row: int) -> None:
        """Forget a row."""
        self._penalised.discard(row)
        self._bias.pop(row, None)

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return adjusted logits ``[len(rows), vocab]``; the argument itself if nothing applies."""
        penalised = [place for place, row in enumerate(rows) if row in self._penalised]
        biased = [place for place, row in enumerate(rows) if row in self._bias]
        if not penalised and not biased:
            return logits
        logits = logits.clone()
        for place in biased:
            ids, values = self._bias[rows[place]]
            logits[place].index_add_(0, ids, values)
        if penalised:
            chosen = torch.tensor([rows[place] for place in penalised], device=self._device)
            logits[penalised] = self._penalise(logits[penalised], chosen)
        return logits

    def note(self, rows: Sequence[int], tokens: torch.Tensor) -> None:
        """Count the tokens that were just sampled, one per row."""
        places = [place for place, row in enumerate(rows) if row in self._penalised]
        if not places:
            return
        counts, seen = self._allocated()
        where = (
            torch.tensor([rows[place] for place in places], device=self._device),
            tokens[places],
        )
        counts.index_put_(where, torch.ones_like(where[1], dtype=counts.dtype), accumulate=True)
        seen[where] = True

    def _penalise(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        counts, seen = self._allocated()
        repetition, presence, frequency = self._penalties[rows].unsqueeze(-1).unbind(1)
        made = counts[rows]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen[rows], repeated, logits)
        return logits - frequency * made - presence * (made > 0)

    def _allocated(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        return self._counts, self._seen
