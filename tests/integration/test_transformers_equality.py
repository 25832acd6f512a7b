"""The bundled model, run by this engine, against the same weights in transformers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from bench.e2e import engine_cpu
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.runner import ModelRunner
from kvtier_engine.types import RowStep, SamplingParams, StepBatch, TokenLogprob
from kvtier_engine.weights.load import LoadedModel, bundled_gguf, kv_layout, load_model
from tests.lib.reference import (
    MODEL,
    TIE_GAP,
    TIE_SHARE_MAX,
    reference_logits,
    reference_model,
)

NEW_TOKENS = 32
TOLERANCE = 1e-3
BLOCK = 16

PROMPTS = [
    "The",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics state that",
    "def fibonacci(n):\n    ",
    '{"name": "Ada", "age": 36, "tags": ["math",',
    "SELECT customer, SUM(amount) FROM orders WHERE",
    "Translate to French: The weather is nice today.\nFrench:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 17 * 23?\nA:",
    "Zoë ordered a café au lait — and “one” croissant.",
    "Les sanglots longs des violons de l'automne",
    "日本の首都は",
    "😀😃😄 These are called",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "<html>\n<head><title>Test</title></head>\n<body>\n",
    "    \n\n\t  indentation",
    "To be, or not to be, that is the question: " * 6,
    "A list of fruits:\n- apple\n- banana\n- cherry\n" * 8,
]
CHATS = [
    "What is the capital of France?",
    "Write a haiku about a cache that never lies.",
]


@dataclass
class Job:
    """One prompt on its way through the runner."""

    prompt: tuple[int, ...]
    blocks: tuple[int, ...]
    computed: int = 0
    generated: list[TokenLogprob] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *(token.token_id for token in self.generated))


@cache
def loaded() -> LoadedModel:
    return load_model(MODEL)


def prompts() -> list[tuple[int, ...]]:
    tokenizer = loaded().tokenizer
    texts = [tokenizer.encode(text) for text in PROMPTS]
    for question in CHATS:
        chat = tokenizer.render_chat([{"role": "user", "content": question}])
        texts.append(tokenizer.encode(chat, add_special_tokens=False))
    return [tuple(ids) for ids in texts]


def assert_close(tokens: list[TokenLogprob], expected: torch.Tensor) -> None:
    """Compare each token's log-probability and those of its alternatives with a row's."""
    pairs = [[*token.top, (token.token_id, token.logprob)] for token in tokens]
    ids = torch.tensor([[index for index, _ in row] for row in pairs])
    values = torch.tensor([[value for _, value in row] for row in pairs], dtype=torch.float64)
    torch.testing.assert_close(values, expected.gather(1, ids), rtol=0, atol=TOLERANCE)


def generate(rng: random.Random, todo: list[tuple[int, ...]], max_rows: int) -> list[Job]:
    """Run all prompts to ``NEW_TOKENS`` tokens: prompts cut anywhere, blocks anywhere.

    Steps mix decode rows with pieces of prompts of 1 to 50 tokens; requests start while others
    run; most have scattered blocks, some consecutive ones.
    """
    model = loaded()
    layout = kv_layout(model.config, model.dtype)
    pool = KVPool(layout, block_tokens=BLOCK, capacity_bytes=400 << 20)
    for index in range(model.config.layer_count):
        pool.layer(index).fill_(float("nan"))
    runner = ModelRunner(model, pool, max_rows=max_rows)
    free = list(range(pool.block_count))
    jobs: list[Job] = []
    for number, prompt in enumerate(todo):
        count = -(-(len(prompt) + NEW_TOKENS) // BLOCK)
        taken = free[:count] if number % 4 == 0 else rng.sample(free, count)
        free = [block for block in free if block not in taken]
        jobs.append(Job(prompt, tuple(taken)))
    waiting, running = list(jobs), dict[int, Job]()
    settings = SamplingParams(temperature=0.0, top_logprobs=10)
    while waiting or running:
        for row in range(max_rows):
            if row not in running and waiting and rng.random() < 0.5:
                running[row] = waiting.pop()
                runner.add_row(row, running[row].prompt, settings)
        rows = []
        for row, job in running.items():
            count = min(rng.randint(1, 50), len(job.tokens) - job.computed)
            fed = job.tokens[job.computed : job.computed + count]
            is_last = job.computed + count == len(job.tokens)
            rows.append(RowStep(row, fed, job.computed, (job.blocks,), sample=is_last))
        output = runner.step(StepBatch(tuple(rows)))
        for step, token in zip(rows, output.sampled, strict=True):
            job = running[step.row]
            job.computed += len(step.token_ids)
            if token is not None:
                job.generated.append(token)
            if len(job.generated) == NEW_TOKENS:
                runner.remove_row(step.row)
                del running[step.row]
    return jobs


def test_greedy_tokens_and_logprobs_equal_transformers(rng: random.Random, scale: int) -> None:
    todo = prompts()
    assert len(todo) == 20
    ties = positions = 0
    for _ in range(scale):
        for job in generate(rng, todo, max_rows=12):
            logits = reference_logits(job.tokens[:-1], len(job.prompt) - 1)
            assert len(logits) == NEW_TOKENS
            logprobs = logits.double().log_softmax(-1)
            for got, row, scores in zip(job.generated, logits, logprobs, strict=True):
                positions += 1
                assert_close([got], scores[None])
                best = row.topk(2)
                if got.token_id != best.indices[0].item():
                    assert best.values[0] - best.values[1] < TIE_GAP, job.prompt
                    ties += 1
            if job.prompt == todo[18]:  # what both compute is also what the model should say
                answer = [token.token_id for token in job.generated]
                assert "capital of France is Paris" in loaded().tokenizer.decode(answer)
    assert positions == 20 * NEW_TOKENS * scale
    assert ties <= TIE_SHARE_MAX * positions, f"{ties} of {positions}"


@cache
def long_prompt() -> tuple[tuple[int, ...], torch.Tensor]:
    """Return a prompt of 400 tokens and its reference log-probabilities."""
    text = "A paged cache keeps keys and values of 16 tokens in a block. " * 60
    ids = tuple(loaded().tokenizer.encode(text)[:400])
    return ids, reference_logits(ids, 0).double().log_softmax(-1)


@pytest.mark.parametrize("history", [0, 1, 100, 383])
def test_b17_logprobs_equal_transformers_after_any_history(history: int) -> None:
    """A long prompt, of which the pool holds ``history`` tokens already."""
    model = loaded()
    ids, logprobs = long_prompt()
    expected = logprobs[history:]
    pool = KVPool(kv_layout(model.config, model.dtype), block_tokens=BLOCK, capacity_bytes=64 << 20)
    runner = ModelRunner(model, pool, max_rows=1)
    runner.add_row(0, ids, SamplingParams(temperature=0.0, prompt_logprobs=5))
    blocks = (tuple(range(25)),)
    if history:
        runner.step(StepBatch((RowStep(0, ids[:history], 0, blocks, sample=False),)))
    output = runner.step(StepBatch((RowStep(0, ids[history:], history, blocks, sample=True),)))
    (scores,) = output.prompt_logprobs
    assert len(scores) == len(ids) - history - 1
    assert_close(list(scores), expected[:-1])
    (sampled,) = output.sampled
    assert sampled is not None
    assert sampled.token_id == expected[-1].argmax().item()


def test_the_benchmark_runs_and_finds_equal_tokens() -> None:
    figures = engine_cpu.run(loaded(), reference_model(), engine_cpu.SMOKE)
    assert set(figures) == {"prefill", "decode_1", "decode_3"}
    for figure in figures.values():
        assert all(value > 0 for value in figure["ratio"].values())


def test_the_benchmark_times_nothing_when_tokens_differ() -> None:
    class Wrong(engine_cpu.Ours):
        def decode(self, tokens: list[list[int]], count: int) -> None:
            super().decode(tokens, count)
            tokens[-1][-1] += 1

    sizes = engine_cpu.SMOKE
    ours = Wrong(loaded(), sizes)
    prompts = engine_cpu.prompts_of(loaded(), sizes.context_tokens, sizes.concurrent)
    with pytest.raises(SystemExit, match="nothing was timed"):
        engine_cpu.gate(ours, engine_cpu.Transformers(reference_model()), prompts, sizes.new_tokens)


def test_tokenizer_equals_transformers() -> None:
    """Ids, text and chat prompts, against the tokenizer that transformers makes of the file.

    Transformers does not cut digits off first, as the model's own tokenizer does. That differs
    only for digits after two or more spaces, which these texts do not have.
    """
    from transformers import AutoTokenizer

    file = bundled_gguf()
    theirs: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = loaded().tokenizer
    texts = [
        *PROMPTS,
        "a1b22c333 3.14159 2024-01-01",
        "<|im_start|>user\nhi<|im_end|>",
        "👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪",
    ]
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        whole = ours.decode(ids, skip_special_tokens=False)
        assert whole == theirs.decode(ids, skip_special_tokens=False) == text
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.bos_id == theirs.bos_token_id
    system = {"role": "system", "content": "Be brief.\n"}
    user = {"role": "user", "content": "  Hi <b>  "}
    answer = {"role": "assistant", "content": "Hello."}
    for messages in ([user], [system, user], [system, user, answer, user]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            assert ours.render_chat(messages, add_generation_prompt=prompt) == expected
