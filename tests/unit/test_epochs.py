"""Epochs never fall, whatever a medium knew or forgot."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, strategies

from kvtier.cache.tenancy import epochs as epochs_module
from kvtier.cache.tenancy.epochs import Epochs
from kvtier.constants import EPOCHS_MAX

A, B = b"a" * 32, b"b" * 32


def test_a_namespace_begins_at_zero_and_advances_by_itself() -> None:
    epochs = Epochs()
    assert (epochs.get(A), epochs.get(B)) == (0, 0)
    assert [epochs.advance(A) for _ in range(3)] == [1, 2, 3]
    assert (epochs.get(A), epochs.get(B)) == (3, 0)
    assert (epochs.snapshot().epochs, epochs.snapshot().floor) == ({A: 3}, 0)


def test_what_a_medium_knew_counts_where_it_is_higher() -> None:
    epochs = Epochs()
    epochs.merge(0, {A: 5}, 0)
    assert not epochs.unsaved(0)
    assert epochs.get(A) == 5
    assert epochs.advance(A) == 6
    epochs.merge(0, {A: 5}, 0)
    assert epochs.unsaved(0), "the medium knows less"
    assert epochs.get(A) >= 6


def test_a_floor_lies_under_every_namespace() -> None:
    epochs = Epochs()
    epochs.advance(A)
    epochs.merge(0, {A: 1}, 100)
    assert epochs.get(B) == 100
    assert epochs.get(A) >= 100
    assert epochs.advance(B) == 101
    assert epochs.snapshot().floor == 100


def test_an_advance_in_the_dark_ends_above_what_the_medium_knew() -> None:
    """Raised to 1 here while the disk, unread, stood at 5: its 5 must not be current again."""
    epochs = Epochs()
    epochs.advance(A)
    assert epochs.unsaved(0)
    epochs.merge(0, {A: 5}, 0)
    assert epochs.unsaved(0)
    assert epochs.get(A) == 6
    epochs.advance(B)
    epochs.merge(0, {}, 50)
    assert epochs.get(B) == 51


def test_unsaved_until_a_medium_keeps_what_is_current() -> None:
    epochs = Epochs()
    unsaved = [epochs.unsaved(0)]
    epochs.advance(A)
    older = epochs.snapshot()
    epochs.advance(A)
    epochs.saved(0, older)
    unsaved.append(epochs.unsaved(0))
    current = epochs.snapshot()
    epochs.saved(0, current)
    unsaved.append(epochs.unsaved(0))
    epochs.advance(B)
    epochs.saved(0, current)
    unsaved.append(epochs.unsaved(0))
    assert unsaved == [False, True, False, True]


def test_each_of_several_media_keeps_all() -> None:
    epochs = Epochs(2)
    epochs.advance(A)
    assert [epochs.unsaved(keeper) for keeper in (0, 1)] == [True, True]
    epochs.saved(0, epochs.snapshot())
    assert [epochs.unsaved(keeper) for keeper in (0, 1)] == [False, True]
    epochs.saved(1, epochs.snapshot())
    assert [epochs.unsaved(keeper) for keeper in (0, 1)] == [False, False]


def test_what_one_medium_knew_alone_is_owed_to_the_others() -> None:
    """One of them was lost and is empty now, or was away while a namespace was invalidated."""
    epochs = Epochs(3)
    for keeper, stored in enumerate(({}, {A: 3}, {A: 3, B: 1})):
        epochs.merge(keeper, stored, 0)
    assert (epochs.get(A), epochs.get(B)) == (3, 1)
    assert [epochs.unsaved(keeper) for keeper in range(3)] == [True, True, False]


def test_a_floor_of_one_medium_is_owed_to_the_others() -> None:
    """The file of one was damaged: the floor that replaces it must reach the well ones."""
    epochs = Epochs(2)
    epochs.merge(0, {A: 2}, 0)
    epochs.merge(1, {}, 1000)
    assert epochs.get(A) == 1000
    assert [epochs.unsaved(keeper) for keeper in (0, 1)] == [True, False]


def test_an_advance_is_above_each_medium_that_comes_up_later() -> None:
    """Saved to the first medium, and yet not above what the second, read later, knew."""
    epochs = Epochs(2)
    epochs.merge(0, {A: 1}, 0)
    assert epochs.advance(A) == 2
    epochs.saved(0, epochs.snapshot())
    epochs.merge(1, {A: 7}, 0)
    assert epochs.get(A) == 8
    assert epochs.unsaved(0)
    epochs.saved(1, epochs.snapshot())
    epochs.merge(1, {A: 8}, 0)
    assert epochs.get(A) == 8, "what a medium keeps is no reason to advance again"


def test_a_snapshot_does_not_change_later() -> None:
    epochs = Epochs()
    epochs.advance(A)
    snapshot = epochs.snapshot()
    epochs.advance(A)
    assert snapshot.epochs == {A: 1}


def test_epochs_are_bounded_and_the_floor_rises_above_all_of_them() -> None:
    epochs = Epochs()
    digests = [number.to_bytes(32, "big") for number in range(EPOCHS_MAX + 1)]
    epochs.advance(A)
    epochs.advance(A)
    before = {A: 2, B: 0} | {digest: epochs.advance(digest) for digest in digests[:-2]}
    assert len(epochs.snapshot().epochs) == EPOCHS_MAX
    assert epochs.snapshot().floor == 0
    last = epochs.advance(digests[-2])
    assert epochs.snapshot().epochs == {}
    assert last == epochs.snapshot().floor == 3
    assert all(epochs.get(digest) > epoch for digest, epoch in before.items())
    assert epochs.unsaved(0)
    assert epochs.advance(A) == 4, "and it goes on from there"


def test_a_floor_that_rose_in_the_dark_ends_above_what_the_medium_knew() -> None:
    """The directory that was away knows higher epochs than those that the bound counted."""
    with patch.object(epochs_module, "EPOCHS_MAX", 2):
        epochs = Epochs(2)
        for digest in (A, B, b"c" * 32):
            epochs.advance(digest)
        epochs.saved(0, epochs.snapshot())
        assert epochs.snapshot().floor == 2
        epochs.merge(1, {A: 8, B: 1}, 0)
        assert epochs.get(A) > 8
        assert epochs.get(B) > 8
        assert [epochs.unsaved(keeper) for keeper in (0, 1)] == [True, True]


def test_what_a_floor_says_too_is_not_kept_beside_it() -> None:
    epochs = Epochs()
    epochs.advance(A)
    epochs.merge(0, {A: 1, B: 7}, 5)
    snapshot = epochs.snapshot()
    assert (snapshot.epochs, snapshot.floor) == ({A: 6, B: 7}, 5)
    epochs.merge(0, {A: 6, B: 7}, 9)
    snapshot = epochs.snapshot()
    # A was advanced here and has not been saved since.
    assert (snapshot.epochs, snapshot.floor) == ({A: 10}, 9)


STORED = strategies.dictionaries(strategies.sampled_from((A, B)), strategies.integers(1, 9))


KEEPERS = 2


@given(
    strategies.lists(
        strategies.sampled_from((A, B))
        | strategies.tuples(strategies.integers(0, KEEPERS - 1), STORED, strategies.integers(0, 9))
        | strategies.integers(0, KEEPERS - 1),
        max_size=12,
    )
)
def test_epochs_never_fall_and_an_advance_is_new(
    steps: list[bytes | tuple[int, dict[bytes, int], int] | int],
) -> None:
    """Steps are advances, what a medium knew, and saves to a medium."""
    for most in (1, EPOCHS_MAX):
        with patch.object(epochs_module, "EPOCHS_MAX", most):
            walk(steps)


def walk(steps: list[bytes | tuple[int, dict[bytes, int], int] | int]) -> None:
    epochs = Epochs(KEEPERS)
    seen: dict[bytes, set[int]] = {A: {0}, B: {0}}
    kept: list[tuple[dict[bytes, int], int]] = [({}, 0)] * KEEPERS
    for step in steps:
        before = {key: epochs.get(key) for key in (A, B)}
        if isinstance(step, bytes):
            new = epochs.advance(step)
            assert new == epochs.get(step)
            assert new not in seen[step], "an epoch that was current before"
        elif isinstance(step, int):
            snapshot = epochs.snapshot()
            epochs.saved(step, snapshot)
            kept[step] = (snapshot.epochs, snapshot.floor)
            assert not epochs.unsaved(step)
        else:
            keeper, stored, floor = step
            epochs.merge(keeper, stored, floor)
            kept[keeper] = (stored, floor)
            for key in (A, B):
                assert epochs.get(key) >= max(stored.get(key, 0), floor)
        for key in (A, B):
            assert epochs.get(key) >= before[key]
            seen[key].add(epochs.get(key))
        for keeper, (stored, floor) in enumerate(kept):
            if not epochs.unsaved(keeper):
                there = {key: max(stored.get(key, 0), floor) for key in (A, B)}
                assert there == {key: epochs.get(key) for key in (A, B)}, "it knows less"


# Remotes, which come after the directories


def test_what_was_raised_here_is_owed_until_the_remote_is_told() -> None:
    epochs = Epochs(1, remotes=2)
    epochs.advance(A)
    assert [epochs.owes(keeper) for keeper in (1, 2)] == [True, True]
    for keeper, owed in ((1, {A}), (2, set())):
        epochs.saved(0, epochs.snapshot())
        assert not epochs.unsaved(0)
        epochs.saved(keeper, epochs.snapshot())
        assert epochs.snapshot().owed == owed
        assert epochs.unsaved(0) is (not owed), "the directory keeps that it is owed no more"


def test_what_is_owed_ends_above_what_the_remote_knows_after_a_restart_too() -> None:
    before = Epochs(1, remotes=1)
    before.advance(A)
    file = before.snapshot()
    epochs = Epochs(1, remotes=1)
    epochs.owe(file.owed)
    epochs.merge(0, file.epochs, file.floor)
    epochs.merge(1, {A: 1}, 0)
    assert epochs.get(A) == 2
    epochs.saved(1, epochs.snapshot())
    epochs.merge(1, {A: 2}, 0)
    assert epochs.get(A) == 2, "and not again"


def test_without_a_remote_everything_is_owed_to_the_first_there_will_be() -> None:
    before = Epochs(1)
    before.advance(A)
    before.saved(0, before.snapshot())
    assert before.snapshot().owed == {A}


def test_a_floor_is_owed_as_well() -> None:
    with patch.object(epochs_module, "EPOCHS_MAX", 1):
        before = Epochs(1, remotes=1)
        before.advance(A)
        before.advance(B)
        file = before.snapshot()
        assert file.owed == {b""}
        epochs = Epochs(1, remotes=1)
        epochs.owe(file.owed)
        epochs.merge(0, file.epochs, file.floor)
        epochs.merge(1, {A: 9}, 0)
        assert epochs.get(A) > 9


def test_owing_changes_the_version_so_that_it_is_looked_at() -> None:
    epochs = Epochs(1, remotes=1)
    epochs.merge(0, {A: 1}, 0)
    before = epochs.version
    epochs.owe({A})
    assert epochs.version != before
    before = epochs.version
    epochs.owe({A})
    assert epochs.version == before
