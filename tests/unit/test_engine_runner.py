"""The runner against the reference: any cut of the same work gives the same tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier_engine.kv_pool import KVPool
from kvtier_engine.runner import PROMPT_LOGITS_TOKENS, ModelRunner
from kvtier_engine.types import RowStep, SamplingParams, StepBatch, StepOutput, TokenLogprob
from kvtier_engine.weights.load import LoadedModel, kv_layout, load_model
from tests.lib.tiny_llama import (
    VOCAB_SIZE,
    reference_logits,
    reference_tokens,
    tiny_config,
    tiny_tensors,
    write_folder,
)

BLOCK = 4
GREEDY = SamplingParams(temperature=0.0)
CONFIG = tiny_config()
TENSORS = tiny_tensors(CONFIG)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> LoadedModel:
    folder = write_folder(tmp_path_factory.mktemp("tiny"), CONFIG, TENSORS)
    return load_model(str(folder), weights_id="tiny", device=request.param)


@dataclass
class Job:
    """A request as a scheduler sees it."""

    prompt: tuple[int, ...]
    blocks: tuple[int, ...]
    computed: int = 0
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.generated)


class Bench:
    """A runner with a pool of which every job takes scattered blocks."""

    def __init__(self, model: LoadedModel, rng: random.Random, max_rows: int = 8) -> None:
        layout = kv_layout(model.config, model.dtype, chunk_tokens=2 * BLOCK)
        device = str(model.model.device)
        self.pool = KVPool(layout, block_tokens=BLOCK, capacity_bytes=4 << 20, device=device)
        for index in range(len(layout.groups[0].layers)):
            self.pool.layer(index).fill_(float("nan"))
        self.runner = ModelRunner(model, self.pool, max_rows=max_rows)
        self._free = list(range(self.pool.block_count))
        rng.shuffle(self._free)

    def job(self, prompt: tuple[int, ...], tokens: int) -> Job:
        count = -(-tokens // BLOCK)
        blocks, self._free = self._free[:count], self._free[count:]
        return Job(prompt, tuple(blocks))

    def step(self, shares: dict[int, tuple[Job, int]]) -> StepOutput:
        """Feed each row's job the next ``n`` of its tokens; sample where they are the last."""
        rows = []
        for row, (job, count) in shares.items():
            fed = job.tokens()[job.computed : job.computed + count]
            is_last = job.computed + count == len(job.tokens())
            rows.append(RowStep(row, fed, job.computed, (job.blocks,), sample=is_last))
        output = self.runner.step(StepBatch(tuple(rows)))
        for (job, count), token in zip(shares.values(), output.sampled, strict=True):
            job.computed += count
            if token is not None:
                job.generated.append(token.token_id)
                job.logprobs.append(token)
        return output


def prompt_of(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


def test_greedy_tokens_equal_the_reference_in_any_batch(
    model: LoadedModel, rng: random.Random
) -> None:
    """Requests come and go; prompts are cut at random; decode and prefill share steps."""
    bench = Bench(model, rng)
    waiting = [prompt_of(rng, rng.randrange(1, 40)) for _ in range(10)]
    running: dict[int, Job] = {}
    done: list[Job] = []
    while waiting or running:
        if waiting and len(running) < 4 and rng.random() < 0.6:
            row = rng.choice([row for row in range(8) if row not in running])
            running[row] = bench.job(waiting.pop(), 60)
            bench.runner.add_row(row, running[row].prompt, GREEDY)
        shares = {
            row: (job, rng.randint(1, len(job.tokens()) - job.computed))
            for row, job in running.items()
            if rng.random() < 0.8
        }
        bench.step(shares)
        for row, job in list(running.items()):
            if len(job.generated) == 12:
                bench.runner.remove_row(row)
                done.append(running.pop(row))
    assert len(done) == 10
    for job in done:
        assert job.generated == reference_tokens(CONFIG, TENSORS, job.prompt, 12)


def test_logprobs_equal_the_reference(model: LoadedModel, rng: random.Random) -> None:
    bench = Bench(model, rng)
    job = bench.job(prompt_of(rng, 9), 30)
    bench.runner.add_row(0, job.prompt, SamplingParams(temperature=0.0, top_logprobs=3))
    for _ in range(8):
        bench.step({0: (job, len(job.tokens()) - job.computed)})
    logits = reference_logits(CONFIG, TENSORS, list(job.tokens()))
    for place, got in enumerate(job.logprobs):
        expected = logits[8 + place].log_softmax(0)
        best = expected.topk(3)
        assert [token for token, _ in got.top] == best.indices.tolist()
        assert [value for _, value in got.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert got.logprob == pytest.approx(expected.max().item(), abs=1e-3)


def test_b15_one_token_is_enough_after_a_full_hit(model: LoadedModel, rng: random.Random) -> None:
    for length in (4, 8, 12):
        bench = Bench(model, rng)
        job = bench.job(prompt_of(rng, length), 20)
        bench.runner.add_row(0, job.prompt, GREEDY)
        bench.step({0: (job, length)})
        warm = Job(job.prompt, job.blocks, computed=length - 1)
        bench.runner.add_row(1, job.prompt, GREEDY)
        bench.step({1: (warm, 1)})
        expected = reference_tokens(CONFIG, TENSORS, job.prompt, 1)
        assert job.generated == warm.generated == expected


@pytest.mark.parametrize("cuts", [(300,), (256, 44), (1, 298, 1), (100, 100, 100)])
def test_b153_prompt_logprobs_do_not_depend_on_the_cut(
    model: LoadedModel, rng: random.Random, cuts: tuple[int, ...]
) -> None:
    assert sum(cuts) > PROMPT_LOGITS_TOKENS
    bench = Bench(model, rng)
    job = bench.job(prompt_of(rng, 300), 304)
    bench.runner.add_row(0, job.prompt, SamplingParams(temperature=0.0, prompt_logprobs=2))
    other = bench.job(prompt_of(rng, 3), 304)
    bench.runner.add_row(1, other.prompt, GREEDY)
    got: list[TokenLogprob] = []
    for place, count in enumerate(cuts):
        beside = {1: (other, 1)} if place == 0 else {}
        output = bench.step({0: (job, count), **beside})
        got += output.prompt_logprobs[0]
        assert output.prompt_logprobs[1:] == ((),) * len(beside)
    assert [token.token_id for token in got] == list(job.prompt[1:])
    expected = reference_logits(CONFIG, TENSORS, list(job.prompt)).log_softmax(-1)
    for place, token in enumerate(got):
        row = expected[place]
        assert token.logprob == pytest.approx(row[job.prompt[place + 1]].item(), abs=2e-3)
        assert [value for _, value in token.top] == pytest.approx(
            row.topk(2).values.tolist(), abs=2e-3
        )
    # Decoding adds none.
    assert bench.step({0: (job, 1)}).prompt_logprobs == ((),)


def test_prompt_logprobs_of_zero_alternatives_are_still_given(
    model: LoadedModel, rng: random.Random
) -> None:
    bench = Bench(model, rng)
    job = bench.job(prompt_of(rng, 5), 8)
    bench.runner.add_row(0, job.prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    (scores,) = bench.step({0: (job, 5)}).prompt_logprobs
    assert len(scores) == 4
    assert {token.top for token in scores} == {()}


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_preempted_request_generates_the_same_tokens(
    model: LoadedModel, rng: random.Random, cut: int
) -> None:
    settings = SamplingParams(seed=11, temperature=0.9, top_p=0.95, frequency_penalty=0.4)
    prompt = prompt_of(rng, 7)

    def generate(bench: Bench, job: Job, row: int, count: int) -> None:
        bench.runner.add_row(row, prompt, settings, tuple(job.generated))
        while len(job.generated) < count:
            bench.step({row: (job, len(job.tokens()) - job.computed)})
        bench.runner.remove_row(row)

    bench = Bench(model, rng)
    whole = bench.job(prompt, 24)
    generate(bench, whole, 0, 12)
    first = bench.job(prompt, 24)
    generate(bench, first, 3, cut)
    # Its blocks are gone: everything is computed again, prompt and generated tokens alike.
    again = bench.job(prompt, 24)
    again.generated = list(first.generated)
    generate(bench, again, 5, 12)
    assert again.generated == whole.generated


@pytest.mark.parametrize("block_count", [1, 3, 64])
def test_a_warm_up_leaves_nothing_behind(
    model: LoadedModel, rng: random.Random, block_count: int
) -> None:
    layout = kv_layout(model.config, model.dtype)
    nbytes = KVPool(layout, block_tokens=16, capacity_bytes=2**24).bytes_per_block * block_count
    pool = KVPool(layout, block_tokens=16, capacity_bytes=nbytes, device=str(model.model.device))
    runner = ModelRunner(model, pool, max_rows=1)
    runner.warm_up()
    assert pool.layer(0)[:, :, :8].any(), "nothing was computed"
    prompt = prompt_of(rng, 9)
    runner.add_row(0, prompt, GREEDY)
    batch = StepBatch((RowStep(0, prompt, 0, ((0,),), sample=True),))
    (token,) = runner.step(batch).sampled
    assert token is not None
    assert [token.token_id] == reference_tokens(CONFIG, TENSORS, prompt, 1)


def test_an_empty_batch_is_an_empty_output(model: LoadedModel, rng: random.Random) -> None:
    assert Bench(model, rng).runner.step(StepBatch(())) == StepOutput((), ())


def test_b103_a_refused_request_leaves_its_row_free(model: LoadedModel, rng: random.Random) -> None:
    bench = Bench(model, rng)
    for prompt, settings in (
        ((), GREEDY),
        ((VOCAB_SIZE,), GREEDY),
        ((1,), SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))),
    ):
        with pytest.raises(ConfigError):
            bench.runner.add_row(0, prompt, settings)
    job = bench.job((1, 2, 3), 8)
    bench.runner.add_row(0, job.prompt, GREEDY)
    bench.step({0: (job, 3)})
    assert job.generated == reference_tokens(CONFIG, TENSORS, (1, 2, 3), 1)


def test_misuse_of_rows_is_a_bug(model: LoadedModel, rng: random.Random) -> None:
    bench = Bench(model, rng, max_rows=2)
    bench.runner.add_row(1, (1, 2), GREEDY)
    step = RowStep(1, (1, 2), 0, ((0,),), sample=True)
    with pytest.raises(AssertionError, match="row 1 is in use"):
        bench.runner.add_row(1, (1,), GREEDY)
    with pytest.raises(AssertionError, match="row 2 of 2"):
        bench.runner.add_row(2, (1,), GREEDY)
    with pytest.raises(AssertionError, match="row 0 is not in use"):
        bench.runner.remove_row(0)
    with pytest.raises(AssertionError, match="comes twice"):
        bench.runner.step(StepBatch((step, step)))
    with pytest.raises(AssertionError, match="row 0 is not in use"):
        bench.runner.step(StepBatch((RowStep(0, (1,), 0, ((0,),), sample=True),)))
    far = RowStep(1, (1,), 512, (tuple(range(129)),), sample=True)
    with pytest.raises(AssertionError, match="513 > 512"):
        bench.runner.step(StepBatch((far,)))
    bench.runner.remove_row(1)


def test_a_step_is_free_of_gradients(model: LoadedModel, rng: random.Random) -> None:
    bench = Bench(model, rng)
    job = bench.job((1, 2, 3), 8)
    bench.runner.add_row(0, job.prompt, GREEDY)
    bench.step({0: (job, 3)})
    assert torch.is_grad_enabled()
    assert not bench.pool.layer(0).requires_grad
