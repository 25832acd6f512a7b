"""What the plug for vLLM counts and measures."""

from __future__ import annotations

import pytest

from kvtier.obs.stats import CacheStats, TierCounters, TierStats
from kvtier.types import MissReason, Tier
from kvtier_adapters.vllm.figures import SERIES, figures, labelled, merged, since
from kvtier_adapters.vllm.step_times import (
    DECODES_SHARE,
    PREFILL_TOKENS_MIN,
    STEPS_KEPT_MAX,
    STEPS_OPEN_MAX,
    Share,
    StepTimes,
)


def stats(hit_tokens: int, used_bytes: int) -> CacheStats:
    counters = TierCounters(hit_tokens=hit_tokens)
    counters.miss_tokens[MissReason.ABSENT] = 2 * hit_tokens
    counters.refused_chunks[MissReason.QUOTA] = 1
    tier = TierStats(Tier.DRAM, "ok", "", 100, used_bytes, 1, 0, 0, counters)
    return CacheStats((tier,), 0, 0, 0, 0)


def test_what_has_changed_since_the_last_look() -> None:
    first = figures(stats(5, 10), 0, off=False)
    second = figures(stats(7, 10), 1, off=False)
    assert since({}, first)["hit_tokens|dram"] == 5
    assert since(first, second) == {"hit_tokens|dram": 2, "miss_tokens|dram|absent": 4, "faults": 1}
    assert since(second, second) == {}


def test_what_may_shrink_is_told_as_it_is() -> None:
    first, second = figures(stats(5, 10), 0, off=False), figures(stats(5, 4), 0, off=True)
    assert since(first, second) == {"used_bytes|dram": 4, "switched_off": 1.0}


def test_intervals_add_up() -> None:
    both = merged({"hit_tokens|dram": 5, "used_bytes|dram": 9}, {"hit_tokens|dram": 2})
    assert both == {"hit_tokens|dram": 7, "used_bytes|dram": 9}
    assert merged(both, {"used_bytes|dram": 3})["used_bytes|dram"] == 3


def test_every_figure_is_a_known_series_with_its_labels() -> None:
    known = {series.name: len(series.labels) for series in SERIES}
    for name, labels, _ in labelled(figures(stats(1, 1), 0, off=False)):
        assert known[name] == len(labels)


def test_a_step_of_prompts_tells_what_computing_costs() -> None:
    times = StepTimes()
    times.began(10.0, [Share(100, 100), Share(0, 100)])
    prefill = times.ended(10.5)
    assert prefill is not None
    # 200 tokens that attend to 100 others on average: as those of one prompt from its start.
    assert (prefill.start_token, prefill.tokens, prefill.seconds) == (0.0, 200, 0.5)


@pytest.mark.parametrize(
    "shares",
    [
        [],
        [Share(50, 1)],
        [Share(0, PREFILL_TOKENS_MIN - 1)],
        [Share(0, 100)] + [Share(9, 1)] * (int(100 * DECODES_SHARE) + 1),
    ],
)
def test_other_steps_tell_nothing(shares: list[Share]) -> None:
    times = StepTimes()
    times.began(0.0, shares)
    assert times.ended(1.0) is None


def test_a_step_that_was_scheduled_early_counts_from_the_end_of_the_one_before() -> None:
    times = StepTimes()
    times.began(0.0, [Share(0, 100)])
    times.began(0.1, [Share(100, 100)])
    assert times.ended(1.0) is not None
    second = times.ended(3.0)
    assert second is not None
    assert second.seconds == 2.0


def test_steps_that_never_end_are_forgotten() -> None:
    times = StepTimes()
    for number in range(STEPS_OPEN_MAX + 3):
        times.began(float(number), [Share(0, 100)])
    ended = [times.ended(100.0) for _ in range(STEPS_OPEN_MAX + 3)]
    assert ended.count(None) == 3


def test_the_longest_of_the_last_steps() -> None:
    times = StepTimes()
    assert times.longest_s == 0.0
    for number, seconds in enumerate([9.0] + [1.0] * STEPS_KEPT_MAX):
        times.began(10.0 * number, [])
        times.ended(10.0 * number + seconds)
        assert times.longest_s == (9.0 if number < STEPS_KEPT_MAX else 1.0)
