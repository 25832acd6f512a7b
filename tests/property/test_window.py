"""Addresses behind an arena: whatever is lent and given back, none is used twice or forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.constants import LENT_BYTES_MAX
from kvtier.errors import TierError
from kvtier.interfaces import Loan
from kvtier.tiers.window import Window
from kvtier.types import Placement, Slot

START, LENT_MAX = 1 << 20, 10 * 4096
PAGES = st.integers(1, 6)


class Bytes:
    """A loan of some bytes of ours."""

    def __init__(self, nbytes: int) -> None:
        self.view = memoryview(bytes(nbytes))
        self.holds = True
        self.released = 0

    def release(self) -> None:
        self.released += 1


class WindowMachine(RuleBasedStateMachine):
    """Against a dictionary of the slots that are out, with the loan in each, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(START, lent_bytes_max=LENT_MAX)
        self.out: dict[Slot, Bytes | None] = {}
        self.seen_to = START
        self.loans: list[Bytes] = []

    @rule(pages=PAGES)
    def reserve(self, pages: int) -> None:
        nbytes = pages * 4096
        slot = self.window.reserve(nbytes)
        room = LENT_MAX - sum(each.nbytes for each in self.out)
        assert (slot is None) is (nbytes > room)
        if slot is not None:
            assert slot.nbytes == nbytes
            assert slot.offset >= self.seen_to, "an address was used twice"
            self.seen_to = slot.offset + slot.nbytes
            self.out[slot] = None

    @precondition(lambda self: None in self.out.values())
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        empty = [slot for slot, loan in self.out.items() if loan is None]
        slot = data.draw(st.sampled_from(empty))
        with pytest.raises(TierError):
            self.window.view(slot)
        loan = self.out[slot] = Bytes(slot.nbytes)
        self.loans.append(loan)
        self.window.lend(slot, loan)

    @precondition(lambda self: any(self.out.values()))
    @rule(data=st.data())
    def take_away(self, data: st.DataObject) -> None:
        loan = data.draw(st.sampled_from([each for each in self.out.values() if each]))
        loan.holds = False

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.out)))
        loan = self.out.pop(slot)
        self.window.free(slot)
        assert loan is None or loan.released == 1
        with pytest.raises(TierError):
            self.window.view(slot)
        assert not self.window.intact([slot])

    @invariant()
    def each_slot_shows_its_loan(self) -> None:
        for slot, loan in self.out.items():
            assert self.window.holds_slot(slot)
            assert self.window.intact([slot]) is (loan is not None and loan.holds)
            assert loan is None or self.window.view(slot) is loan.view
        assert self.window.lent_bytes == sum(slot.nbytes for slot in self.out)
        assert self.window.offsets == {slot.offset for slot in self.out}
        kept = [loan for loan in self.loans if not loan.released]
        assert len(kept) == sum(loan is not None for loan in self.out.values())
        self.window.check_integrity()


TestWindow: Any = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_it_serves_workers_that_have_all_said_so() -> None:
    window = Window(START)
    ranks = [Placement(0, 0, 2), Placement(1, 1, 2)]
    window.open(0, reads=True)
    assert window.serves(ranks[:1])
    assert not window.serves(ranks)
    window.open(1, reads=True)
    assert window.serves(ranks)
    window.open(0, reads=False)
    assert not window.serves(ranks)


def test_slots_of_the_arena_are_none_of_its_own() -> None:
    window = Window(START)
    inside = Slot(START - 4096, 4096)
    assert not window.holds_slot(inside)
    assert window.intact([inside]), "what lies in the arena is nobody else's"


def test_no_more_is_lent_than_the_limit() -> None:
    window = Window(START)
    assert window.reserve(LENT_BYTES_MAX) is not None
    assert window.reserve(4096) is None


def test_a_loan_is_what_the_window_takes() -> None:
    assert isinstance(Bytes(1), Loan)
