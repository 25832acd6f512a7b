"""Runs steps: from the scheduler's orders to sampled tokens."""

from __future__ import annotations

import time
from itertools import accumulate

import torch

from kvtier.errors import ConfigError
from kvtier_engine.attention.paged import plan_attention
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.sampling.sampler import Sampler, token_logprobs
from kvtier_engine.types import RowStep, SamplingParams, StepBatch, StepOutput, TokenLogprob
from kvtier_engine.weights.load import LoadedModel

#: Tokens whose logits over the whole vocabulary exist at one time, for prompt log-probabilities.
PROMPT_LOGITS_TOKENS = 256
#: Length of the prompt that warms the runner up.
WARM_UP_TOKENS = 64


class ModelRunner:
    """One model, one pool, and what must be remembered of each running request, in fixed rows.

    Used from one thread. ``step`` blocks until its tokens are known; the pool then holds the KV of
    every token that was fed. KV already in the pool before ``start`` is used as it is, wherever it
    came from.
    """

    def __init__(self, model: LoadedModel, pool: KVPool, *, max_rows: int) -> None:
        self._model = model.model
        self._vocab_size = model.config.vocab_size
        self._context_tokens = model.config.context_tokens
        self._pool = pool
        self._max_rows = max_rows
        self._sampler = Sampler(max_rows, self._vocab_size, self._model.device)
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._prompt_logprobs: dict[int, int] = {}

    def add_row(
        self,
        row: int,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        generated: tuple[int, ...] = (),
    ) -> None:
        """Bind a free row to a request.

        A preempted request comes back with the tokens that it has ``generated``: penalties and
        seeded draws continue as if it had never left. Raises ``ConfigError``, and leaves the row
        free, for settings or tokens that cannot be sampled with.
        """
        assert 0 <= row < self._max_rows, f"row {row} of {self._max_rows}"
        assert row not in self._prompts, f"row {row} is in use"
        if not prompt:
            raise ConfigError("the prompt has no tokens; at least one is needed")
        self._sampler.add(row, sampling, prompt, generated)
        self._prompts[row] = prompt
        if sampling.prompt_logprobs is not None:
            self._prompt_logprobs[row] = sampling.prompt_logprobs

    def remove_row(self, row: int) -> None:
        """Free a row. The request's blocks are the scheduler's to release."""
        assert row in self._prompts, f"row {row} is not in use"
        del self._prompts[row]
        self._prompt_logprobs.pop(row, None)
        self._sampler.remove(row)

    def warm_up(self) -> tuple[int, float]:
        """Compute a prompt and a token that nobody asked for, before anybody does.

        What torch and oneDNN set up at their first products costs as much as hundreds of tokens.
        The pool's first blocks are scribbled over: call this before they hold anything. Return how
        many tokens a prompt had and how many seconds it took, once all was set up; 0 for none.
        """
        size = self._pool.block_tokens
        count = min(WARM_UP_TOKENS, self._context_tokens, self._pool.block_count * size) - 1
        if count < 1:
            return 0, 0.0
        blocks = (tuple(range(-(-(count + 1) // size))),)
        prompt = (0,) * count
        self.add_row(0, prompt, SamplingParams(temperature=0.0))
        whole = StepBatch((RowStep(0, prompt, 0, blocks, sample=True),))
        self.step(whole)
        self.step(StepBatch((RowStep(0, (0,), count, blocks, sample=True),)))
        began = time.perf_counter()
        self.step(whole)
        seconds = time.perf_counter() - began
        self.remove_row(0)
        return count, seconds

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> StepOutput:
        """Compute one step. An empty batch is an empty output."""
        rows = batch.rows
        if not rows:
            return StepOutput((), ())
        self._check(rows)
        counts = [self._used_tokens(row) for row in rows]
        hidden = self._compute(rows, counts)
        ends = list(accumulate(counts))
        return StepOutput(self._sample(rows, hidden, ends), self._score_prompts(rows, hidden, ends))

    def _used_tokens(self, row: RowStep) -> int:
        """Return of how many tokens, the row's last ones, the model's output is looked at."""
        return len(row.token_ids) if row.row in self._prompt_logprobs else int(row.sample)

    def _compute(self, rows: tuple[RowStep, ...], counts: list[int]) -> torch.Tensor:
        """Return hidden states of each row's last ``counts[i]`` tokens, row after row."""
        plan = plan_attention(rows, self._pool)
        tokens = [token for row in rows for token in row.token_ids]
        positions = [row.start + offset for row in rows for offset in range(len(row.token_ids))]
        ends = accumulate(len(row.token_ids) for row in rows)
        used = [
            place
            for end, count in zip(ends, counts, strict=True)
            for place in range(end - count, end)
        ]
        return self._model.forward(
            self._indices(tokens),
            self._indices(positions),
            plan,
            self._pool,
            None if len(used) == len(tokens) else self._indices(used),
        )

    def _indices(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)

    def _sample(
        self, rows: tuple[RowStep, ...], hidden: torch.Tensor, ends: list[int]
    ) -> tuple[TokenLogprob | None, ...]:
        wanted = [place for place, row in enumerate(rows) if row.sample]
        sampled: list[TokenLogprob | None] = [None] * len(rows)
        if wanted:
            logits = self._model.logits(hidden[[ends[place] - 1 for place in wanted]])
            chosen = self._sampler.sample(logits, [rows[place].row for place in wanted])
            for place, token in zip(wanted, chosen, strict=True):
                sampled[place] = token
        return tuple(sampled)

    def _score_prompts(
        self, rows: tuple[RowStep, ...], hidden: torch.Tensor, ends: list[int]
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        return tuple(
            self._score_prompt(row, hidden[end - len(row.token_ids) : end])
            if row.row in self._prompt_logprobs
            else ()
            for row, end in zip(rows, ends, strict=True)
        )

    def _score_prompt(self, row: RowStep, hidden: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Score the prompt tokens that follow the ones just fed."""
        targets = self._prompts[row.row][row.start + 1 : row.start + 1 + len(row.token_ids)]
        scores: list[TokenLogprob] = []
        for first in range(0, len(targets), PROMPT_LOGITS_TOKENS):
            part = targets[first : first + PROMPT_LOGITS_TOKENS]
            logits = self._model.logits(hidden[first : first + len(part)])
            counts = [self._prompt_logprobs[row.row]] * len(part)
            scores += token_logprobs(logits, self._indices(list(part)), counts)
        return tuple(scores)

    def _check(self, rows: tuple[RowStep, ...]) -> None:
        assert len({row.row for row in rows}) == len(rows), "a row comes twice"
        for row in rows:
            assert row.row in self._prompts, f"row {row.row} is not in use"
            end = row.start + len(row.token_ids)
            assert end <= self._context_tokens, f"row {row.row}: {end} > {self._context_tokens}"
