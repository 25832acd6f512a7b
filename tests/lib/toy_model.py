"""A tiny deterministic model whose next token depends on every KV byte and position of its context.

Per token, 16 floats of KV (2 layers x K, V x 4) that depend on the KV of all tokens before. One
wrong block, one stale token, one swapped pair changes everything generated after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from kvtier.errors import ConfigError
from kvtier.testing.pools import TorchPool
from kvtier.types import GroupKind, KVGroup, KVLayout, Part
from kvtier_engine.types import (
    RowStep,
    SamplingParams,
    StepBatch,
    StepOutput,
    TokenLogprob,
)

VOCAB = 97
LAYERS = 2
DIM = 4
PLANES = [(layer, part) for layer in range(LAYERS) for part in (Part.K, Part.V)]


def toy_layout(chunk_tokens: int = 4) -> KVLayout:
    """The toy's KV: one full group."""
    group = KVGroup(GroupKind.FULL, tuple(range(LAYERS)), 1, DIM, DIM, "float32")
    return KVLayout((group,), chunk_tokens=chunk_tokens)


def toy_pool(block_count: int, block_tokens: int = 4) -> TorchPool:
    """A poisoned pool for the toy."""
    return TorchPool(toy_layout().groups, block_count=block_count, block_tokens=block_tokens)


def kv_of(context: bytes, token: int, position: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """KV of one token: 16 floats, by the digest of all KV before it."""
    seed = context + token.to_bytes(4, "little") + position.to_bytes(4, "little")
    return np.frombuffer(blake2b(seed, digest_size=16).digest(), np.uint8).astype(np.float32)


def chosen(context: bytes) -> TokenLogprob:
    """The token that follows a context, and a made-up log-probability."""
    number = int.from_bytes(context[:8], "little")
    return TokenLogprob(number % VOCAB, -(number % 1000) / 1000)


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says after a prompt, computed alone and without a pool."""
    digest = blake2b(digest_size=16)
    for position, token in enumerate(prompt):
        digest.update(kv_of(digest.digest(), token, position).tobytes())
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(chosen(digest.digest()).token_id)
        digest.update(kv_of(digest.digest(), tokens[-1], len(tokens) - 1).tobytes())
    return tokens[len(prompt) :]


@dataclass
class ToyRunner:
    """Runs steps on the pool's real bytes, and checks what a runner may rely on."""

    pool: TorchPool
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)
    steps: list[StepBatch] = field(default_factory=list)
    #: Raised by the next step, after its KV was half written.
    failure: Exception | None = None
    #: Request prompts that ``add_row`` refuses.
    refused: set[tuple[int, ...]] = field(default_factory=set)

    #: Called as each step begins.
    on_step: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._planes = [
            self.pool.layer_view(0, layer, part).numpy()[:, :, 0] for layer, part in PLANES
        ]

    def add_row(
        self,
        row: int,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        generated: tuple[int, ...] = (),
    ) -> None:
        assert row not in self.rows, f"row {row} is in use"
        if prompt in self.refused:
            raise ConfigError("refused")
        self.rows[row] = prompt + generated
        if sampling.prompt_logprobs is not None:
            self.scored.add(row)

    def remove_row(self, row: int) -> None:
        del self.rows[row]
        self.scored.discard(row)

    def step(self, batch: StepBatch) -> StepOutput:
        assert batch.rows, "an empty step"
        self.on_step()
        assert len({row.row for row in batch.rows}) == len(batch.rows), "a row comes twice"
        self._check_writes(batch)
        self.steps.append(batch)
        outputs = []
        for row in batch.rows:
            outputs.append(self._row(row))
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
        return StepOutput(tuple(o[0] for o in outputs), tuple(o[1] for o in outputs))

    def _check_writes(self, batch: StepBatch) -> None:
        """No block that a row writes is in another row's table."""
        size = self.pool.block_tokens
        for row in batch.rows:
            (table,) = row.block_ids
            end = row.start + len(row.token_ids)
            assert len(table) * size >= end, "the table is too short"
            assert len(set(table)) == len(table), "a block comes twice"
            written = set(table[row.start // size : -(-end // size)])
            for other in batch.rows:
                assert other is row or not written & set(other.block_ids[0]), "a shared write"

    def _row(self, row: RowStep) -> tuple[TokenLogprob | None, tuple[TokenLogprob, ...]]:
        known = self.rows[row.row]
        (table,) = row.block_ids
        digest = blake2b(self.context(table, row.start), digest_size=16)
        scores = []
        for position, token in enumerate(row.token_ids, row.start):
            if position < len(known):
                assert known[position] == token, "a token that is not the request's"
            kv = kv_of(digest.digest(), token, position)
            block, offset = (
                table[position // self.pool.block_tokens],
                (position % self.pool.block_tokens),
            )
            for plane, values in zip(self._planes, kv.reshape(-1, DIM), strict=True):
                plane[block, offset] = values
            digest.update(kv.tobytes())
            if row.row in self.scored and position + 1 < len(known):
                score = int.from_bytes(digest.digest()[8:10], "little") / -1000
                scores.append(TokenLogprob(known[position + 1], score))
        return (chosen(digest.digest()) if row.sample else None), tuple(scores)

    def context(self, table: Sequence[int], count: int) -> bytes:
        """The KV bytes of the first ``count`` tokens in a block table."""
        blocks = list(table[: -(-count // self.pool.block_tokens)])
        planes = [plane[blocks].reshape(-1, DIM)[:count] for plane in self._planes]
        return np.concatenate(planes, axis=1).tobytes()
