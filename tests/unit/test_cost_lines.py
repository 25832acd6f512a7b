"""Lines through measurements: outliers count for nothing, changes are believed soon."""

from __future__ import annotations

import math

import pytest

from kvtier.cache.worth.lines import Line, Points, PrefillPoints
from kvtier.constants import COST_PAIRS_MAX, COST_POINTS_MAX

SIZES = (1e6, 4e6, 2e6, 8e6, 1e6, 6e6, 3e6, 5e6)


def fed(latency_s: float, rate: float, sizes: tuple[float, ...] = SIZES) -> Points:
    points = Points()
    for size in sizes:
        points.observe(size, latency_s + size / rate)
    return points


def test_latency_and_rate_are_told_apart() -> None:
    line = fed(0.02, 1e8).line
    assert line is not None
    assert line == pytest.approx(Line(0.02, 1e-8))


def test_nothing_is_known_before_the_first_point() -> None:
    assert Points().line is None
    assert PrefillPoints().line is None
    assert PrefillPoints().seconds(0, 256) is None


def test_points_of_one_size_are_a_line_through_the_origin() -> None:
    line = fed(0.02, 1e8, (1e6,) * 8).line
    assert line is not None
    assert line.intercept == 0
    assert line.at(1e6) == pytest.approx(0.03)


@pytest.mark.parametrize("factor", [1e3, 1e-3, 50.0, 1 / 50])
def test_an_outlier_counts_for_nothing(factor: float) -> None:
    points = fed(0.0, 1e8)
    points.observe(2e6, 0.02 * factor)
    points.observe(4e6, 0.04)
    line = points.line
    assert line is not None
    assert line.at(4e6) == pytest.approx(0.04, rel=0.1)


@pytest.mark.parametrize("factor", [1e3, 30.0, 3.0, 1.3, 0.75, 0.3, 1e-3])
def test_a_change_is_believed_within_eight_transfers(factor: float) -> None:
    points = fed(0.001, 1e8)
    for size in SIZES:
        points.observe(size, 0.001 + size / 1e8 * factor)
    line = points.line
    assert line is not None
    assert line.at(4e6) == pytest.approx(0.001 + 0.04 * factor, rel=0.02)
    assert len(points.kept()) <= COST_POINTS_MAX


def test_a_large_change_is_believed_after_two() -> None:
    for factor in (100.0, 0.01):
        points = fed(0.0, 1e8)
        points.observe(1e6, 0.01 * factor)
        points.observe(2e6, 0.02 * factor)
        line = points.line
        assert line is not None
        assert line.at(4e6) == pytest.approx(0.04 * factor, rel=0.1)


def test_prefill_grows_with_what_a_token_attends_to() -> None:
    prefill = PrefillPoints()
    for start in range(0, 8192, 512):
        prefill.observe(start, 512, 512 * 0.001 * (1 + 1e-4 * (start + 256)))
    assert prefill.growth == pytest.approx(1e-4, rel=0.01)
    expected = 4096 * 0.001 * (1 + 1e-4 * (1024 + 2048))
    assert prefill.seconds(1024, 5120) == pytest.approx(expected, rel=0.01)


def test_short_prompts_say_how_fast_it_is_now_and_not_how_it_grows() -> None:
    prefill = PrefillPoints()
    for start in range(0, 8192, 512):
        prefill.observe(start, 512, 512 * 0.001 * (1 + 1e-4 * (start + 256)))
    for _ in range(64):
        prefill.observe(0, 128, 128 * 0.002 * (1 + 1e-4 * 64))
    line = prefill.line
    assert line is not None
    assert line.slope / line.intercept == pytest.approx(1e-4, rel=0.01)
    assert line.intercept == pytest.approx(0.002, rel=0.01)


def test_a_few_long_prompts_among_many_short_ones_say_how_it_grows() -> None:
    prefill = PrefillPoints()
    for _ in range(14):
        prefill.observe(0, 256, 256 * 0.002 * (1 + 5e-4 * 128))
    for _ in range(5):
        for start in (0, 512):
            prefill.observe(start, 512, 512 * 0.002 * (1 + 5e-4 * (start + 256)))
    assert prefill.growth == pytest.approx(5e-4, rel=0.01)
    assert prefill.seconds(0, 256) == pytest.approx(256 * 0.002 * (1 + 5e-4 * 128), rel=0.01)


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_device_that_changes_its_speed_says_nothing_of_the_growth(factor: float) -> None:
    prefill = PrefillPoints()
    for prompt in range(12):
        speed = factor if prompt % 2 else 1.0
        for start in range(0, 2048, 512):
            prefill.observe(start, 512, speed * (1 + 5e-4 * (start + 256)))
    assert prefill.growth == pytest.approx(5e-4, rel=0.01)


def test_another_growth_is_learned_when_what_was_is_forgotten() -> None:
    """Of so many pairs the median is taken: a model that is served with another attention."""
    prefill = PrefillPoints()
    for growth, prompts in ((5e-4, COST_PAIRS_MAX), (1e-4, COST_PAIRS_MAX)):
        for _ in range(prompts):  # A pair each, and one with the prompt before.
            for start in (0, 512):
                prefill.observe(start, 512, 1 + growth * (start + 256))
        assert prefill.growth == pytest.approx(growth, rel=0.01)


def test_prompts_of_one_step_each_say_it_too() -> None:
    prefill = PrefillPoints()
    for tokens in (512, 2048, 1024, 4096, 512, 8192):
        prefill.observe(0, tokens, tokens * 0.002 * (1 + 5e-4 * tokens / 2))
    assert prefill.growth == pytest.approx(5e-4, rel=0.01)


def test_a_guess_gives_way_to_what_is_known() -> None:
    prefill = PrefillPoints()
    prefill.guess(64, 6.4)
    assert prefill.seconds(0, 10) == pytest.approx(1.0)
    assert not prefill.known
    prefill.observe(0, 512, 0.512)
    assert prefill.seconds(0, 10) == pytest.approx(0.01)
    prefill.guess(64, 6.4)
    assert prefill.seconds(0, 10) == pytest.approx(0.01)
    adopted = PrefillPoints()
    adopted.guess(64, 6.4)
    adopted.adopt(prefill.kept(), 0.0)
    assert adopted.seconds(0, 10) == pytest.approx(0.01)


def test_no_line_falls() -> None:
    points = Points()
    for size, seconds in ((1e6, 1.0), (2e6, 0.5), (4e6, 0.25), (8e6, 0.125)):
        points.observe(size, seconds)
    line = points.line
    assert line is not None
    assert line.slope > 0
    assert math.isfinite(line.at(1e9))
