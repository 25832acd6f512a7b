"""The cold table against plain lists: who leaves next, what is found, what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies

from kvtier.testing.policy_machine import chunk_key
from kvtier.tiers.disk.cold import ColdTable
from kvtier.tiers.disk.rows import NO_PARENT, KeyIndex, Row, Rows, key_words
from kvtier.types import ChunkKey
from tests.lib.index_model import KINDS, make_row, state_of


def nobody(_: ChunkKey) -> bool:
    return False


def table_of(*rows: Row, known: Callable[[ChunkKey], bool] = nobody) -> ColdTable:
    return ColdTable([(0, Rows.of(rows))], known)


def popped(table: ColdTable) -> Iterator[tuple[int, Row]]:
    while found := table.pop_coldest():
        yield found


def names(rows: Iterator[tuple[int, Row]]) -> list[int]:
    """Positions serve as names."""
    return [row.position for _, row in rows]


@dataclass
class Plain:
    """Rows by directory in order of last use; every answer is a walk over all of them."""

    rows: list[tuple[int, Row]]
    known: frozenset[ChunkKey]
    lost: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lost = [row for _, row in self.rows if not self.reachable(row)]

    def reachable(self, row: Row) -> bool:
        by_key = {each.key: each for _, each in self.rows}
        for _ in self.rows:
            if row.parent is None or row.parent in by_key:
                if row.parent is None:
                    return True
                row = by_key[row.parent]
            else:
                return row.parent in self.known
        return False

    def take(self, key: ChunkKey) -> tuple[int, Row] | None:
        found = next((pair for pair in self.rows if pair[1].key == key), None)
        if found is not None:
            self.rows.remove(found)
        return found

    def may_pop(self) -> list[tuple[int, Row]]:
        """What may leave next: any lost row without a lost child here, else the oldest leaf."""
        parents = {row.parent for _, row in self.rows}
        here = [pair for pair in self.rows if pair[1].key not in parents]
        lost = [pair for pair in here if pair[1] in self.lost]
        return lost or here[:1]


@strategies.composite
def forests(draw: strategies.DrawFn) -> tuple[list[tuple[int, Row]], frozenset[ChunkKey]]:
    """Rows whose parents come from any earlier number: no rings, but holes, in any order."""
    count = draw(strategies.integers(0, 30))
    present = draw(strategies.lists(strategies.integers(0, 40), unique=True, max_size=count))
    rows: list[tuple[int, Row]] = []
    for name in present:
        above = draw(strategies.none() | strategies.integers(0, name - 1)) if name else None
        directory = draw(strategies.integers(0, 2))
        used_ms = draw(strategies.integers(0, 5))
        kind = draw(strategies.sampled_from(KINDS))
        rows.append((directory, make_row(name, above, used_ms=used_ms, kind=kind, position=name)))
    hot = draw(strategies.frozensets(strategies.integers(0, 40), max_size=10))
    return rows, frozenset(chunk_key(name) for name in hot - set(present))


def tables(rows: list[tuple[int, Row]]) -> list[tuple[int, Rows]]:
    """Cut rows into directories, each in order of last use."""
    return [
        (number, Rows.of(sorted((r for d, r in rows if d == number), key=lambda r: r.used_ms)))
        for number in range(3)
    ]


@given(
    forest=forests(),
    steps=strategies.lists(strategies.none() | strategies.integers(0, 40), max_size=60),
)
def test_any_forest_leaves_as_the_plain_lists_say(
    forest: tuple[list[tuple[int, Row]], frozenset[ChunkKey]],
    steps: list[int | None],
) -> None:
    """A step takes a name or, without one, pops; then the rest is popped to the end."""
    rows, known = forest
    # The table merges stably: by last use, then by directory.
    plain = Plain(sorted(rows, key=lambda pair: (pair[1].used_ms, pair[0])), known)
    table = ColdTable(tables(plain.rows), known.__contains__)
    for step in [*steps, *[None] * (len(rows) + 1)]:
        if step is None:
            allowed = plain.may_pop()
            found = table.pop_coldest()
            assert found in allowed if allowed else found is None
            if found is not None:
                plain.rows.remove(found)
        else:
            assert table.take(chunk_key(step)) == plain.take(chunk_key(step))
        check(table, plain)
    assert len(table) == 0
    assert all(not len(part) for _, part in table.parts())


def check(table: ColdTable, plain: Plain) -> None:
    assert list(table) == plain.rows
    assert len(table) == len(plain.rows)
    for number in range(3):
        held = sum(row.nbytes for directory, row in plain.rows if directory == number)
        assert table.held_bytes(number) == held
    there = {row.key: (directory, row) for directory, row in plain.rows}
    for name in range(41):
        key = chunk_key(name)
        assert (key in table) == (key in there)
        directory, row = there.get(key, (0, None))
        assert table.kind(key) == (None if row is None else (directory, row.kind))
        assert table.parent(key) == (None if row is None else row.parent)


@given(forest=forests(), taken=strategies.lists(strategies.integers(0, 40), max_size=10))
def test_a_table_made_from_what_is_left_holds_the_same(
    forest: tuple[list[tuple[int, Row]], frozenset[ChunkKey]], taken: list[int]
) -> None:
    rows, known = forest
    table = ColdTable(tables(rows), known.__contains__)
    for name in taken:
        table.take(chunk_key(name))
    again = ColdTable(table.parts(), known.__contains__)
    assert list(again) == list(table)
    assert [again.held_bytes(n) for n in range(3)] == [table.held_bytes(n) for n in range(3)]


def test_an_empty_table_answers() -> None:
    for table in (ColdTable([], nobody), table_of()):
        assert len(table) == 0
        assert chunk_key(1) not in table
        assert table.kind(chunk_key(1)) is None
        assert table.take(chunk_key(1)) is None
        assert table.pop_coldest() is None
        assert table.held_bytes(7) == 0


def test_a_parent_waits_for_the_last_of_its_children() -> None:
    rows = [make_row(0, position=0), make_row(1, 0, position=1), make_row(2, 0, position=2)]
    assert names(popped(table_of(*rows))) == [1, 2, 0]
    table = table_of(*rows)
    table.take(chunk_key(1))
    assert names(popped(table)) == [2, 0]


def test_a_parent_that_was_passed_leaves_before_what_was_used_after_it() -> None:
    rows = [make_row(0, position=0), make_row(1, 0, position=1), make_row(9, position=9)]
    assert names(popped(table_of(*rows))) == [1, 0, 9]


def test_what_cannot_be_reached_leaves_first_the_deepest_before_all() -> None:
    rows = [
        make_row(0, position=0),
        make_row(5, 4, position=5),
        make_row(7, 6, position=7),
        make_row(6, 5, position=6),
    ]
    assert names(popped(table_of(*rows))) == [7, 6, 5, 0]
    hot = table_of(*rows, known=lambda key: key == chunk_key(4))
    assert names(popped(hot)) == [0, 7, 6, 5]


def test_rings_of_forged_parents_leave_first_and_whole() -> None:
    ring = [make_row(n, (n + 1) % 3, position=n) for n in range(3)]
    below = make_row(5, 0, position=5)
    itself = make_row(6, 6, position=6)
    sound = make_row(9, position=9)
    left = names(popped(table_of(sound, *ring, below, itself)))
    assert sorted(left[:-1]) == [0, 1, 2, 5, 6]
    assert left[-1] == 9


def test_of_two_rows_with_one_key_the_newer_counts_and_the_other_leaves_first() -> None:
    old = make_row(0, position=0, used_ms=1, kind=KINDS[1])
    new = make_row(0, position=1, used_ms=2)
    child = make_row(2, 0, position=2, used_ms=0)
    table = ColdTable([(0, Rows.of([child, new])), (1, Rows.of([old]))], nobody)
    assert table.kind(chunk_key(0)) == (0, KINDS[0])
    assert table.take(chunk_key(0)) == (0, new)
    assert chunk_key(0) not in table
    assert table.take(chunk_key(0)) is None
    assert table.held_bytes(1) == old.nbytes
    assert list(popped(table)) == [(1, old), (0, child)]
    assert table.held_bytes(1) == 0


@pytest.mark.parametrize("depth", [1, 2, 3, 63, 64, 65, 1000])
def test_ways_up_of_any_length_are_followed_to_their_end(depth: int) -> None:
    chain = [make_row(n, n - 1 if n else None, position=n) for n in range(depth)]
    cut = [make_row(("x", n), ("x", n - 1), position=depth + n) for n in range(1, depth)]
    left = names(popped(table_of(*chain, *cut)))
    assert left == [*range(2 * depth - 1, depth, -1), *range(depth - 1, -1, -1)]


def test_an_index_finds_keys_that_share_their_first_bytes() -> None:
    head = b"\x07" * 24
    rows = [make_row(0)._replace(key=ChunkKey(head + bytes([n]) * 8)) for n in range(40)]
    array = Rows.of([*rows, rows[3]]).array
    index = KeyIndex(array)
    assert index.find(rows[17].key) == 17
    assert index.find(rows[3].key) == 40
    assert index.find(head + b"\xff" * 8) == -1
    assert index.repeated() == [3]
    expected = [40 if n == 3 else n for n in range(40)] + [40]
    assert index.find_all(key_words(array, "key")).tolist() == expected


def test_rows_are_96_bytes_and_no_parent_is_zeros() -> None:
    made = tuple(make_row(n, n - 1 if n else None) for n in range(3))
    rows = Rows.of(made)
    assert rows.array.itemsize == 96
    assert rows.array["parent"][0].item() == NO_PARENT
    assert state_of(rows) == made
    assert len(Rows.of([])) == 0
