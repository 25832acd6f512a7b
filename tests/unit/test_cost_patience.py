"""How long a load is waited for, and what that costs at the very most."""

from __future__ import annotations

import pytest

from kvtier.cache.worth.lines import PrefillPoints
from kvtier.cache.worth.patience import IN_VAIN, OVERTIME, Patience, Progress, head_start_s

TOKENS = 1000


def patience(
    *, head_start: float | None = None, worth: float = 1.0, due_s: float = 0.0
) -> Patience:
    """Computing takes a second; the load began at instant 100."""
    prefill = PrefillPoints()
    prefill.observe(0, TOKENS, 1.0)
    return Patience(100.0, 0, TOKENS, prefill, worth, head_start, due_s=due_s)


def given_up_at(
    rate: float, *, head_start: float | None = None, latency_s: float = 0.0, sections: int = 8
) -> float | None:
    """Return when a load of one chunk at so many loads a second is given up."""
    waits = patience(head_start=head_start)
    for tick in range(1, 3000):
        waited = tick / 1000
        came = int(max(0.0, waited - latency_s) * rate * sections + 1e-9) / sections
        if came >= 1:
            return None
        if waits.over(100.0 + waited, Progress(came, 0.0, 0)):
            return waited
    raise AssertionError("waited for ever")


def test_a_load_that_does_not_come_is_waited_for_nearly_as_long_as_computing_takes() -> None:
    assert given_up_at(0.0) == pytest.approx(IN_VAIN)


@pytest.mark.parametrize("late", [1.0, 1.03, 1.05])
def test_what_leaves_room_for_what_nobody_counts(late: float) -> None:
    """A guess of computing that is 5 % too high, and a hundredth of a second to notice."""
    assert (given_up_at(0.0) or 9.0) * late + 0.01 + 1.0 <= 2.1


@pytest.mark.parametrize("due_s", [0.9, 0.96, 1.0, 1.04])
def test_a_load_that_shows_nothing_before_its_end_is_waited_for_to_its_end(due_s: float) -> None:
    waits = patience(due_s=due_s)
    assert not waits.over(100.0 + max(due_s, 0.94), Progress(0.0, 0.0, 0))
    assert waits.over(100.0 + 1 + OVERTIME + 0.001, Progress(0.0, 0.0, 0))


def test_what_is_due_much_later_is_not_waited_for() -> None:
    assert patience(due_s=9.0).over(100.0 + 1 + OVERTIME + 0.001, Progress(0.0, 0.0, 0))


@pytest.mark.parametrize("rate", [100.0, 3.0, 1.5, 1.01, 0.97])
def test_a_load_that_is_worth_it_is_never_given_up(rate: float) -> None:
    assert given_up_at(rate) is None
    assert given_up_at(rate, latency_s=0.2 if rate > 1.3 else 0.0) is None


@pytest.mark.parametrize("rate", [0.8, 0.5, 0.2, 0.1])
def test_a_load_that_ends_too_late_is_given_up_when_that_shows(rate: float) -> None:
    at = given_up_at(rate)
    assert at is not None
    assert at <= min(2 / 8 / rate, 1.0) + 0.002


def test_nearly_there_is_worth_a_little_more() -> None:
    waits = patience()
    assert not waits.over(100.5, Progress(0.5, 0.0, 0))
    assert not waits.over(101.0, Progress(0.96, 0.0, 0))
    assert waits.over(100.0 + 1 + OVERTIME + 0.001, Progress(0.99, 0.0, 0))


def test_a_slow_link_has_a_head_start_only() -> None:
    start = head_start_s(1.0, 8)
    assert start <= 0.08
    assert given_up_at(0.0, head_start=start) == pytest.approx(start, abs=0.0011)
    assert given_up_at(0.3, head_start=start) == pytest.approx(start, abs=0.0011)


@pytest.mark.parametrize("rate", [1000.0, 10.0, 3.0, 2.1])
def test_a_link_that_has_become_fast_shows_it_in_the_head_start(rate: float) -> None:
    assert given_up_at(rate, head_start=head_start_s(1.0, 8)) is None


def test_what_is_complete_need_not_be_computed() -> None:
    waits = patience()
    waits.over(100.1, Progress(0.1, 0.0, 0))
    assert not waits.over(100.6, Progress(0.6, 0.0, 600))
    assert waits.over(100.95, Progress(0.75, 0.0, 900)), "a tenth is computed sooner"


def test_a_dear_gpu_waits_longer() -> None:
    assert not patience(worth=3.0).over(100.0 + 2.9 * IN_VAIN, Progress(0.0, 0.0, 0))
    assert patience(worth=3.0).over(100.0 + 3.0 * IN_VAIN + 1e-9, Progress(0.0, 0.0, 0))


def test_what_has_come_whole_is_never_given_up() -> None:
    assert not patience().over(200.0, Progress(1.0, 0.0, 0))


def test_those_beside_the_first_may_be_about_to_come() -> None:
    alone, beside = patience(), patience()
    for waits, coming in ((alone, 0.0), (beside, 3 / 32)):
        waits.over(100.1, Progress(1 / 32, coming, 0))
    assert alone.over(100.2, Progress(2 / 32, 0.0, 0))
    assert not beside.over(100.2, Progress(5 / 32, 3 / 32, 0))


def test_waiting_is_free_while_something_else_is_computed() -> None:
    prefill = PrefillPoints()
    prefill.observe(0, TOKENS, 1.0)
    waits = Patience(100.0, 0, TOKENS, prefill, free_s=0.5)
    assert not waits.over(100.4, Progress(0.01, 0.0, 0)), "hopeless, and free"
    assert waits.over(100.6, Progress(0.02, 0.0, 0))
    silent = Patience(100.0, 0, TOKENS, prefill, free_s=0.5)
    assert not silent.over(101.4, Progress(0.0, 0.0, 0))
    assert silent.over(101.5, Progress(0.0, 0.0, 0))
