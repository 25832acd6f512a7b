"""What the bundled model must say: transformers on the same weights, whole sequences, no cache.

The reference computes a finished sequence at once, which says for every position what the greedy
token is. Where a server's token differs, the reference's best two must be closer than ``TIE_GAP``:
sums in another order may turn such a pair around. Those positions are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from kvtier_engine.api.logprobs import token_name
from kvtier_engine.tokenizer import Tokenizer, load_tokenizer
from kvtier_engine.weights.load import DEFAULT_MODEL, model_folder

MODEL = DEFAULT_MODEL
TIE_GAP = 1e-3
TIE_SHARE_MAX = 0.005


class Continuation(Protocol):
    """What a server said after a prompt."""

    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def tokens(self) -> Sequence[int]: ...


@cache
def reference_model() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model_folder(MODEL), dtype=torch.float32).eval()


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(model_folder(MODEL))


@cache
def _ids_by_name() -> dict[str, int]:
    found = {token_name(tokenizer(), index): index for index in range(tokenizer().vocab_size)}
    assert len(found) == tokenizer().vocab_size, "two tokens have one name"
    return found


def token_ids(names: Sequence[str]) -> list[int]:
    """Return the tokens that the API names so in its ``logprobs``."""
    return [_ids_by_name()[name] for name in names]


def encode(text: str, count: int | None = None) -> tuple[int, ...]:
    """Return a text's tokens, the first ``count`` of them if that is given."""
    return tuple(tokenizer().encode(text)[:count])


@torch.inference_mode()
def reference_logits(ids: Sequence[int], first: int) -> torch.Tensor:
    """Logits from position ``first`` on, the whole sequence computed at once."""
    kept = len(ids) - first
    model = reference_model()
    logits: torch.Tensor = model(
        torch.tensor([list(ids)]), use_cache=False, logits_to_keep=kept
    ).logits[0]
    return logits


@dataclass(frozen=True)
class _Verified:
    """A continuation that is right, and at which of its positions it is a tie."""

    tokens: tuple[int, ...]
    ties: tuple[bool, ...]


_verified: dict[tuple[int, ...], list[_Verified]] = {}


@dataclass
class Tally:
    """Checks continuations and counts how many positions were ties."""

    positions: int = 0
    ties: int = 0

    def check(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Fail unless ``tokens`` is a greedy continuation; what is known costs nothing again."""
        known = _verified.setdefault(tuple(prompt), [])
        count = len(tokens)
        for each in known:
            if each.tokens[:count] == tuple(tokens):
                break
        else:
            each = _verify(tuple(prompt), tuple(tokens))
            known.append(each)
        self.positions += count
        self.ties += sum(each.ties[:count])

    def check_all(self, answers: Iterable[Continuation]) -> None:
        """Check the longest first: what begins like one that is right costs nothing."""
        for answer in sorted(answers, key=lambda each: len(each.tokens), reverse=True):
            self.check(answer.prompt, answer.tokens)

    def assert_few_ties(self) -> None:
        """Fail where ties are more than chance: each one alone was seen to be near enough."""
        assert self.positions, "nothing was checked"
        few = max(1, TIE_SHARE_MAX * self.positions)
        assert self.ties <= few, f"{self.ties} of {self.positions}"


def _verify(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> _Verified:
    logits = reference_logits((*prompt, *tokens[:-1]), len(prompt) - 1)
    best = logits.topk(2)
    ties = []
    for place, token in enumerate(tokens):
        is_tie = token != best.indices[place, 0].item()
        if is_tie:
            gap = (best.values[place, 0] - best.values[place, 1]).item()
            expected = best.indices[place].tolist()
            assert gap < TIE_GAP, (
                f"token {place} of {tokens} after {len(prompt)} tokens {prompt[:8]}...: "
                f"expected {expected[0]}, {gap:.4f} before {expected[1]}"
            )
            # A near tie explains the second best only.
            assert token == expected[1], f"token {place} of {tokens}: expected one of {expected}"
        ties.append(is_tie)
    return _Verified(tokens, tuple(ties))
