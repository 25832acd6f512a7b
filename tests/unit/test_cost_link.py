"""A link is measured as a whole, whatever goes over it side by side."""

from __future__ import annotations

import pytest

from kvtier.cache.worth.link import Link

MB = 1_000_000


def test_transfers_side_by_side_are_one_measurement() -> None:
    link = Link()
    for _ in range(4):
        link.started(10.0, MB)
    for end in (10.9, 10.95, 11.0, 11.0):
        link.arrived(end, MB)
        link.ended(end, MB)
    assert link.idle
    assert link.kept() == [pytest.approx((4 * MB, 1.0))]
    assert link.seconds(8 * MB) == pytest.approx(2.0)


def test_what_is_queued_comes_first() -> None:
    link = Link()
    link.started(0.0, MB)
    link.arrived(1.0, MB)
    link.ended(1.0, MB)
    link.started(2.0, 3 * MB)
    assert link.seconds(MB) == pytest.approx(4.0)


def test_what_comes_now_says_more_than_what_came_before() -> None:
    link = Link()
    link.started(0.0, MB)
    link.arrived(1.0, MB)
    link.ended(1.0, MB)
    link.started(2.0, 4 * MB)
    link.arrived(12.0, MB)
    assert link.seconds(MB) == pytest.approx(10.0 * 4)


def test_a_link_that_never_falls_silent_is_measured_all_the_same() -> None:
    link = Link()
    link.started(0.0, MB)
    for second in range(1, 40):
        link.started(second, MB)
        link.arrived(second, MB)
        link.ended(second, MB)
    assert not link.idle
    assert link.kept()
    assert link.seconds(0) == pytest.approx(1.0, rel=0.1)


def test_silence_is_noticed_and_ends_with_what_comes() -> None:
    link = Link()
    link.started(0.0, MB)
    link.arrived(0.1, MB)
    link.ended(0.1, MB)
    assert not link.silent(99.0, 1.0), "nothing is owed"
    link.started(100.0, MB)
    assert not link.silent(100.1, 1.0)
    assert link.silent(100.3, 1.0)
    link.arrived(100.3, MB // 2)
    assert not link.silent(100.35, 1.0)


def test_of_an_unknown_link_the_callers_patience_is_what_it_should_take() -> None:
    link = Link()
    assert link.seconds(MB) is None
    link.started(0.0, MB)
    assert not link.silent(1.0, 1.0)
    assert link.silent(2.1, 1.0)


def test_what_never_came_is_not_counted() -> None:
    link = Link()
    link.started(0.0, 4 * MB)
    link.arrived(1.0, MB)
    link.ended(2.0, 4 * MB, 3 * MB)
    assert link.kept() == [pytest.approx((MB, 2.0))]
    link.started(3.0, MB)
    assert link.seconds(0) == pytest.approx(2.0)


def test_a_link_goes_on_from_what_was_kept_until_it_has_its_own() -> None:
    link = Link()
    link.adopt([(float(MB), 1.0)])
    assert link.seconds(2 * MB) == pytest.approx(2.0)
    link.adopt([(float(MB), 9.0)])
    assert link.seconds(2 * MB) == pytest.approx(2.0)
