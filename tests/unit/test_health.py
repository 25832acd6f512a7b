"""The breaker: closes off what fails, probes later and later, forgives at once."""

from __future__ import annotations

import pytest

from kvtier.constants import (
    HEALTH_BACKOFF_S_MAX,
    HEALTH_BACKOFF_S_MIN,
    SLOW_BYTES_PER_S,
    SLOW_S_MIN,
)
from kvtier.testing.clock import FakeClock
from kvtier.tiers.health import Health, is_slow


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def wait_s(health: Health, clock: FakeClock) -> float:
    """Move the clock until the medium may be asked; return how long that took."""
    waited = 0.0
    while not health.allows(clock.now()):
        clock.advance(0.125)
        waited += 0.125
        assert waited <= HEALTH_BACKOFF_S_MAX, "the back-off has a bound"
    return waited


def test_a_medium_is_well_until_it_fails(clock: FakeClock) -> None:
    health = Health()
    assert health.ok
    assert health.allows(clock.now())
    assert (health.word, health.detail) == ("", "")


def test_a_failure_closes_and_says_why(clock: FakeClock) -> None:
    health = Health()
    health.failure("full", "No space left", clock.now())
    assert not health.ok
    assert not health.allows(clock.now())
    assert (health.word, health.detail) == ("full", "No space left")


def test_it_closes_at_the_configured_count_in_a_row(clock: FakeClock) -> None:
    health = Health(3)
    for _ in range(2):
        health.failure("failing", "first", clock.now())
        assert health.ok
    health.success()
    for _ in range(2):
        health.failure("failing", "second", clock.now())
    assert health.allows(clock.now())
    health.failure("failing", "third", clock.now())
    assert not health.allows(clock.now())


def test_backoff_doubles_to_its_bound_and_success_forgives(clock: FakeClock) -> None:
    health = Health()
    waits: list[float] = []
    for _ in range(9):
        health.failure("failing", "", clock.now())
        waits.append(wait_s(health, clock))
        assert not health.ok, "a probe that is due is not a success"
    doubled = [min(HEALTH_BACKOFF_S_MIN * 2**n, HEALTH_BACKOFF_S_MAX) for n in range(9)]
    assert waits == doubled
    assert waits[-1] == HEALTH_BACKOFF_S_MAX
    health.success()
    assert health.ok
    assert (health.word, health.detail) == ("", "")
    health.failure("failing", "", clock.now())
    assert wait_s(health, clock) == HEALTH_BACKOFF_S_MIN


def test_failures_that_were_under_way_together_count_once(clock: FakeClock) -> None:
    """Eight reads that fail at the same moment are one outage, not eight probes in a row."""
    health = Health(3)
    for _ in range(8):
        health.failure("slow", "", clock.now())
    assert wait_s(health, clock) == HEALTH_BACKOFF_S_MIN
    health.failure("slow", "", clock.now())
    health.failure("slow", "", clock.now())
    assert wait_s(health, clock) == 2 * HEALTH_BACKOFF_S_MIN


@pytest.mark.parametrize(
    ("waited_s", "nbytes", "slow"),
    [
        (0.005, 0, False),
        (SLOW_S_MIN - 0.001, 1, False),
        (SLOW_S_MIN, 0, True),
        (SLOW_S_MIN, SLOW_BYTES_PER_S, False),
        (SLOW_S_MIN + 1.0, SLOW_BYTES_PER_S, True),
        (SLOW_S_MIN + 1.0, 2 * SLOW_BYTES_PER_S, False),
    ],
)
def test_only_a_wait_that_is_long_for_its_bytes_tells_of_a_medium(
    waited_s: float, nbytes: int, slow: bool
) -> None:
    assert is_slow(waited_s, nbytes) is slow
