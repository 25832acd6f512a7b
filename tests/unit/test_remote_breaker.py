"""The breaker of a remote: when it opens, who probes, when it closes, and waits between tries."""

from __future__ import annotations

import random

import pytest

from kvtier.constants import (
    BREAKER_FAILURES_MAX,
    HEALTH_BACKOFF_S_MAX,
    HEALTH_BACKOFF_S_MIN,
    REMOTE_RETRY_S,
    REMOTE_TRIES_MAX,
)
from kvtier.tiers.remote.breaker import Breaker, BreakerState, retry_delay_s


def opened(seed: int = 1) -> Breaker:
    breaker = Breaker(random.Random(seed))
    for _ in range(BREAKER_FAILURES_MAX):
        breaker.failure("failing", "refused", 0.0)
    return breaker


def probed_at(breaker: Breaker, now: float) -> float:
    """The instant from which on a probe is due, found by asking ever later."""
    while not breaker.take_probe(now):
        now += 0.01
    return now


def test_it_opens_at_the_last_of_several_failures_in_a_row() -> None:
    breaker = Breaker(random.Random(1))
    for _ in range(3):
        for _ in range(BREAKER_FAILURES_MAX - 1):
            breaker.failure("failing", "refused", 0.0)
        assert breaker.closed
        breaker.success()
    assert (breaker.word, breaker.detail) == ("", "")
    for _ in range(BREAKER_FAILURES_MAX):
        breaker.failure("slow", "no answer", 0.0)
    assert breaker.state is BreakerState.OPEN
    assert (breaker.word, breaker.detail) == ("slow", "no answer")


def test_one_probe_at_a_time_and_none_before_its_time() -> None:
    breaker = opened()
    assert not breaker.take_probe(HEALTH_BACKOFF_S_MIN / 2 - 0.01)
    assert breaker.take_probe(HEALTH_BACKOFF_S_MIN)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.take_probe(1e9)
    assert not breaker.closed


def test_a_probe_that_works_closes_it() -> None:
    breaker = opened()
    assert breaker.take_probe(HEALTH_BACKOFF_S_MIN)
    breaker.success(probe=True)
    assert breaker.closed
    assert breaker.word == ""
    assert not breaker.take_probe(1e9)


def test_what_had_been_asked_before_neither_closes_nor_lengthens() -> None:
    breaker = opened()
    due = probed_at(opened(), 0.0)
    for _ in range(50):
        breaker.failure("failing", "late news", 0.0)
        breaker.success()
    assert breaker.state is BreakerState.OPEN
    assert probed_at(breaker, 0.0) == due


def test_failing_probes_come_ever_more_rarely_and_never_stop() -> None:
    breaker, now, waits = opened(), 0.0, []
    for _ in range(12):
        at = probed_at(breaker, now)
        waits.append(at - now)
        breaker.failure("failing", "refused", at)
        now = at
    for number, wait in enumerate(waits):
        most = min(HEALTH_BACKOFF_S_MIN * 2**number, HEALTH_BACKOFF_S_MAX)
        assert most / 2 - 0.02 <= wait <= most + 0.02
    assert breaker.take_probe(now + HEALTH_BACKOFF_S_MAX)
    breaker.success(probe=True)
    for _ in range(BREAKER_FAILURES_MAX):
        breaker.failure("failing", "refused", now)
    assert probed_at(breaker, now) - now <= HEALTH_BACKOFF_S_MIN + 0.02, "all is forgiven"


def test_breakers_of_two_engines_do_not_come_back_in_step() -> None:
    dues = {round(probed_at(opened(seed), 0.0), 2) for seed in range(10)}
    assert len(dues) > 5


@pytest.mark.parametrize("tries", range(1, REMOTE_TRIES_MAX))
def test_waits_between_tries_are_drawn_below_a_bound_that_doubles(tries: int) -> None:
    draws = random.Random(3)
    waits = [retry_delay_s(tries, draws) for _ in range(200)]
    most = REMOTE_RETRY_S * 2 ** (tries - 1)
    assert 0 <= min(waits) < most / 4
    assert most * 3 / 4 < max(waits) <= most
