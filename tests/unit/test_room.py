"""Which directory takes a chunk, and how long others leave for it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvtier.constants import TRIM_CHUNKS_MAX
from kvtier.tiers.disk.room import has_place, make_room


@dataclass
class Shelf:
    """A directory of which only the figures are there."""

    room_bytes: int
    capacity_bytes: int = 100
    accepts: bool = True
    readable: bool = True


class Leaving:
    """Chunks that leave when more room is asked for: (shelf, bytes), the first one first."""

    def __init__(self, *chunks: tuple[Shelf, int]) -> None:
        self.left = list(chunks)

    def __call__(self) -> bool:
        if not self.left:
            return False
        shelf, nbytes = self.left.pop(0)
        shelf.room_bytes += nbytes
        return True


def test_the_one_with_most_room_takes_a_chunk_and_nothing_leaves() -> None:
    shelves = [Shelf(10), Shelf(30), Shelf(20)]
    leaving = Leaving((shelves[0], 90))
    assert make_room(shelves, 10, leaving) is shelves[1]
    assert len(leaving.left) == 1


def test_only_one_that_accepts_takes_a_chunk() -> None:
    shelves = [Shelf(10), Shelf(30, accepts=False)]
    assert make_room(shelves, 10, Leaving()) is shelves[0]
    shelves[0].accepts = False
    assert make_room(shelves, 10, Leaving()) is None


def test_one_that_can_be_read_goes_before_one_with_more_room() -> None:
    shelves = [Shelf(10), Shelf(30, readable=False)]
    assert make_room(shelves, 10, Leaving()) is shelves[0]
    shelves[0].accepts = False
    assert make_room(shelves, 10, Leaving()) is shelves[1]


def test_chunks_leave_until_one_has_room_wherever_the_first_ones_lay() -> None:
    """The first one takes no writes: whatever leaves there is no room for anybody."""
    shelves = [Shelf(0, accepts=False), Shelf(0)]
    leaving = Leaving(*[(shelves[0], 10)] * 7, (shelves[1], 10), (shelves[1], 10))
    assert make_room(shelves, 10, leaving) is shelves[1]
    assert len(leaving.left) == 1, "no more leaves than must"


def test_small_chunks_make_room_for_a_large_one() -> None:
    shelves = [Shelf(0), Shelf(0)]
    leaving = Leaving(*[(shelves[number % 2], 10) for number in range(20)])
    assert make_room(shelves, 55, leaving) in shelves
    assert len(leaving.left) == 20 - 11


def test_no_room_when_nothing_may_leave_any_more() -> None:
    shelves = [Shelf(0), Shelf(0)]
    assert make_room(shelves, 10, Leaving((shelves[0], 9))) is None


def test_in_one_directory_all_that_may_leave_has_left_before() -> None:
    shelf = Shelf(9)
    leaving = Leaving((shelf, 10))
    assert make_room([shelf], 10, leaving) is None
    assert len(leaving.left) == 1


def test_a_chunk_larger_than_a_share_drives_nothing_out() -> None:
    shelves = [Shelf(0), Shelf(0)]
    leaving = Leaving((shelves[0], 100))
    assert make_room(shelves, 101, leaving) is None
    assert len(leaving.left) == 1


def test_so_many_chunks_leave_for_one_at_most() -> None:
    shelves = [Shelf(0, accepts=False), Shelf(0)]
    leaving = Leaving(*[(shelves[0], 1)] * (TRIM_CHUNKS_MAX + 5))
    assert make_room(shelves, 10, leaving) is None
    assert len(leaving.left) == 5


@pytest.mark.parametrize(
    ("nbytes", "accepts", "expected"),
    [(100, True, True), (101, True, False), (1, False, False)],
)
def test_a_place_is_one_that_accepts_writes_and_is_large_enough(
    nbytes: int, accepts: bool, expected: bool
) -> None:
    assert has_place([Shelf(0, accepts=accepts), Shelf(0, 0)], nbytes) is expected
    assert not has_place([], nbytes)
