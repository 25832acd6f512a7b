"""Admissions: second touch, what is learned, what a budget lets through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.admission import learned as learned_module
from kvtier.admission import second_touch as second_touch_module
from kvtier.admission.budget import BURST_S, DAY_S, Budgeted, WriteBudget
from kvtier.admission.everything import Everything
from kvtier.admission.learned import Learned
from kvtier.admission.second_touch import SecondTouch
from kvtier.errors import ConfigError
from kvtier.interfaces import AdmissionPolicy
from kvtier.testing.admission_contract import CHUNK_BYTES, TierBelow, path_of
from kvtier.types import Features, Hint


def offers(admission: AdmissionPolicy, *names: object, now: float = 0.0) -> list[bool]:
    return [admission.offer(entry, now) for entry in path_of(*names)]


def test_second_touch_writes_a_prefix_at_its_second_access() -> None:
    admission = SecondTouch(100)
    assert offers(admission, "a", "b", "c") == [False] * 3
    assert offers(admission, "a", "b", "c", "d") == [True, True, True, False]
    assert offers(admission, "x") == [False]


def test_second_touch_refuses_a_child_whose_parent_is_refused() -> None:
    admission = SecondTouch(100)
    a, b = path_of("a", "b")
    assert not admission.offer(b, 0.0)
    assert not admission.offer(a, 1.0)
    assert not admission.offer(b, 1.0)
    assert [admission.offer(a, 2.0), admission.offer(b, 2.0)] == [True, True]


def test_second_touch_starts_again_for_what_left() -> None:
    admission = SecondTouch(100)
    (a,) = path_of("a")
    assert [admission.offer(a, now) for now in (0.0, 1.0)] == [False, True]
    admission.left(a.key, 2.0)
    assert [admission.offer(a, now) for now in (3.0, 4.0)] == [False, True]


def test_second_touch_knows_what_the_tier_held_all_along() -> None:
    """A touch says that a refused chunk is below, so its children may follow."""
    admission = SecondTouch(100)
    a, b = path_of("a", "b")
    offers(admission, "a", "b")
    admission.touch(a.key, 1.0, Features())
    assert admission.remembered_count == 1
    assert admission.offer(b, 1.0)


def test_first_offers_are_remembered_up_to_the_bytes_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission = SecondTouch(5 * CHUNK_BYTES)
    for name in range(9):
        offers(admission, name)
    assert admission.remembered_count == 5
    assert offers(admission, 4) == [True]
    assert offers(admission, 3) == [False]
    monkeypatch.setattr(second_touch_module, "FIRST_OFFERS_MAX", 3)
    offers(admission, "one more")
    assert admission.remembered_count == 3


def learned_share(
    below: TierBelow, path: Callable[[int], tuple[tuple[object, ...], Features]], start: int
) -> float:
    """Return the share of offers that were wanted while 2000 paths came in."""
    del below.answers[:]
    for number in range(start, start + 2000):
        names, features = path(number)
        below.access(path_of(*names, features=features), float(number))
    return sum(below.answers) / max(len(below.answers), 1)


def test_learned_writes_the_kind_that_comes_back() -> None:
    """Half of the prompts continue once more, 20 later; the hint tells them from the others."""

    def path(number: int) -> tuple[tuple[object, ...], Features]:
        if number % 2:
            return (("once", number),), Features(hint=Hint.DONE)
        session = number // 40 * 20 + number % 20
        return (("twice", session),), Features(hint=Hint.WILL_CONTINUE)

    below = TierBelow(Learned(100 * CHUNK_BYTES), 100)
    learned_share(below, path, 0)
    del below.answers[:]
    wanted = {Hint.DONE: 0, Hint.WILL_CONTINUE: 0}
    for number in range(2000, 3000):
        names, features = path(number)
        (entry,) = path_of(*names, features=features)
        before = len(below.answers)
        below.access([entry], float(number))
        wanted[features.hint] += sum(below.answers[before:])
    assert wanted[Hint.DONE] == 0
    assert wanted[Hint.WILL_CONTINUE] > 200


def test_learned_begins_by_writing_and_stops_where_nothing_comes_back() -> None:
    def path(number: int) -> tuple[tuple[object, ...], Features]:
        return ((number,), Features())

    below = TierBelow(Learned(100 * CHUNK_BYTES), 100)
    below.access(path_of("first"), -1.0)
    assert below.answers == [True]
    learned_share(below, path, 0)
    assert learned_share(below, path, 2000) == 0.0


def test_learned_finds_out_that_a_refused_kind_comes_back_now() -> None:
    """It learns from what it refused: exploration costs no write."""

    def once(number: int) -> tuple[tuple[object, ...], Features]:
        return ((number,), Features())

    def thrice(number: int) -> tuple[tuple[object, ...], Features]:
        return (("again", number // 30 * 10 + number % 10), Features())

    below = TierBelow(Learned(100 * CHUNK_BYTES), 100)
    for start in range(0, 6000, 2000):
        learned_share(below, once, start)
    assert learned_share(below, thrice, 6000) > 0.0
    assert learned_share(below, thrice, 8000) > 0.3


def test_learned_tries_a_tier_again_that_is_hardly_written_any_more() -> None:
    """After a flood chunks stayed for seconds; what comes back each minute is worth it now."""
    below = TierBelow(Learned(10 * CHUNK_BYTES), 10)
    for number in range(3000):
        below.access(path_of(("flood", number)), 1.0 * number)
    assert not any(below.answers[-1000:])
    path = path_of("often", 1, 2)
    for turn in range(200):
        now = 3000.0 + 60.0 * turn
        below.access(path_of(("once", turn)), now)
        below.access(path, now + 30.0)
    assert path[-1].key in below.held


def test_learned_bounds_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_module, "REFUSED_MIN", 50)
    monkeypatch.setattr(learned_module, "WATCHED_MAX", 200)
    admission = Learned(10**9)
    for number in range(1000):
        offers(admission, number, now=float(number))
    assert admission.watched_count <= 200 + 50
    assert admission.remembered_count <= 200
    below = TierBelow(Learned(10 * CHUNK_BYTES), 10)
    for number in range(1000):
        below.access(path_of(number), float(number))
    assert isinstance(below.admission, Learned)
    assert below.admission.remembered_count <= 50


def test_learned_remembers_less_of_what_it_refused_where_much_is_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learned_module, "REFUSED_MIN", 10)
    monkeypatch.setattr(learned_module, "WATCHED_MAX", 200)
    admission = Learned(10**9)
    below = [path_of(number)[0] for number in range(200)]
    assert all(admission.offer(entry, 0.0) for entry in below)
    admission.left(below[0].key, 1.0)
    for number, child in enumerate(path_of(0, *range(500))[1:]):
        assert not admission.offer(child, 2.0), "a child is refused as long as its parent is"
        assert admission.remembered_count == min(number + 2, 10)
    assert admission.watched_count <= 200 + 10


@pytest.mark.parametrize("bytes_per_day", [0, -1])
def test_a_budget_of_nothing_is_a_mistake(bytes_per_day: int) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        WriteBudget(bytes_per_day)


def test_a_budget_begins_with_a_burst_and_fills_evenly() -> None:
    budget = WriteBudget(144 * 1000)
    assert budget.take(1000, 5.0)
    assert not budget.take(1, 5.0)
    assert not budget.take(501, 5.0 + BURST_S / 2)
    assert budget.take(500, 5.0 + BURST_S / 2)
    assert budget.take(1000, 5.0 + 10 * BURST_S)
    assert not budget.take(1000, 5.0 + 10 * BURST_S)


def test_a_chunk_larger_than_the_burst_waits_for_its_bytes() -> None:
    budget = WriteBudget(144_000)
    assert budget.take(12_000, 0.0)
    assert not budget.take(1, 11 * BURST_S)
    assert budget.take(1, 11 * BURST_S + 4.0)
    assert not budget.take(144_001, 1000 * DAY_S)


def test_time_that_runs_back_gives_nothing() -> None:
    budget = WriteBudget(144_000)
    assert budget.take(1000, DAY_S)
    assert not budget.take(1000, 0.0)
    assert not budget.take(1000, DAY_S)


@given(
    bytes_per_day=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 30_000)), max_size=120),
)
def test_no_window_exceeds_the_budget(bytes_per_day: int, steps: list[tuple[int, float]]) -> None:
    budget = WriteBudget(bytes_per_day)
    now, granted = 0.0, list[tuple[float, int]]()
    for nbytes, wait_s in steps:
        now += wait_s
        if budget.take(nbytes, now):
            granted.append((now, nbytes))
    burst = max([bytes_per_day * BURST_S / DAY_S, *(nbytes for _, nbytes in granted)])
    for start, _ in granted:
        window = sum(nbytes for at, nbytes in granted if start <= at <= start + DAY_S)
        assert window <= bytes_per_day + burst + 1e-6


def test_a_refusal_by_the_budget_is_no_touch_lost() -> None:
    """What was wanted is written as soon as there is budget, without being judged anew."""
    admission = Budgeted(SecondTouch(1000), WriteBudget(144 * CHUNK_BYTES))
    assert offers(admission, "a", "b", now=0.0) == [False, False]
    assert offers(admission, "a", "b", now=1.0) == [True, False]
    assert admission.waiting_count == 1
    assert offers(admission, "a", "b", now=1.0 + BURST_S)[1] is True
    assert admission.waiting_count == 0


def test_a_child_waits_with_its_parent_and_takes_no_budget() -> None:
    admission = Budgeted(Everything(1000), WriteBudget(144 * CHUNK_BYTES))
    assert offers(admission, "x", now=0.0) == [True]
    a, b = path_of("a", "b")
    assert not admission.offer(a, 1.0)
    assert not admission.offer(b, 1.0 + BURST_S)
    assert admission.offer(a, 1.0 + BURST_S)


def test_what_waits_is_bounded_and_given_up_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.admission.budget.WAITING_MAX", 3)
    inner = SecondTouch(1000)
    admission = Budgeted(inner, WriteBudget(1))
    for name in range(5):
        offers(admission, name)
        offers(admission, name)
    assert admission.waiting_count == 3
    (oldest,) = path_of(0)
    assert not inner.offer(oldest, 1.0)
    admission.touch(path_of(4)[0].key, 2.0, Features())
    admission.left(path_of(3)[0].key, 2.0)
    assert admission.waiting_count == 1
