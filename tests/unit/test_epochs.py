"""Epochs never fall, whatever a medium knew or forgot."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, strategies

from kvtier.cache.epochs import Epochs

A, B = b"a" * 32, b"b" * 32


def test_a_namespace_begins_at_zero_and_advances_by_itself() -> None:
    epochs = Epochs()
    assert (epochs.get(A), epochs.get(B)) == (0, 0)
    assert [epochs.advance(A) for _ in range(3)] == [1, 2, 3]
    assert (epochs.get(A), epochs.get(B)) == (3, 0)
    assert epochs.snapshot() == ({A: 3}, 0)


def test_what_a_medium_knew_counts_where_it_is_higher() -> None:
    epochs = Epochs()
    assert not epochs.merge({A: 5}, 0)
    assert epochs.get(A) == 5
    assert epochs.advance(A) == 6
    assert epochs.merge({A: 5}, 0), "the medium knows less"
    assert epochs.get(A) >= 6


def test_a_floor_lies_under_every_namespace() -> None:
    epochs = Epochs()
    epochs.advance(A)
    epochs.merge({A: 1}, 100)
    assert epochs.get(B) == 100
    assert epochs.get(A) >= 100
    assert epochs.advance(B) == 101
    assert epochs.snapshot()[1] == 100


def test_an_advance_in_the_dark_ends_above_what_the_medium_knew() -> None:
    """Raised to 1 here while the disk, unread, stood at 5: its 5 must not be current again."""
    epochs = Epochs()
    epochs.advance(A)
    assert epochs.unsaved
    assert epochs.merge({A: 5}, 0)
    assert epochs.get(A) == 6
    epochs.advance(B)
    epochs.merge({}, 50)
    assert epochs.get(B) == 51


def test_unsaved_until_a_medium_keeps_what_is_current() -> None:
    epochs = Epochs()
    unsaved = [epochs.unsaved]
    epochs.advance(A)
    older, _ = epochs.snapshot()
    epochs.advance(A)
    epochs.saved(older)
    unsaved.append(epochs.unsaved)
    current, _ = epochs.snapshot()
    epochs.saved(current)
    unsaved.append(epochs.unsaved)
    epochs.advance(B)
    epochs.saved(current)
    unsaved.append(epochs.unsaved)
    assert unsaved == [False, True, False, True]


def test_a_snapshot_does_not_change_later() -> None:
    epochs = Epochs()
    epochs.advance(A)
    snapshot, _ = epochs.snapshot()
    epochs.advance(A)
    assert snapshot == {A: 1}


STORED = strategies.dictionaries(strategies.sampled_from((A, B)), strategies.integers(1, 9))


@given(
    strategies.lists(
        strategies.sampled_from((A, B)) | strategies.tuples(STORED, strategies.integers(0, 9)),
        max_size=12,
    )
)
def test_epochs_never_fall_and_an_advance_is_new(steps: list[bytes | tuple[object, int]]) -> None:
    epochs = Epochs()
    seen: dict[bytes, set[int]] = {A: {0}, B: {0}}
    for step in steps:
        before = {key: epochs.get(key) for key in (A, B)}
        if isinstance(step, bytes):
            new = epochs.advance(step)
            assert new == epochs.get(step)
            assert new not in seen[step], "an epoch that was current before"
        else:
            stored, floor = step
            assert isinstance(stored, Mapping)
            epochs.merge(stored, floor)
            for key in (A, B):
                assert epochs.get(key) >= max(stored.get(key, 0), floor)
        for key in (A, B):
            assert epochs.get(key) >= before[key]
            seen[key].add(epochs.get(key))
