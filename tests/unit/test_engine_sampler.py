"""Choosing tokens: greedy, filters, penalties, bias, seeds and log-probabilities."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier_engine.sampling.draws import uniform
from kvtier_engine.sampling.filters import PREFIX_TOKENS, Filters, keep_likely
from kvtier_engine.sampling.sampler import Sampler, invert
from kvtier_engine.types import SamplingParams

VOCAB = 50
CPU = torch.device("cpu")


def sampler(vocab: int = VOCAB, rows: int = 8) -> Sampler:
    return Sampler(rows, vocab, CPU)


def draw(logits: torch.Tensor, count: int, **settings: Any) -> list[int]:
    """Sample ``count`` tokens in a row from the same logits."""
    chosen = sampler(logits.shape[-1])
    chosen.add(0, SamplingParams(seed=settings.pop("seed", 1), **settings), (0,), ())
    return [chosen.sample(logits[None], [0])[0].token_id for _ in range(count)]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    for first, second in ((3, 4), (0, 49), (17, 31)):
        logits = torch.zeros(VOCAB)
        logits[first] = logits[second] = 2.0
        assert draw(logits, 1, temperature=0.0) == [first]
    wide = torch.zeros(49_152)
    wide[[40_001, 1_234, 9_999]] = 1.0
    assert draw(wide, 1, temperature=0.0) == [1_234]


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -math.inf, 1.5])
    count = 4000
    tokens = draw(logits, count)
    for index, expected in enumerate(logits.softmax(0).tolist()):
        got = tokens.count(index) / count
        assert abs(got - expected) < 4 * math.sqrt(expected * (1 - expected) / count) + 1e-9


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.tensor([0.0, 1.0])
    for temperature in (0.25, 4.0):
        expected = (logits / temperature).softmax(0)[1].item()
        got = draw(logits, 3000, temperature=temperature).count(1) / 3000
        assert abs(got - expected) < 0.03


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.linspace(-40, 40, VOCAB)
    assert set(draw(logits, 20, temperature=1e-30)) == {VOCAB - 1}


def filters(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]), top_k, top_p < 1.0
    )


def kept(probabilities: list[float], **settings: Any) -> list[int]:
    row = torch.tensor([probabilities])
    return keep_likely(row, filters(**settings))[0].nonzero()[:, 0].tolist()


def test_top_k_keeps_the_k_best() -> None:
    probabilities = [0.1, 0.4, 0.05, 0.3, 0.15]
    assert kept(probabilities, top_k=1) == [1]
    assert kept(probabilities, top_k=3) == [1, 3, 4]
    assert kept(probabilities, top_k=5) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probabilities = [0.125, 0.5, 0.0625, 0.25, 0.0625]
    assert kept(probabilities, top_p=0.5) == [1]
    assert kept(probabilities, top_p=0.51) == [1, 3]
    assert kept(probabilities, top_p=0.75) == [1, 3]
    assert kept(probabilities, top_p=0.8) == [0, 1, 3]
    assert kept(probabilities, top_p=1e-9) == [1]
    assert kept(probabilities, top_p=0.0) == [1]


def test_min_p_is_a_share_of_the_best() -> None:
    probabilities = [0.125, 0.5, 0.0625, 0.25, 0.0625]
    assert kept(probabilities, min_p=0.5) == [1, 3]
    assert kept(probabilities, min_p=0.25) == [0, 1, 3]
    assert kept(probabilities, min_p=1.0) == [1]


def test_equal_probabilities_stand_or_fall_together() -> None:
    assert kept([0.25, 0.25, 0.25, 0.25], top_k=2) == [0, 1, 2, 3]
    assert kept([0.1, 0.4, 0.1, 0.4], top_p=0.3) == [1, 3]


def plain_filter(row: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, one step after the other."""
    left = {i: p for i, p in enumerate(row) if p >= min_p * max(row)}
    if top_k:
        nth = sorted(left.values(), reverse=True)[min(top_k, len(left)) - 1]
        left = {i: p for i, p in left.items() if p >= nth}
    if top_p < 1.0:
        total, before, last = sum(left.values()), 0.0, max(left.values())
        for p in sorted(left.values(), reverse=True):
            if before >= top_p * total:
                break
            last, before = p, before + p
        left = {i: p for i, p in left.items() if p >= last}
    return {i for i, p in left.items() if p > 0}


@given(
    weights=st.lists(st.integers(0, 64), min_size=1, max_size=40).filter(any),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.0625, 0.25, 0.5, 0.8125, 0.96875, 1.0]),
    min_p=st.sampled_from([0.0, 0.125, 0.5, 1.0]),
)
def test_filters_equal_their_definition(
    weights: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    # Multiples of 1/64 add up exactly, so that both sides agree at the very edge.
    row = [weight / 64 for weight in weights]
    top_k = min(top_k, len(row))
    expected = plain_filter(row, top_k, top_p, min_p)
    assert set(kept(row, top_k=top_k, top_p=top_p, min_p=min_p)) == expected


def test_a_nucleus_wider_than_the_prefix_is_found() -> None:
    count = 4 * PREFIX_TOKENS
    row = torch.linspace(1.0, 2.0, count).double()
    row = (row / row.sum()).float()
    for top_p in (0.01, 0.2, 0.9, 0.999):
        expected = plain_filter(row.tolist(), 0, top_p, 0.0)
        assert abs(len(kept(row.tolist(), top_p=top_p)) - len(expected)) <= 1


def test_rows_of_a_batch_are_filtered_each_by_its_own_settings() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().repeat(4, 1)
    chosen = sampler(4)
    settings = [{"top_k": 1}, {"top_p": 0.6}, {"min_p": 0.4}, {}]
    allowed = [{0}, {0, 1}, {0, 1}, {0, 1, 2, 3}]
    for row, extra in enumerate(settings):
        chosen.add(row, SamplingParams(seed=row, **extra), (0,), ())  # type: ignore[arg-type]
    seen: list[set[int]] = [set() for _ in settings]
    for _ in range(200):
        for row, token in enumerate(chosen.sample(logits, [0, 1, 2, 3])):
            seen[row].add(token.token_id)
    assert seen == allowed


def test_invert_never_returns_an_impossible_token() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    edge = 1.0 - 2.0**-53
    for value, expected in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.9, 3), (edge, 3)):
        assert invert(probabilities, torch.tensor([value], dtype=torch.float64)).item() == expected


def split_mix(seed: int, counter: int) -> float:
    """The same function on Python's integers."""
    mask, increment = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    state = (mix((seed + increment) & mask) + (counter + 1) * increment) & mask
    return (mix(state) >> 11) * 2.0**-53


@given(seed=st.integers(-(2**63), 2**63 - 1), counter=st.integers(0, 2**40))
def test_draws_equal_their_definition_on_integers(seed: int, counter: int) -> None:
    got = uniform(torch.tensor([seed]), torch.tensor([counter])).item()
    assert got == split_mix(seed & ((1 << 64) - 1), counter)
    assert 0.0 <= got < 1.0


def test_neighbouring_seeds_and_counters_draw_independently() -> None:
    seeds, counters = torch.arange(200), torch.arange(200)
    grid = uniform(seeds.repeat_interleave(200), counters.repeat(200)).view(200, 200)
    assert len(set(grid.flatten().tolist())) == 200 * 200
    for first, second in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        pairs = torch.stack((first.reshape(-1), second.reshape(-1)))
        assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.02
    assert abs(grid.mean().item() - 0.5) < 0.01


def test_a_seed_fixes_the_tokens_whatever_runs_beside(rng: random.Random) -> None:
    steps = [torch.randn(8, VOCAB) for _ in range(12)]
    alone = sampler()
    alone.add(3, SamplingParams(seed=99, top_p=0.9), (1,), ())
    expected = [alone.sample(step[5:6], [3])[0].token_id for step in steps]

    crowded = sampler()
    crowded.add(6, SamplingParams(seed=99, top_p=0.9), (1,), ())
    for row in range(6):
        crowded.add(row, SamplingParams(top_k=row, temperature=row / 2), (1,), ())
    got = []
    for step in steps:
        beside = rng.sample(range(6), rng.randrange(6))
        place = rng.randrange(len(beside) + 1)
        rows = [*beside[:place], 6, *beside[place:]]
        logits = torch.stack([step[5] if row == 6 else step[row % 5] for row in rows])
        got.append(crowded.sample(logits, rows)[place].token_id)
    assert got == expected


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 + 5, -(2**70)])
def test_any_integer_is_a_seed(seed: int) -> None:
    logits = torch.randn(VOCAB)
    assert draw(logits, 8, seed=seed) == draw(logits, 8, seed=seed)


def test_unseeded_requests_differ() -> None:
    chosen = sampler()
    for row in range(2):
        chosen.add(row, SamplingParams(), (0,), ())
    logits = torch.zeros(2, VOCAB)
    runs = [[token.token_id for token in chosen.sample(logits, [0, 1])] for _ in range(40)]
    assert [run[0] for run in runs] != [run[1] for run in runs]


@pytest.mark.parametrize("cut", [0, 1, 7, 12])
def test_a_resumed_request_continues_exactly(cut: int) -> None:
    settings = SamplingParams(
        seed=5, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.3
    )
    steps = [torch.randn(1, VOCAB) for _ in range(12)]
    whole = sampler()
    whole.add(2, settings, (4, 9), ())
    expected = [whole.sample(step, [2])[0].token_id for step in steps]

    first = sampler()
    first.add(1, settings, (4, 9), ())
    got = [first.sample(step, [1])[0].token_id for step in steps[:cut]]
    first.remove(1)
    first.add(0, settings, (4, 9), tuple(got))
    got += [first.sample(step, [0])[0].token_id for step in steps[cut:]]
    assert got == expected


@pytest.mark.parametrize(
    ("token", "adjusted"), [(0, 1.0), (1, -2.0), (2, 0.5 - 0.75), (3, 3.0 - 1.0)]
)
def test_presence_and_frequency_count_generated_tokens_only(token: int, adjusted: float) -> None:
    # A token that never was anywhere is the yardstick: the better of the two is chosen.
    for yardstick, expected in ((adjusted - 0.01, token), (adjusted + 0.01, 4)):
        logits = torch.tensor([[1.0, -2.0, 0.5, 3.0, yardstick]])
        away = tuple((other, -50.0) for other in range(4) if other != token)
        chosen = sampler(5)
        settings = SamplingParams(
            temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=away
        )
        chosen.add(0, settings, (0, 1), (2, 3, 3))
        assert chosen.sample(logits, [0])[0].token_id == expected


@pytest.mark.parametrize(
    ("logits", "best"),
    [
        ([4.0, 1.0, 1.0, 2.1], 3),  # 4.0 / 2 is below 2.1
        ([4.4, 1.0, 1.0, 2.1], 0),
        ([-4.0, -3.0, -2.0, -3.9], 3),  # -2.0 * 2 is below -3.9
        ([-4.0, -3.0, -1.9, -3.9], 2),
    ],
)
def test_repetition_divides_positive_and_multiplies_negative_logits(
    logits: list[float], best: int
) -> None:
    # Prompt 0 and 1, generated 2: all three are repetitions, token 3 is not.
    chosen = sampler(4)
    chosen.add(0, SamplingParams(temperature=0.0, repetition_penalty=2.0), (0, 1), (2,))
    assert chosen.sample(torch.tensor([logits]), [0])[0].token_id == best


def test_sampled_tokens_are_counted() -> None:
    chosen = sampler(4)
    chosen.add(0, SamplingParams(temperature=0.0, frequency_penalty=1.0), (0,), ())
    logits = torch.tensor([[0.0, 2.5, 2.0, -9.0]])
    tokens = [chosen.sample(logits, [0])[0].token_id for _ in range(7)]
    assert tokens == [1, 2, 1, 2, 1, 0, 2]


def test_bias_moves_its_tokens_and_no_others() -> None:
    logits = torch.zeros(VOCAB)
    bias = ((7, 5.0), (9, 6.0), (9, -2.0))
    assert draw(logits, 1, temperature=0.0, logit_bias=bias) == [7]
    logits[9] = 1.5  # the bias comes on top of it
    assert draw(logits, 1, temperature=0.0, logit_bias=bias) == [9]
    assert 7 not in draw(logits, 300, logit_bias=((7, -100.0),))


def test_a_freed_row_keeps_nothing() -> None:
    chosen = sampler(4)
    heavy = SamplingParams(temperature=0.0, presence_penalty=9.0, logit_bias=((3, 50.0),))
    chosen.add(0, heavy, (0, 1), (2,))
    assert chosen.sample(torch.tensor([[0.0, 1.0, 2.0, 0.0]]), [0])[0].token_id == 3
    chosen.remove(0)
    chosen.add(0, SamplingParams(temperature=0.0), (0,), ())
    assert chosen.sample(torch.tensor([[0.0, 1.0, 2.0, 0.0]]), [0])[0].token_id == 2
    chosen.remove(0)
    chosen.add(0, SamplingParams(temperature=0.0, presence_penalty=0.5), (0,), ())
    assert chosen.sample(torch.tensor([[0.0, 1.0, 2.0, 0.0]]), [0])[0].token_id == 2


def test_logprobs_are_those_of_the_model_itself() -> None:
    logits = torch.randn(2, VOCAB)
    expected = logits.double().log_softmax(-1)
    chosen = sampler()
    hot = SamplingParams(
        temperature=3.0, top_k=3, seed=1, logit_bias=((5, 9.0),), top_logprobs=4,
        repetition_penalty=1.5,
    )  # fmt: skip
    chosen.add(0, hot, (1, 2), ())
    chosen.add(1, SamplingParams(temperature=0.0), (1,), ())
    first, second = chosen.sample(logits, [0, 1])
    assert first.logprob == pytest.approx(expected[0, first.token_id].item(), abs=1e-5)
    best = expected[0].topk(4)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert second.logprob == pytest.approx(expected[1].max().item(), abs=1e-5)
    assert second.top == ()


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    chosen = sampler(4)
    chosen.add(0, SamplingParams(temperature=0.0, top_logprobs=20), (0,), ())
    (token,) = chosen.sample(torch.randn(1, 4), [0])
    assert len(token.top) == 4


@pytest.mark.parametrize(
    ("settings", "prompt", "message"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, (0,), "logit_bias: token 50"),
        ({"logit_bias": ((-1, 1.0),)}, (0,), "logit_bias: token -1"),
        ({"logit_bias": ((3, math.nan),)}, (0,), r"logit_bias\[3\] = nan"),
        ({"temperature": math.nan}, (0,), "temperature = nan"),
        ({"temperature": math.inf}, (0,), "temperature = inf"),
        ({"presence_penalty": math.inf}, (0,), "presence_penalty"),
        ({}, (0, VOCAB), "prompt: token 50"),
    ],
)
def test_b103_a_bad_setting_is_refused_and_changes_nothing(
    settings: dict[str, Any], prompt: tuple[int, ...], message: str
) -> None:
    chosen = sampler()
    with pytest.raises(ConfigError, match=message):
        chosen.add(0, SamplingParams(**settings), prompt, ())
    chosen.add(0, SamplingParams(temperature=0.0), (0,), ())
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 1.0
    assert chosen.sample(logits, [0])[0].token_id == 8
